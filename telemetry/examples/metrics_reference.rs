//! Prints the reference of all metrics. `make metrics-docs` writes it to `docs/metrics.md`.

fn main() {
    print!("{}", gradwire_telemetry::reference::markdown());
}
