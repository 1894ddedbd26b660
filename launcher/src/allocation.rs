//! The hosts that a batch system has given to a job, from the variables that it sets there.
//!
//! - Slurm (`sbatch`, `salloc`): `SLURM_JOB_NODELIST`, and the tasks of each host
//! - PBS and Torque: the file `PBS_NODEFILE`, with a line for each slot
//! - LSF: `LSB_MCPU_HOSTS`, names and numbers in turn

use std::{collections::HashMap, fs};

use crate::{error::CommandError, slurm};

/// The most bytes of a list of hosts that are read (TRUST).
const MAX_BYTES: usize = 4 << 20;

/// Names of hosts, and how many tasks each may have.
pub type Hosts = Vec<(String, u32)>;

/// The hosts of an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// The hosts, and how many tasks each may have.
    pub hosts: Hosts,
    /// The variable that names them.
    pub variable: &'static str,
}

/// The allocation that these variables describe; `None`: they describe none.
///
/// # Errors
/// [`CommandError`] if a variable or a file can't be read.
pub fn find(variables: &HashMap<String, String>) -> Result<Option<Allocation>, CommandError> {
    let get = |name: &str| variables.get(name).map(|text| text.trim()).filter(|it| !it.is_empty());
    let refuse = |what: String| Err(CommandError::usage(what).hint(INSTEAD));
    let (variable, read) = if let (Some(_), Some(list)) = (get("SLURM_JOB_ID"), get(slurm::NODES)) {
        let tasks = [TASKS, "SLURM_JOB_CPUS_PER_NODE"].into_iter();
        let Some((name, tasks)) = tasks.filter_map(|name| Some((name, get(name)?))).next() else {
            let what = format!("{TASKS} is not set, although {} is", slurm::NODES);
            return refuse(what);
        };
        let (names, slots) = (slurm::hosts(list), slurm::tasks(tasks));
        let Some(slots) = slots.filter(|it| names.as_ref().is_none_or(|n| n.len() == it.len()))
        else {
            let what = format!("{name}={tasks} does not fit the hosts of {}={list}", slurm::NODES);
            return refuse(what);
        };
        let all = get("SLURM_NTASKS").and_then(|text| text.parse().ok());
        (slurm::NODES, names.map(|names| of_slurm(names, slots, all.unwrap_or(u32::MAX))))
    } else if let (Some(_), Some(groups)) = (get("SLURM_JOB_ID"), get("SLURM_HET_SIZE")) {
        return refuse(format!(
            "SLURM_HET_SIZE={groups}: gradwire run does not start ranks in the groups of a \
             heterogeneous job; srun --het-group can, if each task runs the program"
        ));
    } else if let Some(path) = get("PBS_NODEFILE") {
        let text = fs::read_to_string(path).map_err(|error| {
            CommandError::usage(format!("PBS_NODEFILE={path}: {error}")).hint(INSTEAD)
        })?;
        ("PBS_NODEFILE", of_lines(&text))
    } else if let Some(list) = get("LSB_MCPU_HOSTS") {
        ("LSB_MCPU_HOSTS", of_pairs(list))
    } else {
        return Ok(None);
    };
    let hosts = read.filter(|hosts| !hosts.is_empty()).ok_or_else(|| {
        CommandError::usage(format!("{variable} is not a list of hosts")).hint(INSTEAD)
    })?;
    Ok(Some(Allocation { hosts, variable }))
}

/// What to do without an allocation.
const INSTEAD: &str = "name the hosts with -H or --hostfile, or unset these variables";

/// How many tasks each host of Slurm may have.
const TASKS: &str = "SLURM_TASKS_PER_NODE";

impl Allocation {
    /// The hosts as the option -H has them.
    pub fn text(&self) -> String {
        let hosts: Vec<_> =
            self.hosts.iter().map(|(name, slots)| format!("{name}:{slots}")).collect();
        hosts.join(",")
    }

    /// Whether Slurm, and not ssh, starts a program on this host: it belongs to the allocation.
    pub fn is_by_slurm(&self, host: &str) -> bool {
        self.variable == slurm::NODES && self.hosts.iter().any(|(name, _)| name == host)
    }
}

/// Slurm gives the maximum number of tasks of each host, and the total: the last hosts may have
/// fewer.
fn of_slurm(names: Vec<String>, slots: Vec<u32>, mut all: u32) -> Hosts {
    let taken = slots.into_iter().map(|slots| {
        let here = slots.min(all);
        all -= here;
        here
    });
    names.into_iter().zip(taken).filter(|(_, slots)| *slots > 0).collect()
}

fn of_lines(text: &str) -> Option<Hosts> {
    let mut hosts = Hosts::new();
    for name in text.get(..MAX_BYTES).unwrap_or(text).split_whitespace() {
        match hosts.iter_mut().find(|(known, _)| known == name) {
            Some((_, slots)) => *slots += 1,
            None => hosts.push((name.to_owned(), 1)),
        }
    }
    Some(hosts)
}

fn of_pairs(list: &str) -> Option<Hosts> {
    let words: Vec<_> = list.split_whitespace().collect();
    let (pairs, rest) = words.as_chunks::<2>();
    let read = |[name, slots]: &[&str; 2]| Some(((*name).to_owned(), slots.parse().ok()?));
    if rest.is_empty() { pairs.iter().map(read).collect() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<String>, CommandError> {
        let pairs = variables.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        let found = find(&pairs.collect())?;
        Ok(found.map(|it| format!("{} {}", it.variable, it.text())))
    }

    #[test]
    fn every_batch_system_names_its_hosts() {
        let slurm = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "n[1-2],m")];
        let with = |name, text| read(&[slurm.as_slice(), &[(name, text)]].concat()).unwrap();
        let expected = Some("SLURM_JOB_NODELIST n1:2,n2:2,m:1".to_owned());
        assert_eq!(with("SLURM_TASKS_PER_NODE", "2(x2),1"), expected);
        assert_eq!(with("SLURM_JOB_CPUS_PER_NODE", "2(x2),1"), expected);
        let fewer = Some("SLURM_JOB_NODELIST n1:2,n2:1".to_owned());
        let tasks = [("SLURM_TASKS_PER_NODE", "2(x3)"), ("SLURM_NTASKS", "3")];
        assert_eq!(read(&[slurm, tasks].concat()).unwrap(), fewer);
        let path = std::env::temp_dir().join(format!("gradwire-nodes-{}", std::process::id()));
        fs::write(&path, "a\nb\na\n\n").unwrap();
        let found = read(&[("PBS_NODEFILE", path.to_str().unwrap())]).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(found, Some("PBS_NODEFILE a:2,b:1".to_owned()));
        let found = read(&[("LSB_MCPU_HOSTS", "a 4 b 2 ")]).unwrap();
        assert_eq!(found, Some("LSB_MCPU_HOSTS a:4,b:2".to_owned()));
        assert_eq!(read(&[("SLURM_JOB_NODELIST", "a"), ("PBS_NODEFILE", "")]).unwrap(), None);
    }

    #[test]
    fn a_list_that_can_not_be_read_is_named() {
        let slurm = ("SLURM_JOB_ID", "7");
        for (variables, name) in [
            (
                vec![slurm, ("SLURM_JOB_NODELIST", "n[1-"), ("SLURM_TASKS_PER_NODE", "2")],
                "SLURM_JOB_NODELIST is not a list of hosts",
            ),
            (
                vec![slurm, ("SLURM_JOB_NODELIST", "n[1-2]")],
                "SLURM_TASKS_PER_NODE is not set, although SLURM_JOB_NODELIST is",
            ),
            (
                vec![slurm, ("SLURM_JOB_NODELIST", "n[1-2]"), ("SLURM_TASKS_PER_NODE", "2")],
                "SLURM_TASKS_PER_NODE=2 does not fit the hosts of SLURM_JOB_NODELIST=n[1-2]",
            ),
            (vec![slurm, ("SLURM_HET_SIZE", "2")], "SLURM_HET_SIZE=2: gradwire run does not"),
            (vec![("PBS_NODEFILE", "/no/such/file")], "PBS_NODEFILE=/no/such/file: No such"),
            (vec![("LSB_MCPU_HOSTS", "a 4 b")], "LSB_MCPU_HOSTS"),
            (vec![("LSB_MCPU_HOSTS", "a x")], "LSB_MCPU_HOSTS"),
        ] {
            let error = read(&variables).unwrap_err();
            assert!(error.what.starts_with(name), "{}", error.what);
            assert_eq!(error.code, 2);
        }
    }
}
