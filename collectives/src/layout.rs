//! Where the elements of a step are: in its message and in the piece. The executor and the
//! interpreter both need it, to follow earlier steps byte by byte.

use std::iter;

use crate::schedule::{Block, Schedule, StepView};

/// Elements that are contiguous in a step's message and in the piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stretch {
    /// The place of the first one in the message.
    pub at: u64,
    /// The place of the first one in the piece.
    pub offset: u64,
    /// How many there are.
    pub count: u64,
}

/// The same schedule over only the memory that its participant uses: blocks without a step become
/// empty. The blocks of a message are contiguous where possible.
pub fn compacted(mut schedule: Schedule) -> Schedule {
    let counts: Vec<u64> = schedule.blocks.iter().map(|block| block.count).collect();
    let mut is_placed = vec![false; counts.len()];
    let mut blocks = vec![Block::default(); counts.len()];
    let mut offset = 0;
    let is_message = |step: &StepView<'_>| {
        step.action.sends_to().is_some() || step.action.receives_from().is_some()
    };
    let messages = schedule.steps.iter().filter(is_message);
    for block in messages.chain(schedule.steps.iter()).flat_map(|step| step.blocks()) {
        let at = block as usize;
        if !std::mem::replace(&mut is_placed[at], true) {
            blocks[at] = Block { offset, count: counts[at] };
            offset += counts[at];
        }
    }
    schedule.blocks = blocks.into();
    schedule
}

/// The stretches of a step, in the order of its message: one for each block that is not empty.
pub fn stretches(schedule: &Schedule, step: &StepView<'_>) -> Vec<Stretch> {
    let mut at = 0;
    let all = step.blocks().map(|block| {
        let block = schedule.blocks[block as usize];
        let stretch = Stretch { at, offset: block.offset, count: block.count };
        at += block.count;
        stretch
    });
    all.filter(|stretch| stretch.count > 0).collect()
}

/// Joins stretches that are contiguous in the piece, too.
pub fn joined(stretches: &[Stretch]) -> Vec<Stretch> {
    let mut all: Vec<Stretch> = Vec::new();
    for &stretch in stretches {
        match all.last_mut() {
            Some(last) if last.offset + last.count == stretch.offset => last.count += stretch.count,
            _ => all.push(stretch),
        }
    }
    all
}

/// Elements that two steps share, contiguous in the messages of both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shared {
    /// Where they begin in the later step's message.
    at: u64,
    /// Where they begin in the earlier step's message.
    earlier_at: u64,
    count: u64,
}

impl Shared {
    /// The elements that two stretches have in common, if any.
    fn new(later: Stretch, earlier: Stretch) -> Option<Self> {
        let from = later.offset.max(earlier.offset);
        let to = (later.offset + later.count).min(earlier.offset + earlier.count);
        (from < to).then(|| Self {
            at: later.at + (from - later.offset),
            earlier_at: earlier.at + (from - earlier.offset),
            count: to - from,
        })
    }
}

/// How far a step may follow an earlier one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Follow {
    first: Shared,
    /// Usually empty.
    rest: Vec<Shared>,
}

impl Follow {
    /// From the stretches of two steps; none if they share no elements.
    pub fn new(later: &[Stretch], earlier: &[Stretch]) -> Option<Self> {
        if let ([later], [earlier]) = (later, earlier) {
            let first = Shared::new(*later, *earlier)?;
            return Some(Self { first, rest: Vec::new() });
        }
        let mut shared = Vec::new();
        for later in later {
            for earlier in earlier {
                shared.extend(Shared::new(*later, *earlier));
            }
        }
        shared.sort_by_key(|shared| shared.at);
        let mut shared = shared.into_iter();
        Some(Self { first: shared.next()?, rest: shared.collect() })
    }

    /// How many of its `count` elements the later step may process, in the order of its message,
    /// once the earlier one has finished its first `done`.
    pub fn limit(&self, done: u64, count: u64) -> u64 {
        let mut all = iter::once(&self.first).chain(&self.rest);
        let missing = all.find(|shared| shared.earlier_at + shared.count > done);
        missing.map_or(count, |shared| shared.at + done.saturating_sub(shared.earlier_at))
    }
}

/// The stretches of `from..to` of a step's message.
pub fn part(all: &[Stretch], from: u64, to: u64) -> impl Iterator<Item = Stretch> + '_ {
    let first = all.partition_point(move |stretch| stretch.at + stretch.count <= from);
    let inside = move |stretch: &&Stretch| stretch.at < to && from < to;
    all[first..].iter().take_while(inside).map(move |stretch| {
        let at = from.max(stretch.at);
        let end = to.min(stretch.at + stretch.count);
        Stretch { at, offset: stretch.offset + (at - stretch.at), count: end - at }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Action, Steps};

    fn schedule() -> Schedule {
        let counts = [10, 0, 5, 7, 3];
        let mut offset = 0;
        let blocks = counts
            .iter()
            .map(|&count| {
                offset += count;
                Block { offset: offset - count, count }
            })
            .collect();
        Schedule { blocks, ..Schedule::empty(1, 0) }
    }

    fn of(ranges: &[std::ops::Range<u32>]) -> Vec<Stretch> {
        let step = StepView { action: Action::Publish, ranges, after: &[] };
        stretches(&schedule(), &step)
    }

    fn stretch(at: u64, offset: u64, count: u64) -> Stretch {
        Stretch { at, offset, count }
    }

    #[test]
    fn messages_keep_the_order_of_the_list() {
        let wrapped = of(&[3..5, 0..2]);
        assert_eq!(wrapped, [stretch(0, 15, 7), stretch(7, 22, 3), stretch(10, 0, 10)]);
        assert_eq!(joined(&wrapped), [stretch(0, 15, 10), stretch(10, 0, 10)]);
        let some: Vec<_> = part(&joined(&wrapped), 8, 13).collect();
        assert_eq!(some, [stretch(8, 23, 2), stretch(10, 0, 3)]);
        assert_eq!(part(&wrapped, 4, 4).count(), 0);
    }

    #[test]
    fn unused_blocks_take_no_room() {
        let mut steps = Steps::default();
        steps.push(Action::ReduceLocal, [0..1, 2..3], []);
        steps.push(Action::send(1), [3..4, 0..1], []);
        steps.push(Action::Publish, [2..3], []);
        let small = compacted(Schedule { steps, ..schedule() });
        let of = |offset, count| Block { offset, count };
        let blocks = [of(7, 10), of(0, 0), of(17, 5), of(0, 7), of(0, 0)];
        assert_eq!(*small.blocks, blocks);
        let message = stretches(&small, &small.steps.at(1));
        assert_eq!(joined(&message), [stretch(0, 0, 17)]);
    }

    /// Compares with a search element by element.
    #[test]
    fn a_step_stops_at_the_first_missing_element() {
        let lists: [&[std::ops::Range<u32>]; 6] =
            [&[0..5], &[2..4], &[3..5, 0..1], &[0..1, 3..4], &[4..5, 2..3], &[1..2]];
        for later in lists.map(of) {
            for earlier in lists.map(of) {
                let places = |all: &[Stretch]| -> Vec<u64> {
                    all.iter().flat_map(|s| s.offset..s.offset + s.count).collect()
                };
                let (mine, theirs) = (places(&later), places(&earlier));
                let follow = Follow::new(&later, &earlier);
                assert_eq!(follow.is_some(), mine.iter().any(|place| theirs.contains(place)));
                let Some(follow) = follow else { continue };
                for done in 0..=theirs.len() {
                    let missing = &theirs[done..];
                    let limit = mine.iter().position(|place| missing.contains(place));
                    let limit = limit.unwrap_or(mine.len()) as u64;
                    assert_eq!(follow.limit(done as u64, mine.len() as u64), limit);
                }
            }
        }
    }
}
