//! In every crate, imports form no cycle: neither between files nor between sibling folders. If an
//! order of folders is declared, a lower one never imports from a higher one.

#![forbid(unsafe_code)]

mod read;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use read::{Imports, by_folder, circles};

/// The folders and files in a crate's `src`, lowest first. ARCHITECTURE.md has the reasons. Other
/// parts are only checked for cycles.
const ORDERS: &[(&str, &[&str])] = &[
    (
        "daemon",
        &[
            "metrics",
            "model",
            "transport",
            "config",
            "queue",
            "data",
            "ops",
            "workers",
            "control",
            "intake",
        ],
    ),
    (
        "coordinator",
        &[
            "error",
            "model",
            "membership",
            "agreement",
            "dispatch",
            "engine",
            "convert",
            "metrics",
            "inbox",
            "session",
            "heartbeat",
            "inspection",
            "grpc",
            "runtime",
            "host",
        ],
    ),
];

/// The roots of all crates of the workspace.
fn roots() -> Vec<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let mut roots = Vec::new();
    for entry in fs::read_dir(workspace).expect("the workspace").flatten() {
        let files = ["src/lib.rs", "src/main.rs"].map(|file| entry.path().join(file));
        if entry.path().join("Cargo.toml").exists() {
            roots.extend(files.into_iter().filter(|file| file.exists()));
        }
    }
    roots.sort();
    roots
}

/// The errors in the imports of one crate, one per line; none if all are right.
fn faults(imports: &Imports, order: &[&str]) -> Vec<String> {
    let mut faults = Vec::new();
    let files: BTreeMap<_, BTreeSet<_>> = imports
        .iter()
        .map(|(file, targets)| (file.clone(), targets.keys().cloned().collect()))
        .collect();
    for circle in circles(&files) {
        let mut text = "these files import each other:".to_owned();
        for file in &circle {
            for (target, line) in imports[file].iter().filter(|(to, _)| circle.contains(to)) {
                let (file, target) = (file.display(), target.display());
                let _ = write!(text, "\n    {file}:{line} imports {target}");
            }
        }
        faults.push(text);
    }
    let folders = by_folder(imports);
    for (folder, parts) in &folders {
        for circle in circles(parts) {
            let folder = folder.display();
            faults.push(format!("cycle in the folder '{folder}': {circle:?}"));
        }
    }
    let place = |part: &str| order.iter().position(|name| *name == part);
    for (from, targets) in folders.get(Path::new("")).into_iter().flatten() {
        for to in targets {
            if let (Some(one), Some(other)) = (place(from), place(to))
                && one < other
            {
                faults.push(format!("'{from}' imports from '{to}', which is higher"));
            }
        }
    }
    faults
}

#[test]
fn imports_go_one_way() {
    let roots = roots();
    assert!(roots.len() >= 12, "the crates were not found: {roots:?}");
    let mut report = String::new();
    for root in roots {
        let folder = root.parent().and_then(Path::parent).expect("a crate");
        let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
        // A program is one file on top of its library.
        let ordered = ORDERS.iter().find(|(krate, _)| *krate == name && root.ends_with("lib.rs"));
        let order = ordered.map_or(&[][..], |(_, order)| *order);
        let imports = read::read(&root);
        for part in order {
            let known = imports.keys().any(|file| file.with_extension("").starts_with(part));
            assert!(known, "{name} no longer has '{part}': update the order");
        }
        for fault in faults(&imports, order) {
            let _ = writeln!(report, "{name}: {fault}");
        }
    }
    assert!(report.is_empty(), "{report}");
}

/// The imports of a crate with these files.
fn made(files: &[(&str, &str)]) -> Imports {
    let folder = tempfile::tempdir().expect("a folder");
    for (file, text) in files {
        let path = folder.path().join(file);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, text).expect("a file");
    }
    read::read(&folder.path().join("lib.rs"))
}

#[test]
fn a_cycle_is_found_in_every_notation() {
    let circles = [
        ("use crate::b::B;\npub struct A;", "pub struct B(crate::a::A);"),
        ("use crate::b::B;\npub struct A;", "use super::*;\npub struct B;\nfn f(a: a::A) {}"),
        ("use crate::{b::B as C};\npub struct A;", "use crate::a;\npub struct B(a::A);"),
        ("use crate::B;\npub struct A;", "pub struct B;\nfn f() { panic!(\"{}\", crate::a::X) }"),
    ];
    for (a, b) in circles {
        let root = "mod a;\nmod b;\npub use b::B;\npub use self::a::A;";
        let faults = faults(&made(&[("lib.rs", root), ("a.rs", a), ("b/mod.rs", b)]), &[]);
        assert!(!faults.is_empty(), "{a}\n{b}");
    }
}

#[test]
fn re_exports_are_resolved_and_tests_ignored() {
    let root = "mod a;\nmod b;\npub use b::B;\npub use a::A;";
    let a = "use crate::B;\npub struct A(B);";
    let b = "pub struct B;\n#[cfg(test)]\nmod tests {\n    use crate::A;\n}";
    let imports = made(&[("lib.rs", root), ("a.rs", a), ("b.rs", b)]);
    assert_eq!(imports[Path::new("a.rs")].keys().collect::<Vec<_>>(), [Path::new("b.rs")]);
    assert_eq!(faults(&imports, &["b", "a"]), Vec::<String>::new());
    let wrong = faults(&imports, &["a", "b"]);
    assert_eq!(wrong, ["'a' imports from 'b', which is higher"]);
}

#[test]
fn cycles_between_folders_are_found() {
    let files = [
        ("lib.rs", "mod a;\nmod b;"),
        ("a/mod.rs", "mod low;\nmod high;"),
        ("a/low.rs", "pub struct Low;"),
        ("a/high.rs", "use crate::b::Middle;"),
        ("b.rs", "use crate::a::low::Low;\npub struct Middle(Low);"),
    ];
    let faults = faults(&made(&files), &[]);
    assert_eq!(faults, ["cycle in the folder '': [\"b\", \"a\"]"]);
}
