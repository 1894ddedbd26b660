//! Running schedules on sets of contributors instead of numbers (ONE).

use super::{error::VerifyError, graph::Graph};
use crate::{
    algorithms::Kind,
    schedule::{Action, Schedule},
};

/// Whose contributions a block holds, each once: a bit per participant.
type Contributors = Vec<u64>;

fn only(participant: u32, words: usize) -> Contributors {
    let mut set = vec![0; words];
    set[participant as usize / 64] |= 1 << (participant % 64);
    set
}

/// The lowest participant in `set`, if there is one.
fn lowest(mut set: impl Iterator<Item = u64>) -> Option<u32> {
    let (at, word) = (0u32..).zip(&mut set).find(|&(_, word)| word != 0)?;
    Some(at * 64 + word.trailing_zeros())
}

/// Runs in `order`; without races and cycles any order is as good as another.
pub(super) fn run(
    schedules: &[Schedule],
    kind: Kind,
    graph: &Graph,
    order: &[usize],
) -> Result<(), VerifyError> {
    let participants = schedules.len() as u32;
    let words = schedules.len().div_ceil(64);
    let mut wanted = vec![0; words];
    for contributor in (0..participants).filter(|&participant| kind.contributes(participant)) {
        wanted[contributor as usize / 64] |= 1 << (contributor % 64);
    }
    let blocks = schedules.first().map_or(0, |schedule| schedule.blocks.len());
    let mut work: Vec<Option<Contributors>> = vec![None; schedules.len() * blocks];
    let mut published = vec![false; work.len()];
    let mut on_the_way: Vec<Option<Contributors>> = vec![None; graph.len()];

    for &node in order {
        let (participant, step) = graph.step(node);
        let action = schedules[participant].steps[step].action;
        let block = action.block();
        if schedules[participant].blocks[block as usize].count == 0 {
            continue; // nothing is in it, and nothing has to be
        }
        let (participant, step) = (participant as u32, step as u32);
        let at = participant as usize * blocks + block as usize;
        let nothing = VerifyError::Nothing { participant, step, block };
        if action.writes() && published[at] {
            return Err(VerifyError::Late { participant, step, block });
        }
        let received = graph.sender(node).and_then(|send| on_the_way[send].take());
        match action {
            Action::ReduceLocal { .. } => work[at] = Some(only(participant, words)),
            Action::Send { .. } => on_the_way[node] = Some(work[at].clone().ok_or(nothing)?),
            Action::RecvCopy { .. } => work[at] = Some(received.ok_or(nothing)?),
            Action::RecvReduce { .. } => {
                let (Some(work), Some(received)) = (&mut work[at], received) else {
                    return Err(nothing);
                };
                let both = work.iter().zip(&received).map(|(a, b)| a & b);
                if let Some(contributor) = lowest(both) {
                    return Err(VerifyError::Twice { participant, step, block, contributor });
                }
                work.iter_mut().zip(received).for_each(|(to, from)| *to |= from);
            }
            Action::Publish { .. } => {
                let held = work[at].as_ref().ok_or(nothing)?;
                let missing = lowest(held.iter().zip(&wanted).map(|(held, all)| all & !held));
                let extra = lowest(held.iter().zip(&wanted).map(|(held, all)| held & !all));
                let fault = missing.map(|c| (c, "missing")).or(extra.map(|c| (c, "too much")));
                if let Some((contributor, fault)) = fault {
                    let at = VerifyError::Result { participant, step, block, contributor, fault };
                    return Err(at);
                }
                published[at] = true;
            }
        }
    }
    Ok(())
}
