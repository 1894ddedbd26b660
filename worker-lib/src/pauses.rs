//! The pauses of a program that have not ended. They may be inside each other. Pure.

/// The pauses of a session that have not ended, with their numbers.
#[derive(Debug, Default)]
pub(crate) struct Pauses {
    next: u64,
    open: Vec<(u64, String)>,
}

impl Pauses {
    /// Begins a pause, and returns its number.
    pub(crate) fn begin(&mut self, what: &str) -> u64 {
        self.next += 1;
        self.open.push((self.next, what.to_owned()));
        self.next
    }

    /// Ends a pause.
    pub(crate) fn end(&mut self, number: u64) {
        self.open.retain(|(own, _)| *own != number);
    }

    /// What the program does; empty if it is not paused.
    pub(crate) fn what(&self) -> &str {
        self.open.last().map_or("", |(_, what)| what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_pause_is_shown() {
        let mut pauses = Pauses::default();
        let outer = pauses.begin("evaluation");
        let inner = pauses.begin("checkpoint");
        assert_eq!(pauses.what(), "checkpoint");
        pauses.end(outer);
        assert_eq!(pauses.what(), "checkpoint", "in any order");
        pauses.end(inner);
        assert_eq!(pauses.what(), "");
    }
}
