//! `gradwire config show`: each setting with its value and its origin.

use std::fmt::Write;

use gradwire_launcher::error::CommandError;
use gradwire_settings::{Audience, Loaded, Origin, Row};

/// One line for each setting: `key = value # origin`. With `explain`, its meaning, its possible
/// values, its unit and its variable come before it.
///
/// Without `all`, only the settings that users change, and any other that is not at its default.
pub fn show(loaded: &Loaded, all: bool, explain: bool) -> String {
    let assigned = |row: &Row| format!("{} = {}", row.key.name, quoted(&row.value));
    let shown: Vec<&Row> = shown(loaded, all).collect();
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

/// The settings that users change and those that are not at their default, or all.
fn shown(loaded: &Loaded, all: bool) -> impl Iterator<Item = &Row> {
    loaded.rows.iter().filter(move |row| {
        all || row.key.audience == Audience::User || row.origin != Origin::Default
    })
}

/// The same settings as JSON: a list of objects.
///
/// # Errors
/// [`CommandError`] if they can't be written as JSON.
pub fn to_json(loaded: &Loaded, all: bool) -> Result<String, CommandError> {
    let object = |row: &Row| {
        let key = row.key;
        let audience = match key.audience {
            Audience::User => "user",
            Audience::Measured => "measured",
            Audience::Internal => "internal",
        };
        serde_json::json!({
            "key": key.name,
            "value": row.value,
            "origin": row.origin.to_string(),
            "audience": audience,
            "meaning": key.doc,
            "takes": key.kind.to_string(),
            "unit": key.unit,
            "variable": key.variable(),
        })
    };
    let objects: Vec<_> = shown(loaded, all).map(object).collect();
    let text = serde_json::to_string_pretty(&objects).map_err(CommandError::failed)?;
    Ok(format!("{text}\n"))
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
            flags: vec!["data.threads=4".into(), "node.rack=r\"1".into()],
            ..Layers::default()
        };
        let loaded = Settings::load(&layers).unwrap();
        let text = show(&loaded, true, false);
        assert_eq!(text.lines().count(), KEYS.len());
        let line = text.lines().find(|line| line.starts_with("data.threads = 4 ")).unwrap();
        assert!(line.ends_with("# command line"), "{line}");

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shown.toml");
        std::fs::write(&path, show(&loaded, true, true)).unwrap();
        let again = Settings::load(&Layers { file: Some(path), ..Layers::default() }).unwrap();
        assert_eq!(again.settings, loaded.settings);
    }

    #[test]
    fn settings_are_json_too() {
        let flags = vec!["data.streams=2".into()];
        let loaded = Settings::load(&Layers { flags, ..Layers::default() }).unwrap();
        let all: serde_json::Value =
            serde_json::from_str(&to_json(&loaded, true).unwrap()).unwrap();
        assert_eq!(all.as_array().unwrap().len(), KEYS.len());
        let some: serde_json::Value =
            serde_json::from_str(&to_json(&loaded, false).unwrap()).unwrap();
        let streams = some.as_array().unwrap().iter().find(|row| row["key"] == "data.streams");
        assert_eq!(streams.unwrap()["value"], "2");
        assert_eq!(streams.unwrap()["origin"], "command line");
    }

    #[test]
    fn rare_settings_are_shown_if_changed_or_asked() {
        let flags = vec!["network.rate_mbit=1000".into(), "data.streams=2".into()];
        let loaded = Settings::load(&Layers { flags, ..Layers::default() }).unwrap();
        let text = show(&loaded, false, false);
        let lines: Vec<_> = text.lines().collect();
        // The settings that users change, two that this test changed, and a count of the rest.
        let users = KEYS.iter().filter(|key| key.audience == Audience::User).count();
        assert_eq!(lines.len(), users + 2 + 1, "{text}");
        assert!(text.contains("# command line (measured)"), "{text}");
        assert!(text.contains("# command line (internal)"), "{text}");
        let rest = KEYS.len() - users - 2;
        let more = format!("# {rest} more settings: gradwire config show --all");
        assert_eq!(lines.last(), Some(&more.as_str()));
        assert!(!show(&loaded, true, false).contains("more settings"));
    }
}
