//! `gradwire config show`: each setting with its value and its origin.

use std::fmt::Write;

use gradwire_settings::{Loaded, Row};

/// One line for each setting: `key = value # origin`. With `explain`, its meaning, its possible
/// values, its unit and its variable come before it.
pub fn show(loaded: &Loaded, explain: bool) -> String {
    let assigned = |row: &Row| format!("{} = {}", row.key.name, quoted(&row.value));
    let width = loaded.rows.iter().map(|row| assigned(row).len().min(50)).max().unwrap_or(0);
    let mut text = String::new();
    for row in &loaded.rows {
        if explain {
            let key = row.key;
            let unit = if key.unit.is_empty() { String::new() } else { format!(" ({})", key.unit) };
            // Writing to a string can't fail.
            let _ = writeln!(text, "# {}", key.doc);
            let _ = writeln!(text, "# Takes {}{unit}; {}.", key.kind, key.variable());
        }
        let _ = writeln!(text, "{:width$}  # {}", assigned(row), row.origin);
        if explain {
            text.push('\n');
        }
    }
    text
}

/// A value as TOML: a bare number, or a quoted string.
fn quoted(value: &str) -> String {
    if !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit()) {
        return value.to_owned();
    }
    format!("{value:?}")
}

#[cfg(test)]
mod tests {
    use gradwire_settings::{KEYS, Layers, Settings};

    use super::*;

    #[test]
    fn shown_keys_can_be_read_back() {
        let layers = Layers {
            flags: vec!["data.lanes=4".into(), "node.rack=r\"1".into()],
            ..Layers::default()
        };
        let loaded = Settings::load(&layers).unwrap();
        let text = show(&loaded, false);
        assert_eq!(text.lines().count(), KEYS.len());
        let line = text.lines().find(|line| line.starts_with("data.lanes = 4 ")).unwrap();
        assert!(line.ends_with("# command line"), "{line}");

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shown.toml");
        std::fs::write(&path, show(&loaded, true)).unwrap();
        let again = Settings::load(&Layers { file: Some(path), ..Layers::default() }).unwrap();
        assert_eq!(again.settings, loaded.settings);
    }
}
