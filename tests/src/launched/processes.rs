//! The live processes of a job: found by the mark in their environment, distinguished by their
//! command lines.

use std::{collections::HashMap, fs};

/// The variable that marks a job's processes. Its name does not begin with `GRADWIRE_`, so it is
/// passed to other hosts like any other.
pub const MARK: &str = "GWTEST_MARK";

/// The role of a process in its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// `gradwire run` or `gradwire doctor`.
    Launcher,
    /// The agent of a host; hosts are numbered in their order.
    Agent(u32),
    /// The daemon of a node. The first node's daemon hosts the coordinator.
    Daemon(u32),
    /// A rank.
    Rank(u32),
}

/// A process of a job.
#[derive(Debug, Clone)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// Its role, if known.
    pub role: Option<Role>,
    /// Its program and arguments.
    pub command: Vec<String>,
    environment: HashMap<String, String>,
}

impl Process {
    /// A variable of its environment.
    pub fn variable(&self, name: &str) -> Option<String> {
        self.environment.get(name).cloned()
    }

    fn read(pid: u32, mark: &str) -> Option<Self> {
        // Other users' environments can't be read; ended processes have none.
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let environment: HashMap<String, String> = strings(&environment)
            .filter_map(|pair| pair.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned())))
            .collect();
        if environment.get(MARK).is_none_or(|theirs| theirs != mark) {
            return None;
        }
        let command: Vec<String> =
            strings(&fs::read(format!("/proc/{pid}/cmdline")).ok()?).collect();
        let role = role(&command, &environment);
        Some(Self { pid, role, command, environment })
    }
}

fn strings(bytes: &[u8]) -> impl Iterator<Item = String> {
    bytes.split(|b| *b == 0).filter(|s| !s.is_empty()).map(|s| String::from_utf8_lossy(s).into())
}

fn role(command: &[String], environment: &HashMap<String, String>) -> Option<Role> {
    let program = command.first()?.rsplit('/').next()?;
    let number = |name: &str| environment.get(name)?.parse().ok();
    match (program, command.get(1).map(String::as_str)) {
        ("gradwire", Some("run" | "doctor")) => Some(Role::Launcher),
        // Agents are numbered once all of them are known.
        ("gradwire", Some("agent" | "doctor-agent")) => Some(Role::Agent(0)),
        // A process that is about to start another program.
        ("gradwire", _) => None,
        ("gradwired", _) => number("GRADWIRE_ORDER").map(Role::Daemon),
        // In an elastic job a rank is named by its number as a worker.
        _ => number("GRADWIRE_WORKER").or(number("GRADWIRE_RANK")).map(Role::Rank),
    }
}

/// The processes with this mark, in the order of their ids.
pub fn marked(mark: &str) -> Vec<Process> {
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut found: Vec<Process> = pids.filter_map(|pid| Process::read(pid, mark)).collect();
    found.sort_by_key(|process| process.pid);
    // The launcher starts agents in the order of the hosts.
    let mut agents = 0;
    for process in &mut found {
        if let Some(Role::Agent(number)) = &mut process.role {
            *number = agents;
            agents += 1;
        }
    }
    found
}
