//! Finds the descendants of this process and ends them all, so that none is left behind (CLEAN).
//!
//! A rank may start processes of its own, and they may leave its process group or outlive it. As
//! a *subreaper* this process becomes the parent of every orphan among its descendants, so all of
//! them can be found by walking `/proc` from here, whatever they did.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    time::Duration,
};

use procfs::process::{Process, Stat};
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, kill_process_group, set_child_subreaper,
    waitpid,
};
use tokio::time::{Instant, sleep};

/// The interval between checks whether processes are gone.
const LOOK: Duration = Duration::from_millis(10);

/// How long killed processes may take to vanish; one in an uninterruptible wait takes longer.
const KILLED: Duration = Duration::from_secs(2);

/// The interval between such checks in a destructor, which blocks its thread.
const KILLED_LOOK: Duration = Duration::from_millis(1);

/// Makes this process the parent of its orphaned descendants.
pub fn adopt_orphans() -> std::io::Result<()> {
    Ok(set_child_subreaper(Some(getpid()))?)
}

/// Which of our descendants to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which<'a> {
    /// All of them.
    All,
    /// The ones with this job in their environment. Others may serve several jobs, such as a shared
    /// connection of ssh.
    OfJob(&'a str),
}

impl Which<'_> {
    fn includes(self, process: &Stat) -> bool {
        let Self::OfJob(id) = self else { return true };
        let variables = Process::new(process.pid).and_then(|process| process.environ());
        variables.is_ok_and(|all| all.get(OsStr::new("GRADWIRE_JOB")).is_some_and(|job| job == id))
    }
}

fn me() -> i32 {
    getpid().as_raw_nonzero().get()
}

fn is_alive(process: &Stat) -> bool {
    !matches!(process.state, 'Z' | 'X')
}

fn descendants() -> Vec<Stat> {
    let Ok(processes) = procfs::process::all_processes() else { return Vec::new() };
    let mut children: BTreeMap<i32, Vec<Stat>> = BTreeMap::new();
    // A process that ends meanwhile has no stat any more.
    for stat in processes.filter_map(|process| process.ok()?.stat().ok()) {
        children.entry(stat.ppid).or_default().push(stat);
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

/// Reaps adopted orphans that have ended. `own` are children that other code waits for.
pub fn reap_orphans(own: &BTreeSet<u32>) {
    for entry in descendants().iter().filter(|e| !is_alive(e) && e.ppid == me()) {
        if let (false, Some(pid)) = (is_own(entry, own), Pid::from_raw(entry.pid)) {
            // On an error the process is gone, too.
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }
}

fn is_own(entry: &Stat, own: &BTreeSet<u32>) -> bool {
    u32::try_from(entry.pid).is_ok_and(|pid| own.contains(&pid))
}

/// Asks all descendants to end and waits until none is alive or the grace period is over. `own` are
/// our running children. Each is asked as by [`ask`], and its whole group once the rank in it has
/// ended. Each orphan is asked once. Other descendants have a parent, which ends them.
pub async fn ask_all_to_end(own: &BTreeSet<u32>, grace: Duration) {
    let deadline = Instant::now() + grace;
    let mut asked: BTreeSet<i32> = BTreeSet::new();
    let groups = own.iter().filter_map(|pid| Pid::from_raw(i32::try_from(*pid).ok()?));
    let members = descendants();
    asked.extend(groups.clone().flat_map(|group| ask_ranks_of(group, &members, Signal::TERM)));
    // The groups in which only a rank has been asked.
    let mut groups: Vec<_> = groups
        .filter(|group| {
            let mut own = members.iter().filter(|member| member.pgrp == raw(*group));
            own.any(|member| !asked.contains(&member.pid))
        })
        .collect();
    loop {
        reap_orphans(own);
        let alive: Vec<_> = descendants().into_iter().filter(is_alive).collect();
        if alive.is_empty() || Instant::now() >= deadline {
            return;
        }
        groups.retain(|group| {
            let of_group = |entry: &&Stat| entry.pgrp == raw(*group);
            let has_rank = alive.iter().filter(of_group).any(|entry| asked.contains(&entry.pid));
            if !has_rank {
                let _ = kill_process_group(*group, Signal::TERM);
                asked.extend(alive.iter().filter(of_group).map(|entry| entry.pid));
            }
            has_rank
        });
        for orphan in alive.iter().filter(|e| e.ppid == me() && !is_own(e, own)) {
            if let (true, Some(pid)) = (asked.insert(orphan.pid), Pid::from_raw(orphan.pid)) {
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        sleep(LOOK).await;
    }
}

/// Whether a process is stopped by a signal; a debugger does not count.
pub fn is_stopped(pid: u32) -> bool {
    let stat = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok()?.stat().ok());
    stat.is_some_and(|stat| stat.state == 'T')
}

/// Kills a child of this process that has not been reaped yet.
pub fn kill(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// Sends a signal to a child that has not been reaped yet, which leads a process group.
///
/// If a member of the group has joined a job as a rank, only that one gets the signal. The children
/// of a rank, such as the workers of a data loader, would disturb it by ending before it, and so
/// would a script that has started it. Signals that stop and continue processes, those of
/// terminals, and SIGKILL are for the whole group.
pub fn signal(child: u32, signal: Signal) {
    if let Some(group) = i32::try_from(child).ok().and_then(Pid::from_raw) {
        ask(group, signal);
    }
}

/// The same for the process group of a child.
pub fn ask(group: Pid, signal: Signal) {
    let is_for_all =
        matches!(signal, Signal::KILL | Signal::STOP | Signal::CONT | Signal::TSTP | Signal::WINCH);
    if is_for_all {
        let _ = kill_process_group(group, signal);
    } else {
        ask_ranks_of(group, &descendants(), signal);
    }
}

/// Sends a signal to the ranks in a process group, or to all of its members if none is a rank.
/// Returns those that got it.
fn ask_ranks_of(group: Pid, descendants: &[Stat], signal: Signal) -> Vec<i32> {
    let members = descendants.iter().filter(|it| it.pgrp == raw(group) && is_alive(it));
    let members: Vec<i32> = members.map(|it| it.pid).collect();
    let ranks: Vec<i32> = members.iter().copied().filter(|pid| is_rank(*pid)).collect();
    for rank in ranks.iter().filter_map(|rank| Pid::from_raw(*rank)) {
        let _ = kill_process(rank, signal);
    }
    if !ranks.is_empty() {
        return ranks;
    }
    // A process that has just ended needs no signal.
    let _ = kill_process_group(group, signal);
    members
}

/// Whether a process has joined a job: it has mapped the page that it shares with its daemon. Its
/// forked children have the page as well, but its name has the number of the rank's process.
fn is_rank(pid: i32) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let end = format!("-{pid}-control");
    let mut pages = maps.lines().filter_map(|line| line.split_once("memfd:gradwire-"));
    pages.any(|(_, name)| name.strip_suffix(" (deleted)").unwrap_or(name).ends_with(&end))
}

fn raw(pid: Pid) -> i32 {
    pid.as_raw_nonzero().get()
}

/// Kills a process group, in a destructor, and waits until no member is alive: the system takes a
/// moment to end a killed process.
pub fn kill_group(group: Pid) {
    let deadline = std::time::Instant::now() + KILLED;
    let is_left = |process: Process| {
        process
            .stat()
            .is_ok_and(|stat| stat.pgrp == group.as_raw_nonzero().get() && is_alive(&stat))
    };
    while kill_process_group(group, Signal::KILL).is_ok()
        && procfs::process::all_processes().is_ok_and(|all| all.flatten().any(is_left))
        && std::time::Instant::now() < deadline
    {
        std::thread::sleep(KILLED_LOOK);
    }
}

/// Kills all of these descendants, repeatedly, because one may be born while another is killed.
/// Returns whether none is left.
pub async fn kill_all(own: &BTreeSet<u32>, which: Which<'_>) -> bool {
    let deadline = Instant::now() + KILLED;
    let is_left = |entry: &Stat| is_alive(entry) && which.includes(entry);
    loop {
        for entry in descendants().into_iter().filter(is_left) {
            if let Some(pid) = Pid::from_raw(entry.pid) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        reap_orphans(own);
        if !descendants().iter().any(is_left) {
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
    use std::os::unix::process::CommandExt;

    use super::*;

    #[test]
    fn a_child_is_found() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert!(descendants().iter().any(|entry| entry.pid == pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!descendants().iter().any(|entry| entry.pid == pid));
    }

    #[test]
    fn a_killed_group_has_gone() {
        // Enough processes that some would still be there without the wait.
        let script = "for i in 1 2 3 4 5 6 7 8; do sleep 600 & done; echo; wait";
        for _ in 0..20 {
            let mut shell = std::process::Command::new("sh");
            shell.args(["-c", script]).stdout(std::process::Stdio::piped()).process_group(0);
            let mut leader = shell.spawn().unwrap();
            std::io::Read::read_exact(leader.stdout.as_mut().unwrap(), &mut [0]).unwrap();
            let group = i32::try_from(leader.id()).unwrap();
            kill_group(Pid::from_raw(group).unwrap());
            let left = procfs::process::all_processes().unwrap().flatten();
            let left = left.filter_map(|process| process.stat().ok());
            assert_eq!(left.filter(|stat| stat.pgrp == group && is_alive(stat)).count(), 0);
            leader.wait().unwrap();
        }
    }
}
