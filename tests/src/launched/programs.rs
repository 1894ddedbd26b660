//! The programs under test. Cargo builds a test together with the binaries of its own crate only.
//! Binaries of other crates are built here, unless they are newer than their sources.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::SystemTime,
};

/// The folder of cargo's programs: the test's own folder, or the one above `deps`.
fn folder() -> PathBuf {
    let own = env::current_exe().expect("the own program");
    let folder = own.parent().expect("a folder");
    let above = folder.parent().filter(|_| folder.ends_with("deps"));
    above.unwrap_or(folder).to_owned()
}

/// A program in that folder.
pub fn beside(name: &str) -> PathBuf {
    folder().join(name)
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|meta| meta.modified()).ok()
}

/// Whether a program is newer than all its sources, which cargo lists in a file next to it.
fn is_fresh(program: &Path) -> bool {
    let list = fs::read_to_string(program.with_extension("d")).unwrap_or_default();
    let (Some(built), Some((_, files))) = (modified(program), list.trim().split_once(": ")) else {
        return false;
    };
    // Spaces in paths are escaped by a backslash.
    let files = files.replace("\\ ", "\u{0}");
    files.split(' ').all(|file| {
        modified(Path::new(&file.replace('\u{0}', " "))).is_some_and(|time| time <= built)
    })
}

fn build(words: &[&str]) {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.arg("build").args(words).current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    if folder().ends_with("release") {
        cargo.arg("--release");
    }
    let output = cargo.output().expect("cargo");
    assert!(
        output.status.success(),
        "cargo build {words:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// `gradwire`, with `gradwired` next to it.
pub fn gradwire() -> PathBuf {
    static BUILT: OnceLock<()> = OnceLock::new();
    let gradwire = beside("gradwire");
    BUILT.get_or_init(|| {
        if !is_fresh(&gradwire) || !is_fresh(&beside("gradwired")) {
            // Building only some crates would rebuild dependencies with different features.
            build(&["--workspace", "--bins"]);
        }
    });
    gradwire
}

/// `gradwired`, with `gradwire` next to it.
pub fn gradwired() -> PathBuf {
    gradwire();
    beside("gradwired")
}

fn example(package: &str, name: &str, built: &OnceLock<()>) -> PathBuf {
    let program = beside("examples").join(name);
    built.get_or_init(|| {
        if !is_fresh(&program) {
            build(&["-p", package, "--example", name]);
        }
    });
    program
}

/// The trainer of `make demo-rust`. It needs libtorch at build time, named by environment
/// variables.
pub fn digits() -> PathBuf {
    static BUILT: OnceLock<()> = OnceLock::new();
    example("gradwire-tch", "digits", &BUILT)
}

/// The elastic program of the worker library.
pub fn elastic() -> PathBuf {
    static BUILT: OnceLock<()> = OnceLock::new();
    example("gradwire-worker", "elastic", &BUILT)
}
