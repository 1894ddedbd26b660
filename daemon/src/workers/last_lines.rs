//! The last lines that the ranks of this node have written. Only the agent that has started them
//! sees their output.

use std::collections::BTreeMap;

use gradwire_proto::Rank;
use gradwire_services::launch::MAX_LAST_LINES;
use parking_lot::Mutex;

/// The last lines of each rank, by the launcher's numbers.
#[derive(Debug, Default)]
pub(crate) struct LastLines(Mutex<BTreeMap<Rank, Vec<String>>>);

impl LastLines {
    /// The process with this number has written these lines last.
    pub(crate) fn set(&self, number: Rank, mut lines: Vec<String>) {
        lines.truncate(MAX_LAST_LINES);
        self.0.lock().insert(number, lines);
    }

    /// The process with this number has ended.
    pub(crate) fn forget(&self, number: Rank) {
        self.0.lock().remove(&number);
    }

    /// The last lines of the process with this number, as far as they are known.
    pub(crate) fn of(&self, number: Rank) -> Vec<String> {
        self.0.lock().get(&number).cloned().unwrap_or_default()
    }
}
