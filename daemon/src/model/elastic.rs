//! The epoch of an elastic job for which a daemon was started.
//!
//! The daemon lives for this epoch only. After a loss or a wanted change the launcher starts its
//! successor, and the training processes attach there.

use gradwire_proto::Epoch;

/// The epoch, and the training processes of this node in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Elastic {
    pub(crate) epoch: Epoch,
    /// The numbers of the processes in the job, by local rank.
    workers: Vec<u32>,
    /// How many of them were in an earlier epoch: the first ones.
    survivors: u32,
}

impl Elastic {
    /// An epoch in which each of `slots` local ranks is one of these processes, of which the first
    /// `survivors` were in an earlier one.
    ///
    /// # Errors
    /// A text, if the list does not match the slots or names a process twice.
    pub(crate) fn new(
        epoch: Epoch,
        workers: Vec<u32>,
        survivors: u32,
        slots: u32,
    ) -> Result<Self, String> {
        if workers.len() != slots as usize {
            return Err(format!("expected as many numbers as GRADWIRE_SLOTS, which is {slots}"));
        }
        let mut ascending = workers.clone();
        ascending.sort_unstable();
        if let Some(pair) = ascending.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("the number {} occurs twice", pair[0]));
        }
        Ok(Self { epoch, workers, survivors })
    }

    /// The local rank of a process; `None` if it is not in this epoch.
    pub(crate) fn local_rank(&self, worker: u32) -> Option<u32> {
        self.workers.iter().position(|known| *known == worker).map(|at| at as u32)
    }

    /// The number of the process of a local rank.
    pub(crate) fn worker(&self, local_rank: u32) -> Option<u32> {
        self.workers.get(local_rank as usize).copied()
    }

    /// Whether the process of a local rank was in an earlier epoch.
    pub(crate) fn is_survivor(&self, local_rank: u32) -> bool {
        local_rank < self.survivors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_have_local_ranks_in_their_order() {
        let of = |workers: &[u32], slots| Elastic::new(Epoch(2), workers.to_vec(), 2, slots);
        let elastic = of(&[7, 3, 9], 3).unwrap();
        assert_eq!(
            [7, 3, 9, 0].map(|worker| elastic.local_rank(worker)),
            [Some(0), Some(1), Some(2), None]
        );
        assert_eq!([0, 2, 3].map(|local| elastic.worker(local)), [Some(7), Some(9), None]);
        assert_eq!([0, 1, 2].map(|local| elastic.is_survivor(local)), [true, true, false]);
        assert!(of(&[], 0).is_ok(), "a server");
        assert_eq!(
            of(&[1], 2).unwrap_err(),
            "expected as many numbers as GRADWIRE_SLOTS, which is 2"
        );
        assert_eq!(of(&[4, 1, 4], 3).unwrap_err(), "the number 4 occurs twice");
    }
}
