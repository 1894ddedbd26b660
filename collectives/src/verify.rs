//! Proves schedules correct by running them on symbols.
//!
//! For one participant count, [`verify`] shows that
//!
//! - sends and receives pair up: numbers, blocks, ranges;
//! - dependencies and messages together have no cycle, so nothing waits for itself (WAIT);
//! - no two steps race: if two touch one block and one of them writes, dependencies order them. So
//!   every order gives the same bits (SAME), and checking one order is enough;
//! - each participant that gets the result publishes each block once, when it holds every wanted
//!   contribution exactly once and no other (ONE), and doesn't touch it afterwards. Others publish
//!   nothing, and participants whose contribution isn't wanted don't reduce it. Servers do neither;
//! - all participants that publish a block have added it up in the same order and rounded the same
//!   partial sums, so they publish the same bits (SAME).
//!
//! Steps that share blocks may follow each other byte by byte, but each byte of a block goes
//! through the same steps in the same order, so the proof for the block holds for each of its
//! bytes.

mod error;
mod graph;
mod symbols;

use crate::{
    algorithms::{Kind, Roles, Section},
    schedule::{Action, Block, Schedule, Steps},
    topology::Topology,
};

pub use error::VerifyError;
pub use graph::Graph;
pub use symbols::canonical_order;

/// Figures of proven schedules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// Steps of all participants.
    pub steps: u64,
    /// Messages between participants.
    pub messages: u64,
    /// The most messages on one path of dependencies.
    pub longest_chain: u64,
    /// Elements that the busiest participant sends.
    pub most_elements_sent: u64,
    /// Elements sent by all participants.
    pub elements_sent: u64,
    /// A hash of the order of additions, if it is the same for all blocks; see
    /// [`canonical_order`].
    pub order: Option<u64>,
}

/// Proves that `schedules`, one for each participant in order, achieve `kind`, with equal shares
/// where each participant has one. Memory grows with participants² × blocks bits.
///
/// # Errors
/// [`VerifyError`] says which step of which participant is wrong, and why.
pub fn verify(schedules: &[Schedule], kind: Kind) -> Result<Report, VerifyError> {
    let count = schedules.first().map_or(0, |first| first.blocks.iter().map(|b| b.count).sum());
    verify_sections(schedules, &kind.sections(schedules.len() as u32, count))
}

/// As [`verify`], for a piece of these sections.
///
/// # Errors
/// As [`verify`], also if blocks are in no section or in several.
pub fn verify_sections(
    schedules: &[Schedule],
    sections: &[Section],
) -> Result<Report, VerifyError> {
    let graph = Graph::new(schedules)?;
    let roles = match schedules.first() {
        Some(first) => roles(&first.blocks, sections)?,
        None => Vec::new(),
    };
    for schedule in schedules {
        takes_part(schedule, &roles)?;
        no_race(schedule)?;
    }
    let order = graph.order(schedules)?;
    let additions = symbols::run(schedules, &roles, &graph, &order)?;

    let sent: Vec<u64> = schedules.iter().map(|s| sent(s, |_| true)).collect();
    Ok(Report {
        steps: graph.steps() as u64,
        messages: graph.messages(),
        longest_chain: graph.longest_chain(&order),
        most_elements_sent: sent.iter().copied().max().unwrap_or(0),
        elements_sent: sent.iter().sum(),
        order: additions,
    })
}

/// Elements that cross from one group of a tier to another; the racks are tier 1.
///
/// # Panics
/// If the topology doesn't have this tier.
pub fn cross_tier_elements(schedules: &[Schedule], topology: &Topology, tier: usize) -> u64 {
    schedules.iter().map(|s| sent(s, |peer| !topology.same_group(tier, s.me, peer))).sum()
}

fn sent(schedule: &Schedule, counts: impl Fn(u32) -> bool) -> u64 {
    let sends = schedule.steps.iter().filter_map(|step| {
        let (peer, _) = step.action.sends_to()?;
        counts(peer).then(|| schedule.elements(step))
    });
    sends.sum()
}

/// The roles of each block, which is in one section. Where each section is one block, the block has
/// the roles of its section, even if it is empty. Otherwise an empty block has those of the section
/// that begins there, or else of the section before it.
fn roles(blocks: &[Block], sections: &[Section]) -> Result<Vec<Roles>, VerifyError> {
    let counts = blocks.iter().map(|block| block.count);
    if counts.eq(sections.iter().map(|section| section.count)) {
        return Ok(sections.iter().map(|section| section.roles).collect());
    }
    let mut starts = Vec::with_capacity(sections.len());
    let mut end = 0u64;
    for section in sections {
        starts.push(end);
        end += section.count;
    }
    let section = |(number, block): (u32, &Block)| {
        let at = starts.partition_point(|&start| start <= block.offset).checked_sub(1);
        let fits = |&at: &usize| block.offset + block.count <= starts[at] + sections[at].count;
        at.filter(fits).map(|at| sections[at].roles).ok_or(VerifyError::Section { block: number })
    };
    (0..).zip(blocks).map(section).collect()
}

/// Checks that only contributors reduce, and that receivers of the result publish each block once.
fn takes_part(schedule: &Schedule, roles: &[Roles]) -> Result<(), VerifyError> {
    let participant = schedule.me;
    let is_server = schedule.is_server(participant);
    let mut times = vec![0u32; schedule.blocks.len()];
    for (at, step) in (0..).zip(schedule.steps.iter()) {
        match step.action {
            Action::Publish => step.blocks().for_each(|block| times[block as usize] += 1),
            Action::ReduceLocal => {
                let mut blocks = step.blocks();
                let contributes = |block: u32| roles[block as usize].contributes(participant);
                let uncalled = |block: &u32| is_server || !contributes(*block);
                if let Some(block) = blocks.find(uncalled) {
                    return Err(VerifyError::Uncalled { participant, step: at, block });
                }
            }
            _ => {}
        }
    }
    for ((block, times), roles) in (0..).zip(times).zip(roles) {
        let expected = u32::from(!is_server && roles.publishes(participant));
        if times != expected {
            return Err(VerifyError::Published { participant, block, times, expected });
        }
    }
    Ok(())
}

/// Checks that steps on a block are ordered if one of them writes it (SAME). It is enough that each
/// write comes after the write before it and after the reads since then.
fn no_race(schedule: &Schedule) -> Result<(), VerifyError> {
    let steps = &schedule.steps;
    // For each block the last write, and the reads since then.
    let mut touched: Vec<(Option<usize>, Vec<usize>)> =
        vec![(None, Vec::new()); schedule.blocks.len()];
    for (at, step) in steps.iter().enumerate() {
        for block in step.blocks() {
            let ordered = |first: usize| {
                let (participant, second) = (schedule.me, at as u32);
                let race = VerifyError::Race { participant, first: first as u32, second, block };
                comes_first(steps, block, first, at).then_some(()).ok_or(race)
            };
            let (written, read) = &mut touched[block as usize];
            written.map_or(Ok(()), ordered)?;
            if step.action.writes() {
                read.drain(..).try_for_each(ordered)?;
                *written = Some(at);
            } else {
                read.push(at);
            }
        }
    }
    Ok(())
}

/// Whether one step acts on a block before another. Dependencies lead from one to the other, and
/// each of them holds for the block: it waits for the end of a step, or both steps cover the block.
fn comes_first(steps: &Steps, block: u32, first: usize, second: usize) -> bool {
    // Both cover the block. Most dependencies are direct, and need no search.
    if steps.at(second).after.contains(&(first as u32)) {
        return true;
    }
    let mut seen = vec![false; second - first + 1];
    let mut open = vec![second];
    while let Some(at) = open.pop() {
        for &before in steps.at(at).after {
            let before = before as usize;
            if before < first || seen[before - first] {
                continue;
            }
            let (earlier, later) = (steps.at(before), steps.at(at));
            let both_cover = earlier.covers(block) && later.covers(block);
            if both_cover || !earlier.shares_blocks(&later) {
                if before == first {
                    return true;
                }
                seen[before - first] = true;
                open.push(before);
            }
        }
    }
    false
}
