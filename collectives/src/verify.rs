//! The proof that schedules are right, by running them on symbols.
//!
//! For one participant count, [`verify`] shows that
//!
//! - sends and receives pair up: numbers, blocks, ranges;
//! - no order that the dependencies allow waits for itself: dependencies and messages together have
//!   no cycle (WAIT);
//! - no two steps race: of two that touch one block, one of them writing, one comes first by
//!   dependencies. So every order gives the same bits (SAME), and one order stands for all;
//! - each participant that gets the result publishes each block once, when it holds every
//!   contribution that it should exactly once and no other (ONE), and doesn't touch it afterwards;
//!   others publish nothing, and whose contribution isn't asked for doesn't reduce it.
//!
//! Steps of one block may follow each other at byte granularity, but each byte goes through the
//! same steps in the same order, so what is proven of the block holds for each of its bytes.

mod graph;
mod symbols;

use crate::{
    algorithms::Kind,
    schedule::{Action, Schedule, Step},
    topology::Topology,
};

pub(crate) use graph::Graph;

/// What is known of schedules that have been proven.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// Steps of all participants.
    pub steps: u64,
    /// Messages between participants.
    pub messages: u64,
    /// The most messages that follow from each other.
    pub longest_chain: u64,
    /// Elements that the busiest participant sends.
    pub most_elements_sent: u64,
    /// Elements sent by all participants.
    pub elements_sent: u64,
}

/// What is wrong with schedules, and where. Steps and blocks are indices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerifyError {
    /// The list of schedules isn't one schedule per participant, in order.
    #[error(
        "schedule {at} of {schedules} says that it is participant {me}'s of {participants}: give one for each participant, in order"
    )]
    Participants {
        /// Its place in the list.
        at: u32,
        /// How many schedules there are.
        schedules: u32,
        /// Whose it says it is.
        me: u32,
        /// How many participants it says there are.
        participants: u32,
    },
    /// Blocks don't tile the piece, or differ between participants.
    #[error(
        "participant {participant}: block {block} doesn't begin where the one before it ends, or isn't participant 0's"
    )]
    Blocks {
        /// Whose blocks.
        participant: u32,
        /// The first that is wrong.
        block: u32,
    },
    /// A step names a block or a peer that isn't there, or itself as a peer.
    #[error(
        "participant {participant} step {step}: {action:?} names a block or a peer that it can't"
    )]
    Names {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// What it does.
        action: Action,
    },
    /// A step comes after one that isn't earlier in the list.
    #[error(
        "participant {participant} step {step}: depends on step {after}, which isn't an earlier one"
    )]
    After {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The dependency.
        after: u32,
    },
    /// A message's number isn't the next one between the two.
    #[error(
        "participant {participant} step {step}, block {block}: message {found} with peer {peer} should have number {expected}"
    )]
    Number {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// Its block.
        block: u32,
        /// The other end.
        peer: u32,
        /// The number that it should have.
        expected: u32,
        /// The number that it has.
        found: u32,
    },
    /// One end of a message has no other end, or another block.
    #[error(
        "participant {participant} step {step}, block {block}: message {message} with peer {peer} has no matching {missing} there"
    )]
    Unpaired {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// Its block.
        block: u32,
        /// The other end.
        peer: u32,
        /// The number.
        message: u32,
        /// `send` or `receive`.
        missing: &'static str,
    },
    /// A step waits, over others, for itself.
    #[error(
        "participant {participant} step {step}, block {block}: waits for itself over dependencies and messages"
    )]
    Cycle {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// Its block.
        block: u32,
    },
    /// Two steps touch one block in no order, and one of them writes it.
    #[error(
        "participant {participant} steps {first} and {second}: both touch block {block} and neither comes after the other"
    )]
    Race {
        /// Whose steps.
        participant: u32,
        /// One.
        first: u32,
        /// The other.
        second: u32,
        /// The block.
        block: u32,
    },
    /// A step uses a block that nothing has written.
    #[error("participant {participant} step {step}: uses block {block}, which holds nothing yet")]
    Nothing {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The block.
        block: u32,
    },
    /// A reduction would count a contribution twice (ONE).
    #[error(
        "participant {participant} step {step}: reduces participant {contributor}'s contribution into block {block} a second time"
    )]
    Twice {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The block.
        block: u32,
        /// Whose contribution.
        contributor: u32,
    },
    /// What is published isn't the result (ONE).
    #[error(
        "participant {participant} step {step}: publishes block {block}, but participant {contributor}'s contribution is {fault}"
    )]
    Result {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The block.
        block: u32,
        /// Whose contribution.
        contributor: u32,
        /// `missing` or `too much`.
        fault: &'static str,
    },
    /// A block is written after it was published.
    #[error("participant {participant} step {step}: writes block {block} after it was published")]
    Late {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The block.
        block: u32,
    },
    /// A participant reduces its local contributions, which aren't asked for.
    #[error(
        "participant {participant} step {step}: reduces local contributions to block {block}, but has no part in the result"
    )]
    Uncalled {
        /// Whose step.
        participant: u32,
        /// Which.
        step: u32,
        /// The block.
        block: u32,
    },
    /// A block isn't published once by those who get it, or is published by others.
    #[error(
        "participant {participant}: publishes block {block} {times} times instead of {expected}"
    )]
    Published {
        /// Who.
        participant: u32,
        /// The block.
        block: u32,
        /// How often.
        times: u32,
        /// How often it should: 1 if it gets the result.
        expected: u32,
    },
}

/// Proves that `schedules`, one for each participant in order, achieve `kind`. Memory grows with
/// participants² × blocks bits.
///
/// # Errors
/// [`VerifyError`] says which step of whom is wrong, and what is wrong with it.
pub fn verify(schedules: &[Schedule], kind: Kind) -> Result<Report, VerifyError> {
    let graph = Graph::new(schedules)?;
    for schedule in schedules {
        takes_part(schedule, kind)?;
        no_race(schedule)?;
    }
    let order = graph.order(schedules)?;
    symbols::run(schedules, kind, &graph, &order)?;

    let sent: Vec<u64> = schedules.iter().map(|s| sent(s, |_| true)).collect();
    Ok(Report {
        steps: graph.len() as u64,
        messages: graph.messages(),
        longest_chain: graph.longest_chain(&order),
        most_elements_sent: sent.iter().copied().max().unwrap_or(0),
        elements_sent: sent.iter().sum(),
    })
}

/// Elements that cross from one rack to another when `schedules` run.
pub fn cross_rack_elements(schedules: &[Schedule], topology: &Topology) -> u64 {
    schedules.iter().map(|s| sent(s, |peer| !topology.same_rack(s.me, peer))).sum()
}

fn sent(schedule: &Schedule, counts: impl Fn(u32) -> bool) -> u64 {
    let sends = schedule.steps.iter().filter_map(|step| {
        let (peer, _) = step.action.sends_to()?;
        counts(peer).then(|| schedule.blocks[step.action.block() as usize].count)
    });
    sends.sum()
}

/// Who contributes may reduce, who gets the result publishes each block once.
fn takes_part(schedule: &Schedule, kind: Kind) -> Result<(), VerifyError> {
    let participant = schedule.me;
    let expected = u32::from(kind.publishes(participant));
    let mut times = vec![0u32; schedule.blocks.len()];
    for (step, Step { action, .. }) in (0..).zip(&schedule.steps) {
        match *action {
            Action::Publish { block } => times[block as usize] += 1,
            Action::ReduceLocal { block } if !kind.contributes(participant) => {
                return Err(VerifyError::Uncalled { participant, step, block });
            }
            _ => {}
        }
    }
    match (0..).zip(times).find(|&(_, times)| times != expected) {
        None => Ok(()),
        Some((block, times)) => Err(VerifyError::Published { participant, block, times, expected }),
    }
}

/// Of two steps that touch a block, one of them writing, one comes first (SAME).
fn no_race(schedule: &Schedule) -> Result<(), VerifyError> {
    // For each step the set of all that come before it.
    let words = schedule.steps.len().div_ceil(64);
    let mut before: Vec<Vec<u64>> = Vec::with_capacity(schedule.steps.len());
    let mut of_block: Vec<Vec<usize>> = vec![Vec::new(); schedule.blocks.len()];
    for (at, step) in schedule.steps.iter().enumerate() {
        let mut set = vec![0u64; words];
        for &after in &step.after {
            let after = after as usize;
            set.iter_mut().zip(&before[after]).for_each(|(to, from)| *to |= from);
            set[after / 64] |= 1 << (after % 64);
        }
        let block = step.action.block();
        for &earlier in &of_block[block as usize] {
            let writes = step.action.writes() || schedule.steps[earlier].action.writes();
            if writes && set[earlier / 64] & (1 << (earlier % 64)) == 0 {
                let (first, second) = (earlier as u32, at as u32);
                return Err(VerifyError::Race { participant: schedule.me, first, second, block });
            }
        }
        of_block[block as usize].push(at);
        before.push(set);
    }
    Ok(())
}
