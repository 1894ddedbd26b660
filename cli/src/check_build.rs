//! `gradwire run --check-build`: what this build has, in the form of horovodrun's.

use std::process::{Command, Stdio};

/// The packages that python3 may have.
const FRAMEWORKS: [&str; 5] = ["torch", "tensorflow", "keras", "jax", "numpy"];

/// Prints which of them python3 can import, without importing them.
const LOOK: &str = "\
import importlib.metadata, importlib.util, sys
print(sys.executable)
for name in sys.argv[1:]:
    version = ''
    if importlib.util.find_spec(name):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = 'unknown version'
    print(name, version)
";

/// What this build has, and which frameworks python3 finds.
pub fn describe() -> String {
    let looked = Command::new("python3")
        .args(["-c", LOOK, "gradwire"])
        .args(FRAMEWORKS)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let text = looked.ok().filter(|done| done.status.success()).map(|done| done.stdout);
    let text = text.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    describe_with(text.as_deref())
}

fn describe_with(python: Option<&str>) -> String {
    let mut text = format!(
        "gradwire {}\n\n\
         Transports:\n    \
         [X] shared memory inside a host\n    \
         [X] TCP between hosts\n    \
         [ ] MPI, NCCL, Gloo, oneCCL: not used\n",
        gradwire_proto::VERSION
    );
    let Some(python) = python else {
        text += "\npython3 is not in PATH, or does not run: programs in Python need it\n";
        return text;
    };
    let mut lines = python.lines();
    let path = lines.next().unwrap_or_default();
    text += &format!("\nPackages of {path}:\n");
    for line in lines {
        let (name, version) = line.split_once(' ').unwrap_or((line, ""));
        let line = match version {
            "" => format!("    [ ] {name}"),
            version => format!("    [X] {name} {version}"),
        };
        text += &line;
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn found_packages_are_marked() {
        let text = describe_with(Some("/bin/python3\ngradwire 1.0\ntorch 2.0\njax \n"));
        for line in ["[X] gradwire 1.0", "[X] torch 2.0", "[ ] jax\n", "of /bin/python3:"] {
            assert!(text.contains(line), "{text}");
        }
        assert!(describe_with(None).contains("python3 is not in PATH"));
    }
}
