//! The processors that a daemon may use, and how many threads they have room for.

use std::{collections::BTreeSet, fs};

use rustix::thread::{CpuSet, sched_getaffinity};

/// The most threads of a node for tensor bytes (BOUND).
const MOST: u32 = 256;

/// What is known about the processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Processors {
    /// The cores that this process may run on. Two processors of one core count once: they share
    /// its path to the memory, so the second one hardly makes a reduction faster.
    pub(crate) cores: u32,
    /// The processors that it may use at once, also by the limits of its control group.
    pub(crate) at_once: u32,
}

impl Processors {
    /// Reads them from the system.
    pub(crate) fn look() -> Self {
        let at_once = std::thread::available_parallelism()
            .map_or(1, |number| u32::try_from(number.get()).unwrap_or(u32::MAX));
        let allowed: Vec<usize> = sched_getaffinity(None).map_or_else(
            |_| Vec::new(),
            |set| (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect(),
        );
        let cores = cores(&allowed, |cpu| {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            fs::read_to_string(path).ok()
        });
        Self { cores: if cores == 0 { at_once } else { cores }, at_once }
    }

    /// How many threads may work on the tensor bytes of a node with `ranks` ranks at once,
    /// including the lanes. There is one for each core: ranks sleep while they wait for a result,
    /// and if they compute meanwhile, the scheduler shares the cores between both. A node with one
    /// rank reduces nothing by itself, so its lanes are enough.
    pub(crate) fn threads(self, lanes: u32, ranks: u32) -> u32 {
        let useful = if ranks > 1 { self.cores.min(self.at_once) } else { lanes };
        useful.max(lanes).min(MOST)
    }
}

/// The number of cores with these processors. `siblings` is the list of the processors of one
/// core, in the system's words; a processor without a list counts as a core.
fn cores(allowed: &[usize], siblings: impl Fn(usize) -> Option<String>) -> u32 {
    let of = |&cpu: &usize| siblings(cpu).unwrap_or_else(|| cpu.to_string());
    let cores: BTreeSet<String> = allowed.iter().map(|cpu| of(cpu).trim().to_owned()).collect();
    cores.len() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_thread_for_each_core() {
        let threads =
            |cores, at_once, lanes, ranks| Processors { cores, at_once }.threads(lanes, ranks);
        for cores in 1..=128 {
            // Without hyper-threading, and with it.
            assert_eq!(threads(cores, cores, 2, 4), cores.max(2), "{cores} cores");
            assert_eq!(threads(cores, 2 * cores, 2, 4), cores.max(2), "{cores} cores");
            assert_eq!(threads(cores, cores, 2, 1), 2, "one rank reduces nothing");
            assert_eq!(threads(cores, cores, 2, 0), 2, "a server has its lanes");
            assert_eq!(threads(cores, cores, 16, 4), cores.max(16), "lanes are threads");
            let half = cores.div_ceil(2);
            assert_eq!(threads(cores, half, 1, 2), half, "the control group allows {half}");
        }
        assert_eq!(threads(1024, 2048, 2, 4), 256, "BOUND");
    }

    #[test]
    fn processors_of_one_core_count_once() {
        let pairs = |cpu: usize| Some(format!("{},{}\n", cpu % 4, cpu % 4 + 4));
        assert_eq!(cores(&[0, 1, 2, 3, 4, 5, 6, 7], pairs), 4);
        assert_eq!(cores(&[0, 4, 5], pairs), 2);
        assert_eq!(cores(&[0, 1, 7], |_| None), 3);
        assert_eq!(cores(&[], pairs), 0);
        let here = Processors::look();
        assert!((1..=here.cores.max(here.at_once)).contains(&here.at_once), "{here:?}");
        assert!(here.cores > 0, "{here:?}");
    }
}
