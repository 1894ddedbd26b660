//! Binds a rank to processors, if the setting `worker.bind_to` asks for that: to its share of the
//! cores, or to the NUMA node of its share. Ranks with consecutive numbers get consecutive cores.

use std::{collections::BTreeMap, fs, io, path::Path};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The variable of the setting.
const SETTING: &str = "GRADWIRE_WORKER__BIND_TO";

/// Where the system describes the processors.
const SYSTEM: &str = "/sys/devices/system";

/// A processor and its place. Sorted, processors are in the order of their cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Processor {
    node: usize,
    package: usize,
    core: usize,
    number: usize,
}

/// Binds this process, which is about to become a rank, as its variables say. Newcomers of elastic
/// jobs learn their rank later: they are not bound.
///
/// # Errors
/// The error of the system.
pub(super) fn bind() -> io::Result<()> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let what = std::env::var(SETTING).unwrap_or_default();
    let (Some(local), Some(ranks)) = (number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE")) else {
        return Ok(());
    };
    let allowed = sched_getaffinity(None)?;
    let numbers = (0..CpuSet::MAX_CPU).filter(|number| allowed.is_set(*number));
    let all = read(Path::new(SYSTEM), numbers);
    let mut set = CpuSet::new();
    for number in share(&what, &all, local, ranks) {
        set.set(number);
    }
    // A rank whose share is empty is not bound.
    if set.count() > 0 { Ok(sched_setaffinity(None, &set)?) } else { Ok(()) }
}

/// These processors in the order of their cores.
fn read(system: &Path, numbers: impl Iterator<Item = usize>) -> Vec<Processor> {
    let mut nodes = BTreeMap::new();
    let folders = fs::read_dir(system.join("node")).into_iter().flatten().flatten();
    for folder in folders {
        let name = folder.file_name();
        let node = name.to_str().and_then(|name| name.strip_prefix("node")?.parse::<usize>().ok());
        let list = fs::read_to_string(folder.path().join("cpulist")).unwrap_or_default();
        if let Some(node) = node {
            nodes.extend(list_of(&list).into_iter().map(|number| (number, node)));
        }
    }
    let read = |number: usize, what: &str| -> Option<usize> {
        let path = system.join(format!("cpu/cpu{number}/topology/{what}"));
        fs::read_to_string(path).ok()?.trim().parse().ok()
    };
    let place = |number: usize| Processor {
        node: nodes.get(&number).copied().unwrap_or(0),
        package: read(number, "physical_package_id").unwrap_or(0),
        core: read(number, "core_id").unwrap_or(number),
        number,
    };
    let mut all: Vec<_> = numbers.map(place).collect();
    all.sort_unstable();
    all
}

/// The numbers of a list such as `0-3,8`.
fn list_of(text: &str) -> Vec<usize> {
    let ranges = text.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
    });
    ranges.flatten().collect()
}

/// The processors of the rank with number `local` of `ranks`; none if it is not bound. Pure.
fn share(what: &str, all: &[Processor], local: usize, ranks: usize) -> Vec<usize> {
    if local >= ranks || all.is_empty() {
        return Vec::new();
    }
    match what {
        "core" => {
            // Whole cores: the threads of one core belong to one rank.
            let mut cores: Vec<Vec<usize>> = Vec::new();
            let mut last = None;
            for one in all {
                let core = (one.node, one.package, one.core);
                if last.replace(core) != Some(core) {
                    cores.push(Vec::new());
                }
                cores.last_mut().expect("one was just added").push(one.number);
            }
            let begin = local * cores.len() / ranks;
            // If there are more ranks than cores, several share one.
            let end = ((local + 1) * cores.len() / ranks).max(begin + 1);
            cores[begin..end.min(cores.len())].concat()
        }
        "numa" => {
            let mut nodes: Vec<usize> = all.iter().map(|one| one.node).collect();
            nodes.dedup();
            let node = nodes[local * nodes.len() / ranks];
            all.iter().filter(|one| one.node == node).map(|one| one.number).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two nodes with two cores of two threads each; the second threads have the last numbers.
    fn machine() -> Vec<Processor> {
        let processor = |number: usize| Processor {
            node: number % 4 / 2,
            package: number % 4 / 2,
            core: number % 2,
            number,
        };
        let mut all: Vec<_> = (0..8).map(processor).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn ranks_share_the_cores() {
        let of = |what, ranks| -> Vec<_> {
            (0..ranks).map(|local| share(what, &machine(), local, ranks)).collect()
        };
        assert_eq!(of("core", 1), [[0, 4, 1, 5, 2, 6, 3, 7]]);
        assert_eq!(of("core", 2), [[0, 4, 1, 5], [2, 6, 3, 7]]);
        assert_eq!(of("core", 4), [[0, 4], [1, 5], [2, 6], [3, 7]]);
        assert_eq!(of("core", 3), [vec![0, 4], vec![1, 5], vec![2, 6, 3, 7]]);
        let crowded = of("core", 8);
        assert!(crowded.iter().all(|cores| cores.len() == 2), "{crowded:?}");
        assert_eq!(of("numa", 2), [[0, 4, 1, 5], [2, 6, 3, 7]]);
        assert_eq!(of("numa", 4)[2], [2, 6, 3, 7]);
        assert_eq!(of("none", 2), [[0; 0], [0; 0]]);
        assert_eq!(share("core", &machine(), 2, 2), [0; 0], "numbers that contradict each other");
    }

    #[test]
    fn the_system_describes_its_processors() {
        assert_eq!(list_of("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(list_of("\n"), [0; 0]);
        let place = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = place.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("node/node1/cpulist", "0\n");
        write("cpu/cpu0/topology/core_id", "7\n");
        let expected = [
            Processor { node: 0, package: 0, core: 3, number: 3 },
            Processor { node: 1, package: 0, core: 7, number: 0 },
        ];
        assert_eq!(read(place.path(), [0, 3].into_iter()), expected);
    }
}
