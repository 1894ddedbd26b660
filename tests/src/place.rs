//! A folder to run the real `gradwire` in, with fakes of `gradwired` and ssh.
//!
//! The fake daemon says that it serves and waits until it is ended, so these tests are about how
//! processes are started, watched and ended. The fake ssh logs its command line, prints a greeting,
//! and runs the remote command in a separate environment, like a login on another host.
use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    io::Read,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use crate::launched::programs;

/// How long anything may take before the test gives up.
const LIMIT: Duration = Duration::from_secs(600);

const DAEMON: &str = r#"#!/bin/sh
trap 'exit 0' TERM
echo '{"event":"serving","metrics":"127.0.0.1:1","data":"127.0.0.1:2","grpc":"127.0.0.1:3"}'
while :; do sleep 0.05; done
"#;

const SSH: &str = r#"#!/bin/sh
printf '%s\n' "$*" >> "$FAKE_SSH_LOG"
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
case $host in
bad*) echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255;;
bare*) echo "sh: 1: gradwire: not found" >&2; exit 127;;
mute*) exec sleep 600;;
esac
printf 'Welcome in latin-1 and on an open line: \374'
exec env -i PATH=/usr/bin:/bin HOME=/ SSH_CONNECTION="127.0.0.1 1 127.0.0.3 22" sh -c "$*"
"#;

/// The result of a finished command.
#[derive(Debug)]
pub struct Output {
    /// Its exit code, unless a signal ended it.
    pub code: Option<i32>,
    /// What it wrote to standard output.
    pub stdout: String,
    /// What it wrote to standard error.
    pub stderr: String,
}

impl Output {
    /// The line in which the launcher reports the cause.
    pub fn verdict(&self) -> &str {
        self.stderr.lines().find(|line| line.contains(" s after start")).unwrap_or_default()
    }

    /// The cells of each row of the table of a measurement, without the prefixes of ranks.
    pub fn rows(&self) -> Vec<Vec<&str>> {
        let lines = self.stdout.lines().map(|line| line.strip_prefix("[0] ").unwrap_or(line));
        let rows = lines.filter(|line| !line.starts_with('#'));
        rows.map(|line| line.split_whitespace().collect()).collect()
    }
}

/// A folder with the fakes, which is removed when this is dropped.
#[derive(Debug)]
pub struct Place {
    dir: tempfile::TempDir,
    /// A unique number of seconds to sleep, which identifies left-over processes.
    pub nap: String,
}

impl Place {
    /// A new folder.
    #[expect(clippy::new_without_default, reason = "it makes a folder")]
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let unique =
            dir.path().metadata().map(|m| std::os::unix::fs::MetadataExt::ino(&m)).unwrap();
        let place = Self { dir, nap: format!("{}.{unique}", 600 + std::process::id() % 1000) };
        place.script("gradwired", DAEMON);
        place.script("ssh", SSH);
        place
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// An executable file in it. Returns its path.
    pub fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// A command for `gradwire` with these words.
    pub fn gradwire(&self, words: &[&str]) -> Command {
        self.program(programs::gradwire(), words)
    }

    /// A program with these words, to be started as `gradwire` is.
    pub fn program(&self, program: impl AsRef<OsStr>, words: &[&str]) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars() {
            if name.starts_with("GRADWIRE_") {
                command.env_remove(name);
            }
        }
        command
            .args(words)
            .current_dir(self.path())
            .env("GRADWIRE_LAUNCH__GRADWIRED", self.path().join("gradwired"))
            .env("GRADWIRE_LAUNCH__SSH", self.path().join("ssh"))
            .env("GRADWIRE_LAUNCH__REMOTE_GRADWIRE", programs::gradwire())
            .env("GRADWIRE_LAUNCH__GRACE_MS", "500")
            .env("TMPDIR", self.path())
            .env_remove("XDG_RUNTIME_DIR")
            .env("FAKE_SSH_LOG", self.path().join("ssh.log"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs `gradwire` to its end.
    pub fn run(&self, words: &[&str]) -> Output {
        finish(self.gradwire(words).spawn().unwrap())
    }

    /// Runs `gradwire` with the real daemon to its end.
    pub fn measure(&self, words: &[&str]) -> Output {
        let mut command = self.gradwire(words);
        let daemon = programs::gradwired();
        finish(command.env("GRADWIRE_LAUNCH__GRADWIRED", daemon).spawn().unwrap())
    }

    /// Command lines on this machine that hold `text`.
    pub fn running(text: &str) -> Vec<String> {
        Self::processes(text).into_values().collect()
    }

    /// Processes on this machine whose command lines hold `text`.
    pub fn processes(text: &str) -> BTreeMap<u32, String> {
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let lines = entries.filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            (pid != std::process::id() && line.contains(text)).then_some((pid, line))
        });
        lines.collect()
    }

    /// CLEAN: no process of this place runs. With `soon`, it may still be ending.
    pub fn assert_clean(&self, soon: bool) {
        let start = Instant::now();
        loop {
            let mut left = Self::running(&self.nap);
            left.extend(Self::running(&self.path().display().to_string()));
            if left.is_empty() {
                return;
            }
            assert!(soon && start.elapsed() < LIMIT, "left behind: {left:#?}");
            sleep(Duration::from_millis(20));
        }
    }
}

/// Waits for a command and collects its output.
pub fn finish(mut child: Child) -> Output {
    let read = |pipe: Option<Box<dyn Read + Send>>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut pipe) = pipe {
                pipe.read_to_end(&mut bytes).unwrap();
            }
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let stdout = read(child.stdout.take().map(|pipe| Box::new(pipe) as _));
    let stderr = read(child.stderr.take().map(|pipe| Box::new(pipe) as _));
    let status = wait(&mut child);
    Output { code: status.code(), stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
}

/// Waits for a process to end.
pub fn wait(child: &mut Child) -> std::process::ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            panic!("the command did not end");
        }
        sleep(Duration::from_millis(5));
    }
}

/// Waits until a condition holds.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < LIMIT, "{what} did not happen");
        sleep(Duration::from_millis(5));
    }
}

/// Sends a signal by name to a process.
pub fn kill(signal: &str, pid: u32) {
    let status = Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status();
    assert!(status.unwrap().success());
}

/// The processes that a process has started and that still run, by all of its threads.
pub fn children(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let files = threads.map(|thread| thread.unwrap().path().join("children"));
    let texts: Vec<String> = files.filter_map(|file| std::fs::read_to_string(file).ok()).collect();
    texts.iter().flat_map(|text| text.split_whitespace()).map(|it| it.parse().unwrap()).collect()
}

/// A cell of a table as a number.
pub fn number(cell: &str) -> f64 {
    cell.parse().unwrap_or_else(|_| panic!("'{cell}' is not a number"))
}
