//! The order in which the connections to one peer take the next chunk.

use std::collections::VecDeque;

use gradwire_proto::Sequence;

use super::progress::Chunk;

/// What a sending step gives to a connection.
#[derive(Debug, Clone, Copy)]
pub struct HandedOut {
    /// The chunk to send now, if one is ready.
    pub chunk: Option<Chunk>,
    /// Whether that was the rest of the step.
    pub is_all: bool,
}

/// The steps that send to one peer and still have chunks to hand out.
#[derive(Debug, Clone, Default)]
pub struct SendQueue(VecDeque<(Sequence, u32)>);

impl SendQueue {
    /// Notes that a step of a started piece will send to this peer.
    pub fn push(&mut self, sequence: Sequence, step: u32) {
        self.0.push_back((sequence, step));
    }

    /// Puts a step that was taken out because it had nothing ready back at its old place. The queue
    /// is sorted, because pieces start in the order of their numbers and steps are pushed in the
    /// order of the schedule. So a caller that knows which steps may be ready need not keep the
    /// others in it.
    pub fn put_back(&mut self, sequence: Sequence, step: u32) {
        if let Err(place) = self.0.binary_search(&(sequence, step)) {
            self.0.insert(place, (sequence, step));
        }
    }

    /// The step that may be next.
    pub fn first(&self) -> Option<(Sequence, u32)> {
        self.0.front().copied()
    }

    /// Whether nothing is left to hand out.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first chunk that is ready, with its piece. The oldest piece comes first, and steps that
    /// have nothing ready are skipped.
    pub fn next_chunk(
        &mut self,
        mut hand_out: impl FnMut(Sequence, u32) -> HandedOut,
    ) -> Option<(Sequence, Chunk)> {
        let mut index = 0;
        while let Some(&(sequence, step)) = self.0.get(index) {
            let HandedOut { chunk, is_all } = hand_out(sequence, step);
            if is_all {
                self.0.remove(index);
            } else {
                index += 1;
            }
            if let Some(chunk) = chunk {
                return Some((sequence, chunk));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_that_is_ready_comes_first() {
        let mut queue = SendQueue::default();
        for (sequence, step) in [(1, 0), (1, 3), (2, 0)] {
            queue.push(Sequence(sequence), step);
        }
        // Steps have two chunks of 10 bytes, and step 0 of operation 1 has none ready for now.
        let mut sent = std::collections::BTreeMap::new();
        let mut next = |queue: &mut SendQueue, blocked: bool| {
            queue.next_chunk(|sequence, step| {
                let offset: &mut u64 = sent.entry((sequence, step)).or_default();
                if blocked && (sequence, step) == (Sequence(1), 0) {
                    return HandedOut { chunk: None, is_all: false };
                }
                *offset += 10;
                let chunk = Chunk { step, offset: *offset - 10, bytes: 10 };
                HandedOut { chunk: Some(chunk), is_all: *offset == 20 }
            })
        };
        let mut order = Vec::new();
        for blocked in [true, false, false, true, true, true, true] {
            order.push(next(&mut queue, blocked).map(|(s, c)| (s.0, c.step, c.offset)));
        }
        let expected =
            [(1, 3, 0), (1, 0, 0), (1, 0, 10), (1, 3, 10), (2, 0, 0), (2, 0, 10)].map(Some);
        assert_eq!(order[..6], expected);
        assert_eq!(order[6], None);
        assert!(queue.is_empty());
    }

    #[test]
    fn steps_are_put_back_at_their_old_place() {
        let mut queue = SendQueue::default();
        let steps = [(1, 0), (1, 3), (2, 0)].map(|(sequence, step)| (Sequence(sequence), step));
        steps.iter().for_each(|&(sequence, step)| queue.push(sequence, step));
        let nothing = |_, _| HandedOut { chunk: None, is_all: true };
        assert!(queue.next_chunk(nothing).is_none() && queue.is_empty());
        for at in [2, 0, 1, 1] {
            queue.put_back(steps[at].0, steps[at].1);
        }
        let mut order = Vec::new();
        let _ = queue.next_chunk(|sequence, step| {
            order.push((sequence, step));
            HandedOut { chunk: None, is_all: true }
        });
        assert_eq!(order, steps);
    }
}
