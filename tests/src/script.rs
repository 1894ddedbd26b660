//! A random job, made only from a seed. Every rank makes the same job, in any process, and does its
//! part of it. Every process can check the results of every rank.
//!
//! The job has phases. In each phase, a process set may be added and others removed, while calls of
//! all sets are in flight. Every call is made twice: the second time the coordinator knows its
//! name. Each rank submits and waits in its own order, as far as the API allows: unnamed calls,
//! messages and new sets must have the same order on all ranks. At the end, each rank has data for
//! a different number of calls, and joins.

mod random;

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
};

use gradwire_proto::{Collective, Compression};
use gradwire_worker::{JoinOptions, ProcessSet, Session};

use crate::{
    calls::{COLLECTIVES, Call, Got, Pending},
    cluster::Plan,
};
use gradwire_reference::{Between, Dice};

/// The collectives that can do without joined ranks.
const DO_WITHOUT: [Collective; 6] = [
    Collective::Allreduce,
    Collective::Broadcast,
    Collective::Barrier,
    Collective::Reduce,
    Collective::Allgather,
    Collective::Gather,
];

const PHASES: usize = 2;
const ROUNDS: u64 = 2;

/// A process set of the job.
#[derive(Debug, Clone)]
struct Set {
    ranks: Vec<u32>,
    /// The phase in which it is added.
    made: usize,
    /// The phase at whose end it is removed; [`PHASES`] if it never is.
    removed: usize,
}

/// A call of the job.
#[derive(Debug, Clone)]
struct Planned {
    phase: usize,
    /// The index of its process set; 0 is all ranks.
    set: usize,
    call: Call,
}

/// The index of a call, and of the round in which it is made.
pub type Key = (usize, u64);

/// The results of a rank's calls.
pub type Results = BTreeMap<Key, Got>;

/// A random job.
#[derive(Debug, Clone)]
pub struct Script {
    /// Nodes, ranks and settings.
    pub plan: Plan,
    compression: Compression,
    seed: u64,
    sets: Vec<Set>,
    calls: Vec<Planned>,
    /// The last calls, of the ranks that still have data.
    last: Vec<Call>,
}

impl Script {
    /// The job of a seed, with `calls` calls on tensors of at most `most_bytes` bytes. A job with
    /// fewer calls is the beginning of a job with more calls.
    pub fn of(seed: u64, calls: usize, most_bytes: u64) -> Self {
        let mut dice = Dice::of(&[seed]);
        let plan = random::plan(&mut dice);
        let compression = dice.pick(Compression::ALL);
        let streams = dice.pick(&[1, 2, 3]);
        let threads = dice.pick(&["auto", "3", "32"]);
        let plan = plan
            .set(format!("data.compression={compression}"))
            // The reference does not know the error feedback of earlier tensors of the same name.
            .set("data.feedback_max_bytes=0")
            .set(format!("data.streams={streams}"))
            .set(format!("data.threads={threads}"))
            .set(format!("tuning.enabled={}", dice.one_in(2)));
        let is_strict = compression == Compression::None && dice.one_in(4);
        let plan = if is_strict {
            let algorithms = ["auto", "recursive-doubling", "rabenseifner,halving-doubling"];
            plan.set("negotiation.strict=true")
                .set(format!("negotiation.algorithm={}", dice.pick(&algorithms)))
        } else if compression.is_quantized() {
            // The job refuses other algorithms.
            plan.set(format!(
                "negotiation.algorithm={}",
                dice.pick(&["auto", "direct", "hierarchical"])
            ))
        } else {
            let algorithms = ["auto", "ring(chunk=4K)", "circulant(radix=3,chunk=16K)", "servers"];
            plan.set(format!("negotiation.algorithm={}", dice.pick(&algorithms)))
        };
        let size = plan.slots.iter().sum();
        let mut sets = vec![Set { ranks: (0..size).collect(), made: 0, removed: PHASES }];
        for phase in 0..PHASES {
            // At most one set in each phase. Some sets stay until the end.
            if dice.below(4) > 0 {
                let ranks = random::members(&mut dice, size);
                let removed = phase + dice.below((PHASES - phase) as u64 + 1) as usize;
                sets.push(Set { ranks, made: phase, removed });
            }
        }
        let planned = |index: usize| {
            let mut dice = Dice::of(&[seed, 1, index as u64]);
            let phase = dice.below(PHASES as u64) as usize;
            let there = |set: &usize| (sets[*set].made..=sets[*set].removed).contains(&phase);
            let there: Vec<usize> = (0..sets.len()).filter(there).collect();
            let set = dice.pick(&there);
            let ranks = &sets[set].ranks;
            let call = random::call(&mut dice, &COLLECTIVES, index, ranks, most_bytes);
            Planned { phase, set, call }
        };
        let planned: Vec<Planned> = (0..calls).map(planned).collect();
        let left: Vec<u64> = (0..size).map(|_| dice.below(calls as u64 + 1).min(5)).collect();
        let last = |number: u64| {
            let mut dice = Dice::of(&[seed, 4, number]);
            let there = |rank: &u32| left[*rank as usize] > number;
            let there: Vec<u32> = (0..size).filter(there).collect();
            let index = calls + number as usize;
            let call = random::call(&mut dice, &DO_WITHOUT, index, &there, most_bytes);
            Call { name: Some(format!("last.{number}")), ..call }
        };
        let last = (0..left.iter().copied().max().unwrap_or(0)).map(last).collect();
        Self { plan, compression, seed, sets, calls: planned, last }
    }

    /// A call in a round, with the data of that round.
    fn call(&self, (index, round): Key) -> Call {
        let planned = self.calls.get(index).map(|planned| &planned.call);
        let mut call = planned.unwrap_or_else(|| &self.last[index - self.calls.len()]).clone();
        call.seed = Dice::of(&[self.seed, 2, index as u64, round]).roll();
        call
    }

    /// The calls of a phase that a rank takes part in, in the rank's own order.
    fn order(&self, phase: usize, rank: u32, dice: &mut Dice) -> Vec<usize> {
        let concerns = |index: &usize| {
            let planned = &self.calls[*index];
            planned.phase == phase && planned.call.ranks.contains(&rank)
        };
        let mut order: Vec<usize> = (0..self.calls.len()).filter(concerns).collect();
        dice.shuffle(&mut order);
        // Unnamed calls are distinguished by their order within the set.
        for set in 0..self.sets.len() {
            let unnamed = |index: usize| {
                let planned = &self.calls[index];
                planned.set == set && planned.call.name.is_none()
            };
            let places: Vec<usize> = (0..order.len()).filter(|at| unnamed(order[*at])).collect();
            let mut calls: Vec<usize> = places.iter().map(|at| order[*at]).collect();
            calls.sort_unstable();
            for (place, call) in places.into_iter().zip(calls) {
                order[place] = call;
            }
        }
        order
    }

    /// Does one rank's part.
    ///
    /// # Errors
    /// The first call that failed.
    pub fn run(&self, session: &Session) -> Result<Results, String> {
        let mut dice = Dice::of(&[self.seed, 3, session.rank().into()]);
        let mut sets = vec![Some(session.global_process_set())];
        sets.resize(self.sets.len(), None);
        let mut results = Results::new();
        for (phase, round) in (0..PHASES).flat_map(|phase| (0..ROUNDS).map(move |r| (phase, r))) {
            let mut order = self.order(phase, session.rank(), &mut dice);
            let made = (1..sets.len()).find(|set| round == 0 && self.sets[*set].made == phase);
            let mut pending = Vec::new();
            if let Some(made) = made {
                // At a random position, but before the first call of the new set.
                let at = dice.below(order.len() as u64 + 1) as usize;
                let later = order.split_off(at);
                let (held, now): (Vec<usize>, Vec<usize>) =
                    order.into_iter().partition(|index| self.calls[*index].set == made);
                self.submit(session, &sets, &now, round, &mut pending)?;
                let ranks = &self.sets[made].ranks;
                let set = session.add_process_set(ranks);
                sets[made] = Some(set.map_err(|error| format!("adding {ranks:?}: {error}"))?);
                order = [held, later].concat();
            }
            self.submit(session, &sets, &order, round, &mut pending)?;
            dice.shuffle(&mut pending);
            let removed = |set: usize| round == ROUNDS - 1 && self.sets[set].removed == phase;
            let (first, rest): (Vec<_>, Vec<_>) =
                pending.into_iter().partition(|((index, _), _)| removed(self.calls[*index].set));
            self.wait(first, &mut results)?;
            for set in (1..sets.len()).filter(|set| removed(*set)) {
                let gone = sets[set].take().ok_or("the removed set does not exist")?;
                let text = gone.to_string();
                session
                    .remove_process_set(gone)
                    .map_err(|why| format!("removing {text}: {why}"))?;
            }
            self.wait(rest, &mut results)?;
        }
        self.run_out(session, &mut dice, &mut results)?;
        Ok(results)
    }

    /// Makes the last calls that this rank has data for, and joins.
    fn run_out(
        &self,
        session: &Session,
        dice: &mut Dice,
        results: &mut Results,
    ) -> Result<(), String> {
        let (all, first) = (session.global_process_set(), self.calls.len());
        let has_data = |key: &Key| self.call(*key).ranks.contains(&session.rank());
        let mut keys: Vec<Key> = (0..self.last.len()).map(|index| (first + index, 0)).collect();
        keys.retain(has_data);
        dice.shuffle(&mut keys);
        let mut pending = Vec::new();
        for key in keys {
            let call = self.call(key);
            let started = call.start(session, &all);
            pending.push((key, started.map_err(|error| format!("{}: {error}", call.title()))?));
        }
        let joined = session.join_async(JoinOptions::default());
        let joined = joined.map_err(|error| format!("joining: {error}"))?;
        dice.shuffle(&mut pending);
        self.wait(pending, results)?;
        match joined.wait() {
            Ok(last) if last < session.size() => {}
            other => return Err(format!("unexpected result of the join: {other:?}")),
        }
        // All ranks take part again.
        session.barrier().map_err(|error| format!("after the join: {error}"))
    }

    fn submit(
        &self,
        session: &Session,
        sets: &[Option<ProcessSet>],
        order: &[usize],
        round: u64,
        pending: &mut Vec<(Key, Pending)>,
    ) -> Result<(), String> {
        for &index in order {
            let call = self.call((index, round));
            let set = sets[self.calls[index].set].as_ref().ok_or("the set does not exist yet")?;
            let started = call.start(session, set);
            let started = started.map_err(|error| format!("{}: {error}", call.title()))?;
            pending.push(((index, round), started));
        }
        Ok(())
    }

    fn wait(&self, pending: Vec<(Key, Pending)>, results: &mut Results) -> Result<(), String> {
        for (key, pending) in pending {
            let got = pending.finish();
            let got = got.map_err(|error| format!("{}: {error}", self.call(key).title()))?;
            results.insert(key, got);
        }
        Ok(())
    }

    /// Checks the results of one rank.
    ///
    /// # Errors
    /// The first wrong result.
    pub fn check_rank(&self, rank: u32, results: &Results) -> Result<(), String> {
        let between = Between {
            nodes: self.plan.slots.iter().filter(|&&slots| slots > 0).count(),
            compression: self.compression,
        };
        results.iter().try_for_each(|(key, got)| self.call(*key).check(rank, got, between))
    }

    /// A hash of each result that has the same bits on all members of the call (SAME).
    pub fn digests(&self, results: &Results) -> BTreeMap<Key, u64> {
        let shared = results.iter().filter(|(key, _)| self.call(**key).is_shared());
        let digest = |got: &Got| {
            let mut hasher = DefaultHasher::new();
            got.iter().flatten().for_each(|piece| piece.bytes.hash(&mut hasher));
            hasher.finish()
        };
        shared.map(|(key, got)| (*key, digest(got))).collect()
    }

    /// SAME: the results of a call have identical bits on all ranks.
    ///
    /// # Errors
    /// The first call whose results differ.
    pub fn check_same(&self, digests: &[BTreeMap<Key, u64>]) -> Result<(), String> {
        let mut first = BTreeMap::new();
        for (rank, own) in digests.iter().enumerate() {
            for (key, digest) in own {
                let (other, right) = *first.entry(*key).or_insert((rank, *digest));
                if *digest != right {
                    let title = self.call(*key).title();
                    return Err(format!(
                        "ranks {other} and {rank} have different bits for {title}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks the results of all ranks, in rank order: each rank has a result of each of its calls.
    ///
    /// # Errors
    /// The first wrong, different or missing result.
    pub fn check(&self, results: &[Results]) -> Result<(), String> {
        for (rank, own) in (0..).zip(results) {
            let concerned = self.calls.iter().filter(|c| c.call.ranks.contains(&rank)).count();
            let last = self.last.iter().filter(|call| call.ranks.contains(&rank)).count();
            if own.len() as u64 != concerned as u64 * ROUNDS + last as u64 {
                return Err(format!("rank {rank} has {} results", own.len()));
            }
            self.check_rank(rank, own)?;
        }
        let digests: Vec<_> = results.iter().map(|own| self.digests(own)).collect();
        self.check_same(&digests)
    }
}
