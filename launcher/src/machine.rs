//! What this machine has for ranks: GPUs and cores.

use std::{fs, thread::available_parallelism};

/// The devices of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Machine {
    /// The GPUs of NVIDIA.
    pub(crate) gpus: u32,
    /// The cores that this process may use.
    pub(crate) cores: u32,
}

impl Machine {
    /// This machine, as a process in a container sees it.
    pub(crate) fn here() -> Self {
        let is_gpu = |name: &str| {
            let number = name.strip_prefix("nvidia");
            number.is_some_and(|number| number.parse::<u32>().is_ok())
        };
        let devices = fs::read_dir("/dev").into_iter().flatten().flatten();
        let gpus = devices.filter(|entry| entry.file_name().to_str().is_some_and(is_gpu)).count();
        let cores = available_parallelism().map_or(1, usize::from);
        Self { gpus: gpus as u32, cores: cores as u32 }
    }

    /// The number of ranks if none is given, as torchrun counts.
    pub(crate) fn ranks(self) -> u32 {
        if self.gpus > 0 { self.gpus } else { self.cores }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_use_gpus_or_else_cores() {
        assert_eq!(Machine { gpus: 2, cores: 6 }.ranks(), 2);
        assert_eq!(Machine { gpus: 0, cores: 6 }.ranks(), 6);
        assert!(Machine::here().cores > 0);
    }
}
