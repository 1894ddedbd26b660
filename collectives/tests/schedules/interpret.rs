//! Runs schedules in memory, in any order that their dependencies allow.
//!
//! Steps progress piecewise and interleaved, as in the executor: a step may use every shared
//! element that earlier steps have finished, and receivers follow senders element by element. A
//! seed determines which step continues, and how far. The result must not depend on it (SAME). The
//! arithmetic is that of `gradwire_kernels`.

use gradwire_collectives::{
    Action, Schedule, Section, StepView,
    layout::{self, Follow, Stretch},
    verify::{Graph, VerifyError, verify_sections},
};
use gradwire_kernels::{
    Combine, Finish, SliceError, Store, level, reduce_finish_slices, reduce_slices,
};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::SplitMix64;

/// The computation and its data.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Data<'a> {
    /// Element type and operation.
    pub(crate) combine: Combine,
    /// The factor for each contribution.
    pub(crate) prescale: f64,
    /// What turns the reduction into the result.
    pub(crate) finish: Finish,
    /// For each participant its local contributions in rank order, each the whole piece in bytes.
    /// Participants that reduce nothing locally may have none.
    pub(crate) contributions: &'a [Vec<Vec<u8>>],
}

/// Why schedules can't be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InterpretError {
    /// They are wrong.
    #[error(transparent)]
    Schedule(#[from] VerifyError),
    /// A contribution has the wrong length.
    #[error(
        "participant {participant} has a contribution of {len} bytes, the piece has {expected}"
    )]
    Contribution {
        /// The participant.
        participant: usize,
        /// Its length.
        len: usize,
        /// The piece's length.
        expected: usize,
    },
    /// A participant that reduces its contributions has none.
    #[error("participant {participant} reduces local contributions but has none")]
    NoContribution {
        /// The participant.
        participant: usize,
    },
    /// The kernels refused.
    #[error(transparent)]
    Kernel(#[from] SliceError),
}

/// Runs `schedules` in an order drawn from `seed`. Returns what each participant publishes, with
/// zeros where only others get the result; empty if it gets no result at all.
///
/// # Errors
/// [`InterpretError`] if the schedules don't achieve what `sections` are or the data doesn't fit.
pub(crate) fn run(
    schedules: &[Schedule],
    sections: &[Section],
    data: &Data<'_>,
    seed: u64,
) -> Result<Vec<Vec<u8>>, InterpretError> {
    verify_sections(schedules, sections)?;
    let graph = Graph::new(schedules)?;
    let size = data.combine.dtype.size();
    let count: u64 = schedules.first().map_or(0, |s| s.blocks.iter().map(|b| b.count).sum());
    let expected = count as usize * size;
    for (participant, contributions) in data.contributions.iter().enumerate() {
        if let Some(wrong) = contributions.iter().find(|c| c.len() != expected) {
            let len = wrong.len();
            return Err(InterpretError::Contribution { participant, len, expected });
        }
    }
    let mut memory = Memory {
        schedules,
        graph: &graph,
        data,
        work: vec![vec![0; expected]; schedules.len()],
        results: (0..schedules.len() as u32)
            .map(|me| {
                let gets = sections.iter().any(|section| section.roles.publishes(me));
                vec![0; if gets { expected } else { 0 }]
            })
            .collect(),
        stretches: (0..graph.steps())
            .map(|node| {
                let (participant, step) = graph.step(node);
                let schedule = &schedules[participant];
                layout::joined(&layout::stretches(schedule, &schedule.steps.at(step)))
            })
            .collect(),
        messages: vec![Vec::new(); graph.steps()],
        done: vec![0; graph.steps()],
    };
    let mut random = SplitMix64::seed_from_u64(seed);
    let mut waiting = graph.waiting();
    // Steps that may be able to progress.
    let mut open: Vec<usize> = (0..graph.steps()).collect();
    while !open.is_empty() {
        let pick = random.random_range(0..open.len());
        let node = open[pick];
        let (from, end) = (memory.done[node], memory.length(node));
        let limit = memory.limit(node, &waiting);
        let to = if limit == end && random.random_range(0..2) == 0 {
            end
        } else {
            from + random.random_range(0..(limit - from + 1))
        };
        if to > from {
            memory.advance(node, from, to)?;
        }
        if to == end && limit == end {
            open.swap_remove(pick);
            graph.successors(node).iter().for_each(|&next| waiting[next] -= 1);
        }
    }
    Ok(memory.results)
}

struct Memory<'a> {
    schedules: &'a [Schedule],
    graph: &'a Graph,
    data: &'a Data<'a>,
    /// Where the elements of each step are.
    stretches: Vec<Vec<Stretch>>,
    work: Vec<Vec<u8>>,
    results: Vec<Vec<u8>>,
    /// What each send has sent so far.
    messages: Vec<Vec<u8>>,
    /// How many elements each step has finished, from the beginning of its message.
    done: Vec<usize>,
}

impl Memory<'_> {
    fn step(&self, node: usize) -> StepView<'_> {
        let (participant, step) = self.graph.step(node);
        self.schedules[participant].steps.at(step)
    }

    fn length(&self, node: usize) -> usize {
        self.stretches[node].iter().map(|stretch| stretch.count as usize).sum()
    }

    /// How far a step may go now.
    fn limit(&self, node: usize, waiting: &[u32]) -> usize {
        let length = self.length(node);
        if waiting[node] == 0 {
            return length;
        }
        let (participant, _) = self.graph.step(node);
        let step = self.step(node);
        let before = step.after.iter().map(|&after| {
            let earlier = self.graph.node(participant, after as usize);
            let is_over = self.done[earlier] == self.length(earlier) && waiting[earlier] == 0;
            if is_over {
                return length;
            }
            let follow = Follow::new(&self.stretches[node], &self.stretches[earlier]);
            follow.map_or(0, |f| f.limit(self.done[earlier] as u64, length as u64) as usize)
        });
        let sent = self.graph.sender(node).map(|send| self.done[send]);
        before.chain(sent).min().unwrap_or(usize::MAX).min(length)
    }

    /// Does elements `from..to` of a step's message.
    fn advance(&mut self, node: usize, from: usize, to: usize) -> Result<(), InterpretError> {
        let parts: Vec<Stretch> =
            layout::part(&self.stretches[node], from as u64, to as u64).collect();
        parts.into_iter().try_for_each(|part| self.act(node, part))?;
        self.done[node] = to;
        Ok(())
    }

    fn act(&mut self, node: usize, part: Stretch) -> Result<(), InterpretError> {
        let (me, _) = self.graph.step(node);
        let action = self.step(node).action;
        let &Data { combine, prescale, ref finish, contributions } = self.data;
        let size = combine.dtype.size();
        let bytes = |from: u64| from as usize * size..(from + part.count) as usize * size;
        let (range, sent) = (bytes(part.offset), bytes(part.at));
        match action {
            Action::ReduceLocal => {
                let local = contributions.get(me).map_or(&[][..], Vec::as_slice);
                if local.is_empty() {
                    return Err(InterpretError::NoContribution { participant: me });
                }
                let inputs: Vec<&[u8]> = local.iter().map(|c| &c[range.clone()]).collect();
                reduce_slices(combine, prescale, &mut self.work[me][range], &inputs)?;
            }
            Action::Send { .. } => {
                self.messages[node].extend_from_slice(&self.work[me][range]);
            }
            Action::RecvCopy { .. } => {
                let send = self.graph.sender(node).unwrap_or(node);
                self.work[me][range].copy_from_slice(&self.messages[send][sent]);
            }
            Action::RecvReduce { theirs_first, .. } => {
                let send = self.graph.sender(node).unwrap_or(node);
                let received = &self.messages[send][sent];
                let mine = self.work[me][range.clone()].to_vec();
                let inputs: [&[u8]; 2] =
                    if theirs_first { [received, &mine] } else { [&mine, received] };
                reduce_slices(combine, 1.0, &mut self.work[me][range], &inputs)?;
            }
            Action::Publish => {
                let src = &self.work[me][range.clone()];
                let dst = &mut self.results[me][range];
                let level = level();
                let dsts = &mut [dst];
                let store = Store::Cached;
                reduce_finish_slices(level, combine, 1.0, finish, dsts, &[src], store)?;
            }
        }
        Ok(())
    }
}

mod tests {
    use gradwire_collectives::{Algorithm, Kind, Topology, generate};
    use gradwire_proto::{DType, ReduceOp};

    use super::*;

    const COMBINE: Combine = Combine { dtype: DType::F32, op: ReduceOp::Sum };

    fn ran(contributions: &[Vec<Vec<u8>>], seed: u64) -> Result<Vec<Vec<u8>>, InterpretError> {
        let topology = Topology::flat(2);
        let schedules: Vec<Schedule> =
            (0..2).map(|me| generate(Kind::Allreduce, Algorithm::Ring, &topology, me, 2)).collect();
        let finish = Finish::none(DType::F32);
        let data = Data { combine: COMBINE, prescale: 2.0, finish, contributions };
        run(&schedules, &Kind::Allreduce.sections(2, 2), &data, seed)
    }

    fn bytes(values: [f32; 2]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_ne_bytes()).collect()
    }

    #[test]
    fn data_goes_through_the_steps() {
        let contributions = [vec![bytes([1.0, 2.0]), bytes([0.5, 0.5])], vec![bytes([3.0, 4.0])]];
        for seed in 0..20 {
            let results = ran(&contributions, seed).unwrap();
            assert_eq!(results, vec![bytes([9.0, 13.0]); 2], "seed {seed}");
        }
    }

    #[test]
    fn wrong_data_is_refused() {
        let good = vec![bytes([1.0, 2.0])];
        let error = ran(&[good.clone(), vec![vec![0; 7]]], 1).unwrap_err();
        assert_eq!(error, InterpretError::Contribution { participant: 1, len: 7, expected: 8 });
        for short in [vec![good.clone()], vec![good, Vec::new()]] {
            let error = ran(&short, 1).unwrap_err();
            assert_eq!(error, InterpretError::NoContribution { participant: 1 });
        }
    }
}
