//! The predicates. What the simulation sees is checked at once; the first fault ends the run.
//!
//! | label | predicate |
//! |---|---|
//! | ORD | operations have ascending numbers, and every node starts the same ones in that order |
//! | ONE, SAME | a result has each contribution once, and the same bits on all ranks |
//! | INPUT | a buffer has the results of complete pieces, and otherwise its input |
//! | TELL | an epoch has one common cause, and no failure that only wrong code can have |
//! | VOTE | all ranks of an epoch know the same answer of a vote |
//! | STATE | ranks that do not lack the state of the job have the same one |
//! | SETS | a process set has only members that are there, and is the same on all ranks |
//! | MEMBER, RANKS | only the workers that the launcher chose attach, in the order of the rules |
//! | EPOCH | nothing of another epoch is accepted |
//! | FENCE, COORDINATOR | a host has one daemon at a time, and an epoch one coordinator |
//! | RETURN | ranks do not hear of connections that only break |
//! | WAIT | the job ends in time; at the end of a run |

use std::collections::{BTreeMap, BTreeSet};

use gradwire_coordinator::model::command::Operation;
use gradwire_proto::{Failure, FailureKind};
use gradwire_services::launch::Role;
use gradwire_worker::formation::{Formation, KnownSet, VoteId};

use crate::world::{Buffer, Pid};

/// What a worker contributes in a step of an epoch: a number that no other one has by chance.
pub(crate) fn contribution(worker: u64, epoch: u64, step: u64) -> u64 {
    let mut mixed = worker << 40 ^ epoch << 20 ^ step ^ 0x9e37_79b9_7f4a_7c15;
    for _ in 0..2 {
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    }
    mixed ^ mixed >> 31
}

/// What is known of an epoch.
#[derive(Debug, Default)]
struct Epoch {
    /// The workers that the launcher chose, by the order of their nodes.
    nodes: BTreeMap<u32, Vec<u32>>,
    /// All its daemons have served.
    has_served: bool,
    coordinator: Option<Pid>,
    attached: BTreeSet<u32>,
    cause: Option<Failure>,
    state: Option<(u64, u64)>,
    sets: BTreeMap<(u64, u32), Vec<u32>>,
    operations: BTreeMap<u64, String>,
    /// The last operation of each daemon.
    started: BTreeMap<Pid, u64>,
    results: BTreeMap<(u32, String, u64), Vec<u64>>,
}

impl Epoch {
    fn workers(&self) -> Vec<u32> {
        self.nodes.values().flatten().copied().collect()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Check {
    /// The label of the predicate that does not hold, and what happened.
    pub(crate) found: Option<(&'static str, String)>,
    epochs: BTreeMap<u64, Epoch>,
    answers: BTreeMap<VoteId, BTreeMap<u32, bool>>,
    /// Hosts have left or lost slots: their workers may count as newcomers again.
    pub(crate) is_relisted: bool,
    /// How many times a worker has heard of a failure.
    pub(crate) failures: u32,
    /// How many workers have finished the program.
    pub(crate) finished: u32,
    last_state: Option<(u64, u64)>,
}

impl Check {
    pub(crate) fn fault(&mut self, label: &'static str, text: String) {
        self.found.get_or_insert((label, text));
    }

    fn holds(&mut self, label: &'static str, holds: bool, text: impl FnOnce() -> String) {
        if !holds {
            self.fault(label, text());
        }
    }

    fn epoch(&mut self, epoch: u64) -> &mut Epoch {
        self.epochs.entry(epoch).or_default()
    }

    /// The launcher starts a daemon. `earlier` is whether its host still has another one.
    pub(crate) fn started_daemon(&mut self, epoch: u64, earlier: bool) {
        self.holds("FENCE", !earlier, || {
            format!("a daemon of epoch {epoch} starts beside that of an earlier one")
        });
    }

    /// The launcher has chosen the workers of a node.
    pub(crate) fn listed(&mut self, epoch: u64, order: &str, workers: &str) {
        let order = order.parse().expect("a number");
        let workers = workers.split(',').map(|id| id.parse().expect("a number")).collect();
        self.epoch(epoch).nodes.insert(order, workers);
    }

    pub(crate) fn served(&mut self, epoch: u64) {
        self.epoch(epoch).has_served = true;
        self.check_order(epoch);
    }

    /// Nodes are in the order of their lowest rank in an earlier epoch. On a node, survivors keep
    /// their order, and newcomers follow by their numbers.
    fn check_order(&mut self, epoch: u64) {
        if self.is_relisted {
            return;
        }
        let before = |worker: u32| {
            let earlier = self.epochs.range(..epoch).rev().filter(|(_, one)| one.has_served);
            let mut ranks =
                earlier.map(|(_, one)| one.workers().iter().position(|other| *other == worker));
            ranks.find_map(|rank| rank).unwrap_or(usize::MAX)
        };
        let nodes: Vec<Vec<(usize, u32)>> = self.epochs[&epoch]
            .nodes
            .values()
            .map(|node| node.iter().map(|worker| (before(*worker), *worker)).collect())
            .collect();
        let is_right = nodes.iter().all(|node| node.is_sorted())
            && nodes.is_sorted_by_key(|node| node.first().map_or(usize::MAX, |(rank, _)| *rank));
        self.holds("RANKS", is_right, || {
            format!("epoch {epoch} has these earlier ranks and workers: {nodes:?}")
        });
    }

    pub(crate) fn coordinator(&mut self, epoch: u64, pid: Pid) {
        let earlier = self.epoch(epoch).coordinator.replace(pid);
        self.holds("COORDINATOR", earlier.is_none(), || {
            format!("processes {earlier:?} and {pid} host the coordinator of epoch {epoch}")
        });
    }

    pub(crate) fn attached(&mut self, epoch: u64, rank: u32, role: Role) {
        let Role::Rank(worker) = role else { return };
        let one = self.epoch(epoch);
        let workers = one.workers();
        let is_new = one.attached.insert(worker);
        self.holds("MEMBER", is_new && workers.contains(&worker), || {
            format!("worker {worker} attaches to epoch {epoch} of {workers:?}")
        });
        self.holds("RANKS", workers.get(rank as usize) == Some(&worker), || {
            format!("worker {worker} is rank {rank} of epoch {epoch} of {workers:?}")
        });
    }

    /// The ranks of an epoch know each other.
    pub(crate) fn world(&mut self, epoch: u64, workers: &[u32]) {
        let listed = self.epoch(epoch).workers();
        self.holds("MEMBER", listed == workers, || {
            format!("epoch {epoch} of {listed:?} has formed with {workers:?}")
        });
    }

    /// The coordinator has ordered an operation.
    pub(crate) fn ordered(&mut self, epoch: u64, last: Option<u64>, number: u64) {
        self.holds("ORD", last.is_none_or(|last| last < number), || {
            format!("operation {number} of epoch {epoch} follows {last:?}")
        });
    }

    /// A daemon starts an operation.
    pub(crate) fn starts(&mut self, epoch: u64, pid: Pid, number: u64, operation: &Operation) {
        // The agreement comes only once to those that do not know the tensor.
        let segments: Vec<_> = operation
            .segments
            .iter()
            .map(|one| (&one.tensor, one.part, one.offset, one.count))
            .collect();
        let text = format!("{:?} {:?} {segments:?}", operation.set, operation.absent);
        let one = self.epoch(epoch);
        let last = one.started.insert(pid, number);
        let known = one.operations.entry(number).or_insert_with(|| text.clone()).clone();
        self.holds("ORD", last.is_none_or(|last| last < number), || {
            format!("daemon {pid} starts operation {number} of epoch {epoch} after {last:?}")
        });
        self.holds("ORD", known == text, || {
            format!("operation {number} of epoch {epoch} is {known} and {text}")
        });
    }

    /// A frame or a connection is accepted in an epoch.
    pub(crate) fn frame(&mut self, epoch: u64, received: u32) {
        self.holds("EPOCH", epoch as u32 == received, || {
            format!("epoch {epoch} accepts bytes of epoch {received}")
        });
    }

    /// What a connection carries is not what was sent.
    pub(crate) fn nonsense(&mut self, epoch: u64) {
        self.fault("ONE", format!("a connection of epoch {epoch} carries nonsense"));
    }

    pub(crate) fn common_cause(&mut self, epoch: u64, failure: &Failure) {
        let cause = self.epoch(epoch).cause.get_or_insert_with(|| failure.clone()).clone();
        self.holds("TELL", cause == *failure, || {
            format!("epoch {epoch} ends twice: {cause}; {failure}")
        });
    }

    /// A worker learns why its epoch ends.
    pub(crate) fn told(&mut self, epoch: u64, worker: u32, failure: &Failure, is_common: bool) {
        self.failures += 1;
        let cause = self.epoch(epoch).cause.clone();
        self.holds("TELL", !is_common || cause.as_ref() == Some(failure), || {
            format!("worker {worker} of epoch {epoch} hears {failure} instead of {cause:?}")
        });
        let is_known = failure.is_recoverable() || failure.kind == FailureKind::Cancelled;
        self.holds("TELL", is_known, || {
            format!("the program is right, but worker {worker} hears {failure}")
        });
    }

    /// The operation of a buffer has failed.
    pub(crate) fn aborted(&mut self, name: &str, buffer: &Buffer) {
        let Buffer { data, input, written } = buffer;
        let elements = data.iter().zip(input).zip(written);
        let wrong = elements.filter(|((now, before), written)| now != before && !**written).count();
        self.holds("INPUT", wrong == 0, || {
            format!("{wrong} elements of {name} have neither their input nor a whole result")
        });
    }

    /// A worker has the result of a reduction.
    pub(crate) fn result(
        &mut self,
        (epoch, set, name, step): (u64, u32, &str, u64),
        members: &[u32],
        result: &[u64],
    ) {
        let one = |worker: &u32| contribution(u64::from(*worker), epoch, step);
        let sum = members.iter().map(one).fold(0, u64::wrapping_add);
        let expected = (0u64..).map(|at| sum.wrapping_mul(2 * at + 1));
        let wrong = result.iter().zip(expected).filter(|(one, other)| **one != *other).count();
        self.holds("ONE", wrong == 0 && !result.is_empty(), || {
            format!("{wrong} elements of {name} in step {step} of epoch {epoch} are wrong")
        });
        let key = (set, name.to_owned(), step);
        let first = self.epoch(epoch).results.entry(key).or_insert_with(|| result.to_vec());
        let is_same = first == result;
        self.holds("SAME", is_same, || format!("ranks of epoch {epoch} differ in {name}"));
    }

    /// A worker knows the answer of a vote, like some of these workers.
    pub(crate) fn answered(&mut self, worker: u32, vote: VoteId, yes: bool, among: &[u32]) {
        let answers = self.answers.entry(vote).or_default();
        answers.insert(worker, yes);
        let other = answers.iter().find(|(other, one)| among.contains(other) && **one != yes);
        let other = other.map(|(other, _)| *other);
        self.holds("VOTE", other.is_none(), || {
            format!("{vote:?} is {yes} on worker {worker}, but not on worker {other:?}")
        });
    }

    /// The process sets that have come back on a worker.
    pub(crate) fn sets<'a>(
        &mut self,
        epoch: u64,
        sets: impl Iterator<Item = &'a KnownSet>,
        workers: &[u32],
    ) {
        for set in sets {
            let is_whole = set.workers.iter().all(|worker| workers.contains(worker));
            self.holds("SETS", is_whole, || {
                format!("{set:?} is back in epoch {epoch} of {workers:?}")
            });
            let known = self.epoch(epoch).sets.entry((set.epoch, set.id));
            let is_same = known.or_insert_with(|| set.workers.clone()) == &set.workers;
            self.holds("SETS", is_same, || format!("ranks of epoch {epoch} differ in {set:?}"));
        }
    }

    /// An epoch has formed on a worker, which has this number of steps and this state, unless it
    /// lacks the state of the job.
    pub(crate) fn formed(
        &mut self,
        epoch: u64,
        worker: u32,
        formation: &Formation,
        state: Option<(u64, u64)>,
    ) {
        let Some(state) = state else {
            for answers in self.answers.values_mut() {
                answers.remove(&worker);
            }
            let newcomers = formation.newcomers;
            return self.holds("STATE", newcomers, || {
                format!("worker {worker} of epoch {epoch} lacks the state, and nobody says so")
            });
        };
        let first = *self.epoch(epoch).state.get_or_insert(state);
        self.holds("STATE", first == state, || {
            format!("worker {worker} forms epoch {epoch} with {state:?}, others with {first:?}")
        });
    }

    /// The oldest rank has this age; a rank that may lack the state of the job or not has made this
    /// step.
    pub(crate) fn root(&mut self, age: u64, lacks_state: bool, step: u64) {
        self.holds("STATE", lacks_state || age == step + 1, || {
            format!("the rank that gives its state has age {age}, others are at step {step}")
        });
    }

    /// A worker has finished the program with this state.
    pub(crate) fn finished(&mut self, step: u64, state: u64) {
        self.finished += 1;
        let first = *self.last_state.get_or_insert((step, state));
        self.holds("STATE", first == (step, state), || {
            format!("a worker ends with {:?}, another one with {first:?}", (step, state))
        });
    }
}
