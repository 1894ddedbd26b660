//! The references of the command line and of the settings match the declarations.

use std::{fs, path::Path};

use gradwire_cli::reference;

fn is_up_to_date(page: &str, generated: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(page);
    let written = fs::read_to_string(&path).unwrap_or_default();
    for (number, (written, generated)) in written.lines().zip(generated.lines()).enumerate() {
        assert_eq!(written, generated, "docs/{page}:{}: run make reference-docs", number + 1);
    }
    assert_eq!(written, generated, "docs/{page}: run make reference-docs");
}

#[test]
fn the_commands_are_up_to_date() {
    is_up_to_date("cli.md", &reference::commands());
}

#[test]
fn the_settings_are_up_to_date() {
    is_up_to_date("configuration.md", &reference::settings());
}
