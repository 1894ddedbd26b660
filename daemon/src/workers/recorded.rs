//! What the flight recording has of one rank: its last operations. They also explain waits.

use std::sync::Arc;

use gradwire_proto::{Collective, pb};
use gradwire_shm::{control::Submission, flight::FlightMemory};
use gradwire_trace::{
    flight::{Operation, Outcome, Submitted},
    time::now_ns,
};

/// How many operations an explanation of a wait has (BOUND).
const SHOWN: usize = 3;

/// The part of the recording that belongs to one rank.
#[derive(Debug)]
pub(crate) struct Recorded {
    recording: Arc<FlightMemory>,
    local_rank: u32,
}

impl Recorded {
    /// A process has attached as this rank.
    pub(crate) fn begin(recording: Arc<FlightMemory>, local_rank: u32, pid: u32) -> Self {
        recording.flight().attached(local_rank, pid, now_ns());
        Self { recording, local_rank }
    }

    /// Its connection has ended.
    pub(crate) fn gone(&self) {
        self.recording.flight().gone(self.local_rank, now_ns());
    }

    /// The rank has submitted an operation.
    pub(crate) fn submitted(&self, submission: &Submission, site: &str) {
        let Submission { ticket, process_set, name, request, .. } = submission;
        let is_message = request.collective == Collective::SendReceive;
        let receiver = request.list.first().copied().filter(|_| is_message);
        let submitted = Submitted {
            ticket: *ticket,
            name: name.as_str(),
            site,
            collective: request.collective as u8,
            dtype: request.dtype as u8,
            reduce_op: request.reduce_op as u8,
            process_set: *process_set,
            root: request.root.0,
            receiver: receiver.unwrap_or_default(),
            bytes: (0..request.parts()).map(|part| request.bytes_of(part)).sum(),
            tensors: u16::try_from(request.parts()).unwrap_or(u16::MAX),
            dims: request.shape.dims(),
        };
        self.recording.flight().submitted(self.local_rank, now_ns(), &submitted);
    }

    /// Operations have ended.
    pub(crate) fn ended(&self, tickets: &[u64], outcome: Outcome) {
        let (flight, at_ns) = (self.recording.flight(), now_ns());
        tickets.iter().for_each(|it| flight.ended(self.local_rank, *it, at_ns, outcome));
    }

    /// Where the program has called an operation; empty if it is not one of the last.
    pub(crate) fn site(&self, ticket: u64) -> Arc<str> {
        let operation = self.recording.flight().operation(self.local_rank, ticket);
        operation.map(|operation| operation.site.into()).unwrap_or_default()
    }

    /// The last operations, the newest first, and the number of all.
    pub(crate) fn look(&self) -> (Vec<pb::RecentOperation>, u64) {
        let (flight, now_ns) = (self.recording.flight(), now_ns());
        let recent = |it: Operation| pb::RecentOperation {
            name: it.name,
            call: Collective::from_wire(it.collective.into())
                .map(|call| call.to_string())
                .unwrap_or_default(),
            age_ms: now_ns.saturating_sub(it.submitted_ns) / 1_000_000,
            outcome: match it.outcome {
                Outcome::InFlight => pb::Outcome::InFlight,
                Outcome::Done => pb::Outcome::Done,
                Outcome::Failed => pb::Outcome::Failed,
            }
            .into(),
            site: it.site,
        };
        let last = flight.last(self.local_rank, SHOWN);
        (last.into_iter().map(recent).collect(), flight.count(self.local_rank))
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::{Request, TensorName};
    use gradwire_shm::control::{CallSite, Origin};

    use super::*;

    #[test]
    fn the_last_three_operations_are_shown() {
        let recording = Arc::new(FlightMemory::create("test-recorded", "h", 0, 2).unwrap());
        let recorded = Recorded::begin(recording, 1, 7);
        for (ticket, name) in (1..).zip(["a", "b", "c", "d"]) {
            let submission = Submission {
                ticket,
                process_set: 0,
                name: TensorName::new(name).unwrap(),
                request: Request::barrier(),
                priority: 0,
                inputs: Vec::new(),
                outputs: Vec::new(),
                origin: Origin::Plain,
                copied: false,
                site: CallSite::default(),
            };
            recorded.submitted(&submission, &format!("train.py:{ticket}"));
        }
        recorded.ended(&[1, 2], Outcome::Done);
        recorded.ended(&[4], Outcome::Failed);
        let (last, count) = recorded.look();
        let last: Vec<_> = last.iter().map(|it| (&it.name[..], it.outcome())).collect();
        let [failed, flying, done] =
            [pb::Outcome::Failed, pb::Outcome::InFlight, pb::Outcome::Done];
        assert_eq!(last, [("d", failed), ("c", flying), ("b", done)]);
        assert_eq!(count, 4);
        assert_eq!((&*recorded.site(3), &*recorded.site(9)), ("train.py:3", ""));
    }
}
