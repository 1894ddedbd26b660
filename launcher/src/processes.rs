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
    Pid, Signal, WaitOptions, getpid, kill_process, kill_process_group, set_child_subreaper,
    waitpid,
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
    group: i32,
    zombie: bool,
}

/// Which of our descendants are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose<'a> {
    /// All of them.
    Anybodys,
    /// Those of this job, as their environment says. What else descends from us was started by
    /// others for purposes of their own: a connection of ssh's that several shells share.
    Jobs(&'a str),
}

impl Whose<'_> {
    fn includes(self, entry: &Entry) -> bool {
        let Self::Jobs(id) = self else { return true };
        let variable = format!("GRADWIRE_JOB={id}");
        let environment = std::fs::read(format!("/proc/{}/environ", entry.pid)).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|one| one == variable.as_bytes())
    }
}

/// Parses `pid (name) state parent group …`; the name may hold anything, also parentheses.
fn parse(stat: &str) -> Option<Entry> {
    let (pid, rest) = stat.split_once(" (")?;
    let mut fields = rest.rsplit_once(") ")?.1.split(' ');
    let zombie = matches!(fields.next()?, "Z" | "X");
    let (parent, group) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(Entry { pid: pid.parse().ok()?, parent, group, zombie })
}

fn me() -> i32 {
    getpid().as_raw_nonzero().get()
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
    let (mut found, mut next) = (Vec::new(), vec![me()]);
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
    for entry in descendants().iter().filter(|e| e.zombie && e.parent == me()) {
        if let (false, Some(pid)) = (is_own(entry, own), Pid::from_raw(entry.pid)) {
            // Nothing to do about an error: the process is gone either way.
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }
}

fn is_own(entry: &Entry, own: &BTreeSet<u32>) -> bool {
    u32::try_from(entry.pid).is_ok_and(|pid| own.contains(&pid))
}

/// Whether no descendant of these is alive.
fn are_gone(own: &BTreeSet<u32>, whose: Whose<'_>) -> bool {
    reap_orphans(own);
    descendants().iter().all(|entry| entry.zombie || !whose.includes(entry))
}

/// Asks all descendants to end and waits until none is alive, or the grace period is over. `own`
/// are our children that run; each is asked with its process group. What nobody looks after any
/// more, because who had started it is gone, is asked by itself, and once; the others are for those
/// to end who have started them.
pub async fn ask_all_to_end(own: &BTreeSet<u32>, grace: Duration) {
    let deadline = Instant::now() + grace;
    let mut asked: BTreeSet<i32> = BTreeSet::new();
    let groups: Vec<i32> = own.iter().filter_map(|pid| i32::try_from(*pid).ok()).collect();
    asked.extend(descendants().iter().filter(|e| groups.contains(&e.group)).map(|e| e.pid));
    for group in groups.iter().filter_map(|group| Pid::from_raw(*group)) {
        let _ = kill_process_group(group, Signal::TERM);
    }
    loop {
        reap_orphans(own);
        let alive: Vec<_> = descendants().into_iter().filter(|entry| !entry.zombie).collect();
        if alive.is_empty() || Instant::now() >= deadline {
            return;
        }
        for orphan in alive.iter().filter(|e| e.parent == me() && !is_own(e, own)) {
            if let (true, Some(pid)) = (asked.insert(orphan.pid), Pid::from_raw(orphan.pid)) {
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        sleep(LOOK).await;
    }
}

/// Kills every descendant of these, again and again, because one may be born while another is
/// killed; says whether none is left.
pub async fn kill_all(own: &BTreeSet<u32>, whose: Whose<'_>) -> bool {
    let deadline = Instant::now() + KILLED;
    loop {
        let alive = descendants().into_iter().filter(|entry| !entry.zombie);
        for entry in alive.filter(|entry| whose.includes(entry)) {
            if let Some(pid) = Pid::from_raw(entry.pid) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        if are_gone(own, whose) {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_any_name_is_read() {
        let entry = parse("12 (a) Z 1 (b) S 7 12 0").unwrap();
        assert_eq!(entry, Entry { pid: 12, parent: 7, group: 12, zombie: false });
        assert!(parse("13 (x) Z 12 1").unwrap().zombie);
        for bad in ["", "12", "12 (x)", "x (y) S 1 1", "12 (x) S", "12 (x) S 1 "] {
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
