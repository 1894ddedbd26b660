//! Nothing stays behind (CLEAN): who descends from this process, and the end of them all.
//!
//! A rank may start processes of its own, and they may leave its process group or outlive it. As
//! a *subreaper* this process becomes the parent of every orphan among its descendants, so all of
//! them can be found by walking `/proc` from here, whatever they did.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid,
};
use tokio::time::{Instant, sleep};

/// How often it is looked whether processes are gone.
const LOOK: Duration = Duration::from_millis(10);

/// How long killed processes may take to vanish; one in an uninterruptible wait takes longer.
const KILLED: Duration = Duration::from_secs(2);

/// Makes this process the parent of its orphaned descendants.
///
/// # Errors
/// What the system said.
pub fn adopt_orphans() -> std::io::Result<()> {
    Ok(set_child_subreaper(Some(getpid()))?)
}

/// A process, as `/proc/<pid>/stat` tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    pid: i32,
    parent: i32,
    zombie: bool,
}

/// Parses `pid (name) state parent …`; the name may hold anything, also parentheses.
fn parse(stat: &str) -> Option<Entry> {
    let (pid, rest) = stat.split_once(" (")?;
    let mut fields = rest.rsplit_once(") ")?.1.split(' ');
    let zombie = matches!(fields.next()?, "Z" | "X");
    Some(Entry { pid: pid.parse().ok()?, parent: fields.next()?.parse().ok()?, zombie })
}

fn descendants() -> Vec<Entry> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut children: BTreeMap<i32, Vec<Entry>> = BTreeMap::new();
    for entry in entries.flatten() {
        let is_pid = entry.file_name().to_string_lossy().bytes().all(|b| b.is_ascii_digit());
        // A process that ends while we look has no stat any more.
        let stat = is_pid.then(|| std::fs::read_to_string(entry.path().join("stat")).ok());
        if let Some(entry) = stat.flatten().as_deref().and_then(parse) {
            children.entry(entry.parent).or_default().push(entry);
        }
    }
    let (mut found, mut next) = (Vec::new(), vec![getpid().as_raw_nonzero().get()]);
    while let Some(parent) = next.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            next.push(child.pid);
            found.push(child);
        }
    }
    found
}

/// Reaps adopted orphans that have ended. `own` are children that somebody else waits for.
pub fn reap_orphans(own: &BTreeSet<u32>) {
    let me = getpid().as_raw_nonzero().get();
    for entry in descendants().iter().filter(|e| e.zombie && e.parent == me) {
        let ours = u32::try_from(entry.pid).is_ok_and(|pid| own.contains(&pid));
        if let (false, Some(pid)) = (ours, Pid::from_raw(entry.pid)) {
            // Nothing to do about an error: the process is gone either way.
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }
}

/// Waits until no descendant is alive or the time is over; says whether none is.
pub async fn all_gone(own: &BTreeSet<u32>, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        reap_orphans(own);
        if descendants().iter().all(|entry| entry.zombie) {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        sleep(LOOK).await;
    }
}

/// Kills every descendant, again and again, because one may be born while another is killed;
/// says whether none is left.
pub async fn kill_all(own: &BTreeSet<u32>) -> bool {
    let deadline = Instant::now() + KILLED;
    loop {
        for entry in descendants().iter().filter(|entry| !entry.zombie) {
            if let Some(pid) = Pid::from_raw(entry.pid) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        if all_gone(own, LOOK).await {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_any_name_is_read() {
        let entry = parse("12 (a) Z 1 (b) S 7 12 0").unwrap();
        assert_eq!(entry, Entry { pid: 12, parent: 7, zombie: false });
        assert!(parse("13 (x) Z 12 1").unwrap().zombie);
        for bad in ["", "12", "12 (x)", "x (y) S 1 ", "12 (x) S"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_child_is_found() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert!(descendants().iter().any(|entry| entry.pid == pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!descendants().iter().any(|entry| entry.pid == pid));
    }
}
