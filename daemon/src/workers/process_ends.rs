//! The reports of the launcher's agent about the ranks' processes. Only the parent of a process
//! knows how it ended. To the daemon, the end of a crashed rank's connection looks like that of a
//! rank that just exited, or that was ended together with all others.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use gradwire_proto::Rank;
use gradwire_services::launch::ProcessEnd;
use parking_lot::{Condvar, Mutex};

/// How long the agent may take to report the end of a process whose connection has ended.
const REPORT_TIMEOUT: Duration = Duration::from_millis(500);

/// How often to check, while waiting, whether the job has ended for another reason.
const CHECK: Duration = Duration::from_millis(20);

/// How the processes of this node's ranks have ended, as far as it is known.
#[derive(Debug, Default)]
pub(crate) struct ProcessEnds {
    state: Mutex<EndState>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct EndState {
    /// Whether an agent sends reports.
    by_agent: bool,
    ends: BTreeMap<u32, ProcessEnd>,
    /// The processes that the agent has started, by the launcher's numbers.
    started: BTreeMap<Rank, u32>,
    /// The ranks whose process has been started and has not ended.
    running: BTreeSet<Rank>,
    /// The ends of processes that the node has not handled yet, by the launcher's numbers.
    new: Vec<(Rank, ProcessEnd)>,
    stopped: Option<Stop>,
}

/// All processes of this host are being ended.
#[derive(Debug)]
struct Stop {
    why: String,
    /// Whether only the processes of this host are being ended.
    alone: bool,
}

impl ProcessEnds {
    pub(crate) fn expect(&self, by_agent: bool) {
        self.state.lock().by_agent = by_agent;
        self.news.notify_all();
    }

    /// The agent has started the process with this number.
    pub(crate) fn started(&self, number: Rank, pid: u32) {
        let mut state = self.state.lock();
        state.started.insert(number, pid);
        state.running.insert(number);
    }

    /// The process with this number does not run any more.
    pub(crate) fn runs_no_more(&self, number: Rank, end: ProcessEnd) {
        let mut state = self.state.lock();
        state.running.remove(&number);
        state.new.push((number, end));
    }

    /// The ends that the node has to handle, once it knows which ranks these are.
    pub(crate) fn take_new(&self) -> Vec<(Rank, ProcessEnd)> {
        std::mem::take(&mut self.state.lock().new)
    }

    /// Whether any process runs that an agent has started and watches.
    pub(crate) fn any_runs(&self) -> bool {
        let state = self.state.lock();
        state.by_agent && !state.running.is_empty()
    }

    /// The id of the process with this number, if the agent has started it.
    pub(crate) fn pid(&self, number: Rank) -> Option<u32> {
        self.state.lock().started.get(&number).copied()
    }

    /// A rank's process has ended. This is ignored once all processes are being ended.
    pub(crate) fn ended(&self, local_rank: u32, end: ProcessEnd) {
        let mut state = self.state.lock();
        if state.stopped.is_none() {
            state.ends.insert(local_rank, end);
        }
        self.news.notify_all();
    }

    /// How the process of a rank ended, if known.
    pub(crate) fn end(&self, local_rank: u32) -> Option<ProcessEnd> {
        self.state.lock().ends.get(&local_rank).copied()
    }

    pub(crate) fn failure(&self, local_rank: u32) -> Option<ProcessEnd> {
        self.end(local_rank).filter(|end| !end.is_well())
    }

    /// Whether the job does not end with the processes of this host, as far as the agent knows.
    pub(crate) fn ends_alone(&self) -> bool {
        self.state.lock().stopped.as_ref().is_none_or(|stop| stop.alone)
    }

    /// All processes of this host are being ended, and perhaps no others.
    pub(crate) fn stop(&self, why: String, alone: bool) {
        self.state.lock().stopped.get_or_insert(Stop { why, alone });
        self.news.notify_all();
    }

    /// How the process of a rank ended, after the end of its connection; `None` if the agent has
    /// not reported it. Waits a moment for the report while it is `interesting`.
    ///
    /// # Errors
    /// If all processes of this host are being ended, the reason why.
    pub(crate) fn of(
        &self,
        local_rank: u32,
        interesting: impl Fn() -> bool,
    ) -> Result<Option<ProcessEnd>, String> {
        // Not a deadline: while this process is suspended, the report stays unread.
        let mut checks = REPORT_TIMEOUT.div_duration_f64(CHECK) as u32;
        let mut state = self.state.lock();
        loop {
            if let Some(end) = state.ends.get(&local_rank) {
                return Ok(Some(*end));
            }
            if let Some(stop) = &state.stopped {
                return Err(stop.why.clone());
            }
            if !state.by_agent || !interesting() || checks == 0 {
                return Ok(None);
            }
            if self.news.wait_for(&mut state, CHECK).timed_out() {
                checks -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_agent_knows_what_still_runs() {
        let ends = ProcessEnds::default();
        ends.started(Rank(4), 77);
        assert!(!ends.any_runs(), "nobody would report its end");
        ends.expect(true);
        assert!(ends.any_runs());
        ends.runs_no_more(Rank(4), ProcessEnd::Code(0));
        assert!(!ends.any_runs());
    }

    #[test]
    fn the_end_of_a_process_is_waited_for() {
        let ends = ProcessEnds::default();
        const KILLED: ProcessEnd = ProcessEnd::Signal(9);
        let unknown = Ok(None);
        assert_eq!(ends.of(3, || true), unknown, "no agent");
        ends.expect(true);
        assert_eq!(ends.of(3, || false), unknown, "not interesting");
        assert_eq!(ends.of(3, || true), unknown, "WAIT");
        std::thread::scope(|scope| {
            scope.spawn(|| ends.ended(3, ProcessEnd::Code(0)));
            assert_eq!(ends.of(3, || true), Ok(Some(ProcessEnd::Code(0))));
        });
        ends.ended(5, KILLED);
        assert!(ends.ends_alone());
        ends.stop("so it is".to_owned(), false);
        assert!(!ends.ends_alone());
        ends.ended(4, ProcessEnd::Signal(15));
        assert_eq!(ends.of(4, || true), Err("so it is".to_owned()));
        assert_eq!(ends.failure(4), None, "it ended because it was asked to");
        assert_eq!(ends.of(5, || true), Ok(Some(KILLED)), "it had ended before");
        assert_eq!(ends.failure(5), Some(KILLED));
        assert_eq!(ends.failure(3), None, "it ended well");
    }
}
