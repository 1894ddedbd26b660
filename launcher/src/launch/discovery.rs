//! The hosts of an elastic job as a script of the user lists them, again and again.

use std::{path::PathBuf, process::Stdio, time::Duration};

use rustix::process::Signal;
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    process::Command,
    sync::mpsc,
    time::{sleep, timeout},
};

use super::{
    hosts::{Host, parse_script},
    job::events::Event,
};
use crate::{processes, reach::Reached};

/// The time between two runs.
const PERIOD: Duration = Duration::from_secs(1);

/// How long a run may take (WAIT).
const LIMIT: Duration = Duration::from_secs(10);

/// The most output of a run, in bytes (BOUND).
const MAX_OUTPUT: u64 = 1 << 20;

/// The script of `--host-discovery-script`.
#[derive(Debug, Clone)]
pub struct Script {
    /// Its path.
    pub path: PathBuf,
    /// The slots of a host that it prints without a number.
    pub slots: u32,
}

impl Script {
    /// Runs the script once.
    ///
    /// # Errors
    /// Why the list is missing, with the line of output that is wrong.
    pub async fn run(&self) -> Result<Vec<Host>, String> {
        let shown = self.path.display();
        let named = |what: String| format!("the host discovery script {shown} {what}");
        // A name without a slash would be looked for in PATH.
        let path = std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone());
        let child = Command::new(path)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| named(format!("can't be run: {error}")))?;
        // Its group is killed if it does not end (CLEAN).
        let mut child = Reached(child);
        let pid = child.0.id().unwrap_or_default();
        let (out, err) = (child.0.stdout.take(), child.0.stderr.take());
        let work = async {
            let (out, err) = tokio::join!(read(out), read(err));
            (child.0.wait().await, out, err)
        };
        let done = timeout(LIMIT, work).await;
        // What it has started is not needed any more.
        processes::signal(pid, Signal::KILL);
        let Ok((status, out, err)) = done else {
            return Err(named(format!("does not end within {} s", LIMIT.as_secs())));
        };
        let (Some(out), Some(err)) = (out, err) else {
            return Err(named(format!("prints more than {} MiB", MAX_OUTPUT >> 20)));
        };
        let status = status.map_err(|error| named(format!("failed: {error}")))?;
        if !status.success() {
            let last = err.lines().rev().find(|line| !line.trim().is_empty());
            let last = last.map(|line| format!(": {}", line.trim())).unwrap_or_default();
            return Err(named(format!("failed ({status}){last}")));
        }
        parse_script(&shown.to_string(), &out, self.slots).map_err(|error| error.to_string())
    }

    /// Runs the script every second, and reports each new list, and the first failure after a list.
    pub async fn watch(self, mut known: Result<Vec<Host>, String>, events: mpsc::Sender<Event>) {
        loop {
            sleep(PERIOD).await;
            let found = self.run().await;
            let is_news = match (&found, &known) {
                (Err(_), Err(_)) => false,
                (found, known) => found != known,
            };
            if is_news {
                known.clone_from(&found);
                if events.send(Event::Listed(found)).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// All text of an output; `None` if it is too long.
async fn read(output: Option<impl AsyncRead + Unpin>) -> Option<String> {
    let mut bytes = Vec::new();
    if let Some(output) = output {
        // An output that breaks has ended.
        let _ = output.take(MAX_OUTPUT + 1).read_to_end(&mut bytes).await;
    }
    let fits = u64::try_from(bytes.len()).is_ok_and(|length| length <= MAX_OUTPUT);
    fits.then(|| String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    async fn run(text: &str) -> Result<Vec<String>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let hosts = Script { path, slots: 3 }.run().await;
        Ok(hosts?.iter().map(ToString::to_string).collect())
    }

    #[tokio::test]
    async fn a_script_lists_hosts() {
        let hosts = run("printf '# all\\n\\na:2\\n  b # new\\n[::1]:4\\n'").await;
        assert_eq!(hosts.unwrap(), ["a:2", "b:3", "[::1]:4"]);
    }

    #[tokio::test]
    async fn a_failed_script_says_why() {
        for (text, expected) in [
            ("echo a; echo b:x", "line 2, 'b:x': 'x' is not a slot count"),
            ("echo a; echo a:2", "line 2, 'a:2': host a is given twice"),
            ("echo; echo '# x'", "no hosts are given"),
            ("echo zonk >&2; exit 3", "failed (exit status: 3): zonk"),
            ("yes", "prints more than 1 MiB"),
        ] {
            let error = run(text).await.unwrap_err();
            assert!(error.contains(expected), "{error}");
            assert!(error.contains("host discovery script /"), "{error}");
        }
        let missing = Script { path: "./zonk".into(), slots: 1 }.run().await.unwrap_err();
        assert!(missing.contains("./zonk can't be run: No such file"), "{missing}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_script_that_hangs_is_ended() {
        let error = run("sleep 1000 & sleep 1000").await.unwrap_err();
        assert!(error.contains("does not end within 10 s"), "{error}");
    }
}
