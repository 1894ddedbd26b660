//! The baseline of operations whose results are separate from their inputs. Each thread does a part
//! of the flows, in one pass from the inputs to the results.

use std::{
    ops::Range,
    sync::{Mutex, PoisonError, RwLock},
};

use gradwire_kernels::{Combine, Finish, Store, sum_slices};
use gradwire_proto::{DType, ReduceOp};

use super::round::{Program, SpinBarrier};
use crate::{flow::Flow, operation::Operation};

/// Results of at least this size bypass the cache when written, because they would not stay in it.
const STREAMED: usize = 4 << 20;

/// A part of a flow.
#[derive(Debug)]
struct Part {
    /// The rank whose tensor it comes from; `None` for the reduction of all.
    from: Option<usize>,
    /// Its range of bytes in that tensor.
    source: Range<usize>,
    /// Its targets: a rank, and the index of a piece of that rank's result.
    targets: Vec<(usize, usize)>,
}

/// Whether each rank also has its own tensors, which its thread copies in before, and out after.
/// Threads never wait for the locks, which only prove to the compiler that this is safe.
#[derive(Debug)]
pub(super) struct Apart<'a> {
    dtype: DType,
    op: ReduceOp,
    store: Store,
    /// Whether each rank also has its own tensors, which its thread copies in before and out after.
    copies: bool,
    inputs: Vec<RwLock<&'a mut [u8]>>,
    /// The result of each rank, cut at the edges of parts.
    outputs: Vec<Vec<Mutex<&'a mut [u8]>>>,
    /// The parts of each thread.
    parts: Vec<Vec<Part>>,
    private: Vec<usize>,
}

/// The bytes of a rank's input and of its separate result, for a size of `elements`.
pub(super) fn bytes(
    operation: Operation,
    dtype: DType,
    (rank, ranks): (u32, u32),
    elements: usize,
) -> [usize; 2] {
    let output = match operation {
        // The root's tensor is the result.
        Operation::Broadcast { root } if root == rank => 0,
        _ => operation.output(rank, ranks, elements),
    };
    [operation.input(rank, ranks, elements) * dtype.size(), output * dtype.size()]
}

impl<'a> Apart<'a> {
    /// The program for tensors with the sizes of [`bytes`], on `threads` threads.
    pub(super) fn new(
        operation: Operation,
        dtype: DType,
        copies: bool,
        threads: usize,
        elements: usize,
        inputs: &'a mut [&mut [u8]],
        outputs: &'a mut [&mut [u8]],
    ) -> Self {
        let ranks = inputs.len() as u32;
        let results: usize = outputs.iter().map(|output| output.len()).sum();
        let private = inputs.iter().zip(&*outputs).map(|(i, o)| i.len().max(o.len())).collect();
        let flows: Vec<Flow> = operation.flows(ranks, elements).collect();
        let mut parts: Vec<Vec<Part>> = (0..threads).map(|_| Vec::new()).collect();
        let mut cuts: Vec<Vec<usize>> = vec![Vec::new(); threads];
        // A few flows are divided among all threads; of many flows, each thread gets some.
        let pieces = threads.div_ceil(flows.len().max(1));
        for (i, flow) in flows.iter().enumerate() {
            // Whole cache lines, so that no two threads write to the same one.
            let each = flow.count.div_ceil(pieces).next_multiple_of(64);
            for piece in 0..pieces {
                let begin = (piece * each).min(flow.count);
                let end = (begin + each).min(flow.count);
                let at = |element: usize| (flow.source + element) * dtype.size();
                let mut targets = Vec::new();
                for (to, output) in outputs.iter().enumerate() {
                    let wanted = flow.to.is_none_or(|rank| rank as usize == to);
                    if wanted && !output.is_empty() && begin < end {
                        targets.push((to, (flow.target + begin) * dtype.size()));
                        cuts[to].push((flow.target + begin) * dtype.size());
                    }
                }
                let from = flow.from.map(|rank| rank as usize);
                let part = Part { from, source: at(begin)..at(end), targets };
                parts[(i * pieces + piece) % threads.max(1)].push(part);
            }
        }
        cuts.iter_mut().for_each(|cuts| cuts.sort_unstable());
        // Replaces byte offsets by piece indexes.
        for part in parts.iter_mut().flatten() {
            for (to, at) in &mut part.targets {
                *at = cuts[*to].partition_point(|cut| cut < at);
            }
        }
        let outputs = outputs.iter_mut().zip(&cuts).map(|(output, cuts)| cut(output, cuts));
        Self {
            // Data that is only moved is treated as bytes.
            dtype: if operation.reduction().is_some() { dtype } else { DType::U8 },
            op: operation.reduction().unwrap_or(ReduceOp::Sum),
            store: if results >= STREAMED { Store::Streaming } else { Store::Cached },
            copies,
            outputs: outputs.collect(),
            inputs: inputs.iter_mut().map(|input| RwLock::new(&mut **input)).collect(),
            parts,
            private,
        }
    }

    fn sweep(&self, part: &Part) {
        let all = match part.from {
            Some(from) => from..from + 1,
            None => 0..self.inputs.len(),
        };
        let inputs: Vec<_> = self.inputs[all]
            .iter()
            .map(|input| input.read().unwrap_or_else(PoisonError::into_inner))
            .collect();
        let sources: Vec<&[u8]> = inputs.iter().map(|input| &input[part.source.clone()]).collect();
        let mut outputs: Vec<_> =
            part.targets.iter().map(|&(to, piece)| lock(&self.outputs[to][piece])).collect();
        let mut targets: Vec<&mut [u8]> = outputs.iter_mut().map(|out| &mut ***out).collect();
        if targets.is_empty() {
            return;
        }
        let (dtype, op) = (self.dtype, self.op);
        let contributors = sources.len() as u32;
        // Data that is only moved has one source, and is not divided.
        let finish = Finish { op, contributors, ..Finish::none(dtype) };
        let combine = Combine { dtype, op };
        let done = sum_slices(combine, &finish, &mut targets, &sources, self.store);
        debug_assert_eq!(done, Ok(()), "source and targets of a part have the same length");
    }
}

/// Cuts a tensor before each of these offsets, the first of which is the beginning.
fn cut<'a>(tensor: &'a mut [u8], cuts: &[usize]) -> Vec<Mutex<&'a mut [u8]>> {
    let (mut pieces, mut rest, mut at) = (Vec::new(), tensor, 0);
    for cut in cuts.iter().skip(1) {
        let (piece, later) = rest.split_at_mut(cut - at);
        pieces.push(Mutex::new(piece));
        (rest, at) = (later, *cut);
    }
    pieces.push(Mutex::new(rest));
    pieces
}

fn lock<'a, 'b>(piece: &'a Mutex<&'b mut [u8]>) -> std::sync::MutexGuard<'a, &'b mut [u8]> {
    piece.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Program for Apart<'_> {
    fn private(&self, thread: usize) -> usize {
        let own = self.private.get(thread).copied().unwrap_or_default();
        if self.copies { own } else { 0 }
    }

    fn once(&self, thread: usize, private: &mut [u8], barrier: &SpinBarrier) {
        if self.copies {
            if let Some(input) = self.inputs.get(thread) {
                let mut input = input.write().unwrap_or_else(PoisonError::into_inner);
                let bytes = input.len();
                input.copy_from_slice(&private[..bytes]);
            }
            barrier.wait();
        }
        self.parts[thread].iter().for_each(|part| self.sweep(part));
        barrier.wait();
        if self.copies {
            let mut rest = private;
            for piece in self.outputs.get(thread).into_iter().flatten() {
                let piece = lock(piece);
                let (now, later) = rest.split_at_mut(piece.len());
                now.copy_from_slice(&piece);
                rest = later;
            }
            barrier.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{super::round::times, *};

    /// The results after each rank has contributed its number everywhere.
    fn after(operation: Operation, copies: bool, threads: usize, elements: usize) -> Vec<Vec<f32>> {
        let ranks = 3;
        let room = |rank| bytes(operation, DType::F32, (rank, ranks), elements).map(|n| n / 4);
        let mut inputs: Vec<Vec<f32>> =
            (0..ranks).map(|rank| vec![rank as f32 + 1.0; room(rank)[0]]).collect();
        let mut outputs: Vec<Vec<f32>> = (0..ranks).map(|rank| vec![0.0; room(rank)[1]]).collect();
        let mut input: Vec<&mut [u8]> =
            inputs.iter_mut().map(|tensor| bytemuck::cast_slice_mut(tensor)).collect();
        let mut output: Vec<&mut [u8]> =
            outputs.iter_mut().map(|tensor| bytemuck::cast_slice_mut(tensor)).collect();
        let program =
            Apart::new(operation, DType::F32, copies, threads, elements, &mut input, &mut output);
        assert_eq!(times(&program, threads, 1, Duration::ZERO).len(), 1);
        outputs
    }

    #[test]
    fn the_plain_program_does_the_work() {
        let (op, root) = (ReduceOp::Sum, 1);
        for (share, threads) in [(1, 3), (70, 5), (10_007, 3), (10_007, 8)] {
            let elements = 3 * share;
            let each = |values: [f32; 3]| values.map(|v| vec![v; share]).concat();
            let of = |value: f32, count: usize| vec![value; count];
            for (operation, expected) in [
                (Operation::Reduce { op, root }, [vec![], of(6.0, elements), vec![]]),
                (Operation::Broadcast { root }, [of(2.0, elements), vec![], of(2.0, elements)]),
                (
                    Operation::Allgather,
                    [each([1.0, 2.0, 3.0]), each([1.0, 2.0, 3.0]), each([1.0, 2.0, 3.0])],
                ),
                (Operation::Gather { root }, [vec![], each([1.0, 2.0, 3.0]), vec![]]),
                (Operation::Scatter { root }, [of(2.0, share), of(2.0, share), of(2.0, share)]),
                (Operation::ReduceScatter(op), [of(6.0, share), of(6.0, share), of(6.0, share)]),
                (
                    Operation::Alltoall,
                    [each([1.0, 2.0, 3.0]), each([1.0, 2.0, 3.0]), each([1.0, 2.0, 3.0])],
                ),
                (Operation::SendReceive, [of(3.0, elements), of(1.0, elements), of(2.0, elements)]),
            ] {
                assert_eq!(after(operation, false, threads, elements), expected, "{operation:?}");
                // The shared tensors hold the copied content of private memory: a one in each byte,
                // once or multiplied by the sum.
                let copied = after(operation, true, threads, elements);
                let ones = f32::from_ne_bytes([1; 4]);
                let many = |value: &f32| {
                    let times = value / ones;
                    times > 0.5 && (times / times.round() - 1.0).abs() < 1e-6
                };
                assert!(copied.iter().flatten().all(many), "{operation:?}");
            }
        }
    }
}
