//! Prints a generated page of the book: `make reference-docs` writes them to `docs/`.

use std::process::ExitCode;

use gradwire_cli::reference;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("cli") => print!("{}", reference::commands()),
        Some("configuration") => print!("{}", reference::settings()),
        _ => {
            eprintln!("usage: reference cli | configuration");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
