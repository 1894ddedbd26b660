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

mod error;
mod graph;
mod symbols;

use crate::{
    algorithms::Kind,
    schedule::{Action, Schedule, Step},
    topology::Topology,
};

pub use error::VerifyError;
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
