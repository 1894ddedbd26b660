//! `gradwire config show`: each setting with its value and its origin.

use std::fmt::Write;

use gradwire_settings::{Audience, Loaded, Origin, Row};

/// One line for each setting: `key = value # origin`. With `explain`, its meaning, its possible
/// values, its unit and its variable come before it.
///
/// Without `all`, only the settings that users change, and any other that is not at its default.
pub fn show(loaded: &Loaded, all: bool, explain: bool) -> String {
    let assigned = |row: &Row| format!("{} = {}", row.key.name, quoted(&row.value));
    let is_shown =
        |row: &&Row| all || row.key.audience == Audience::User || row.origin != Origin::Default;
    let shown: Vec<&Row> = loaded.rows.iter().filter(is_shown).collect();
    let width = shown.iter().map(|row| assigned(row).len().min(50)).max().unwrap_or(0);
    let mut text = String::new();
    for row in &shown {
        if explain {
            let key = row.key;
            let unit = if key.unit.is_empty() { String::new() } else { format!(" ({})", key.unit) };
            // Writing to a string can't fail.
            let _ = writeln!(text, "# {}", key.doc);
            let _ = writeln!(text, "# Takes {}{unit}; {}.", key.kind, key.variable());
        }
        let audience = match row.key.audience {
            Audience::User => "",
            Audience::Measured => " (measured)",
            Audience::Internal => " (internal)",
        };
        let _ = writeln!(text, "{:width$}  # {}{audience}", assigned(row), row.origin);
        if explain {
            text.push('\n');
        }
    }
    let hidden = loaded.rows.len() - shown.len();
    if hidden > 0 {
        let _ = writeln!(text, "# {hidden} more settings: gradwire config show --all");
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
        let text = show(&loaded, true, false);
        assert_eq!(text.lines().count(), KEYS.len());
        let line = text.lines().find(|line| line.starts_with("data.lanes = 4 ")).unwrap();
        assert!(line.ends_with("# command line"), "{line}");

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shown.toml");
        std::fs::write(&path, show(&loaded, true, true)).unwrap();
        let again = Settings::load(&Layers { file: Some(path), ..Layers::default() }).unwrap();
        assert_eq!(again.settings, loaded.settings);
    }

    #[test]
    fn rare_settings_are_shown_if_changed_or_asked() {
        let flags = vec!["network.rate_mbit=1000".into(), "data.streams=2".into()];
        let loaded = Settings::load(&Layers { flags, ..Layers::default() }).unwrap();
        let text = show(&loaded, false, false);
        let lines: Vec<_> = text.lines().collect();
        // Twelve that users change, two that were changed here, and the number of the others.
        assert_eq!(lines.len(), 12 + 2 + 1, "{text}");
        assert!(text.contains("# command line (measured)"), "{text}");
        assert!(text.contains("# command line (internal)"), "{text}");
        let more = format!("# {} more settings: gradwire config show --all", KEYS.len() - 14);
        assert_eq!(lines.last(), Some(&more.as_str()));
        assert!(!show(&loaded, true, false).contains("more settings"));
    }
}
