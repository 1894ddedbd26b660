//! The reference of the metrics matches the declarations.

use std::{fs, path::Path};

#[test]
fn the_reference_is_up_to_date() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let written = fs::read_to_string(&page).expect("docs/metrics.md");
    let generated = gradwire_telemetry::reference::markdown();
    for (number, (written, generated)) in written.lines().zip(generated.lines()).enumerate() {
        assert_eq!(written, generated, "docs/metrics.md:{}: run make metrics-docs", number + 1);
    }
    assert_eq!(written, generated, "docs/metrics.md: run make metrics-docs");
}
