//! The baseline of an allreduce. Each thread reduces its slice of all tensors and writes the result
//! to all of them. The ranks' own tensors, one for each of the first threads, pass through shared
//! ones that fit into the cache.

use std::sync::{Mutex, MutexGuard, PoisonError};

use gradwire_kernels::{Combine, Finish, Store, sum_in_place};
use gradwire_proto::{DType, ReduceOp};

use super::round::{Program, SpinBarrier};

/// The largest shared tensor for passing the ranks' own tensors, in bytes.
const WINDOW: usize = 4 << 20;

/// One rank's tensor, cut so that each thread can have its slice of all tensors. The barriers
/// decide which thread uses which data. Threads never wait for the locks, which only prove to the
/// compiler that this is safe.
type Slices<'a> = Vec<Mutex<&'a mut [u8]>>;

/// The program, with at least one thread for each tensor.
#[derive(Debug)]
pub(super) struct InPlace<'a> {
    op: ReduceOp,
    dtype: DType,
    /// Whether each rank also has its own tensor, which its thread copies in before and out after.
    copies: bool,
    bytes: usize,
    /// The bytes of a thread's slice of the shared tensors; the last slice may be shorter.
    slice: usize,
    tensors: Vec<Slices<'a>>,
}

impl<'a> InPlace<'a> {
    /// The program for tensors of equal length, on `threads` threads.
    pub(super) fn new(
        op: ReduceOp,
        dtype: DType,
        copies: bool,
        threads: usize,
        tensors: &'a mut [&mut [u8]],
    ) -> Self {
        let size = dtype.size();
        let bytes = tensors.first().map_or(0, |tensor| tensor.len());
        let shared = if copies { bytes.min(WINDOW) } else { bytes };
        // Slices of whole cache lines, so that no two threads write to the same one.
        let slice = (shared / size).div_ceil(threads.max(1)).next_multiple_of(64) * size;
        let cut = |tensor: &'a mut &mut [u8]| {
            tensor[..shared].chunks_mut(slice).map(Mutex::new).collect()
        };
        Self { op, dtype, copies, bytes, slice, tensors: tensors.iter_mut().map(cut).collect() }
    }

    /// Reduces a thread's slice of the first `bytes` bytes of all tensors.
    fn sweep(&self, thread: usize, bytes: usize) {
        let mut parts: Vec<_> =
            self.tensors.iter().filter_map(|tensor| tensor.get(thread)).map(lock).collect();
        let mine = bytes.saturating_sub(thread * self.slice);
        let slices = parts.iter_mut().map(|part| {
            let mine = mine.min(part.len());
            &mut part[..mine]
        });
        let mut slices: Vec<&mut [u8]> = slices.collect();
        let (dtype, op) = (self.dtype, self.op);
        let contributors = self.tensors.len() as u32;
        let finish = Finish { op, contributors, ..Finish::none(dtype) };
        let combine = Combine { dtype, op };
        let done = sum_in_place(combine, &finish, &mut slices, Store::Cached);
        debug_assert_eq!(done, Ok(()), "slices of one thread have the same length");
    }
}

impl Program for InPlace<'_> {
    fn private(&self, thread: usize) -> usize {
        if self.copies && thread < self.tensors.len() { self.bytes } else { 0 }
    }

    fn once(&self, thread: usize, private: &mut [u8], barrier: &SpinBarrier) {
        if !self.copies {
            self.sweep(thread, self.bytes);
        }
        let windows = if self.copies { self.bytes.div_ceil(WINDOW) } else { 0 };
        let mut own = private.chunks_mut(WINDOW);
        // A thread without a tensor of its own takes part in the sums only.
        let shared = self.tensors.get(thread).map_or(&[][..], |slices| &slices[..]);
        for at in 0..windows {
            let mut window = own.next().unwrap_or_default();
            let mut rest: &[u8] = window;
            for part in shared {
                let mut part = lock(part);
                let (now, later) = rest.split_at(part.len().min(rest.len()));
                part[..now.len()].copy_from_slice(now);
                rest = later;
            }
            barrier.wait();
            self.sweep(thread, WINDOW.min(self.bytes - at * WINDOW));
            barrier.wait();
            for part in shared {
                let part = lock(part);
                let (now, later) = window.split_at_mut(part.len().min(window.len()));
                now.copy_from_slice(&part[..now.len()]);
                window = later;
            }
        }
        barrier.wait();
    }
}

fn lock<'a, 'b>(part: &'a Mutex<&'b mut [u8]>) -> MutexGuard<'a, &'b mut [u8]> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{super::round::times, *};

    /// The result for three tensors with 1, 2 and 3 in every element.
    fn after(op: ReduceOp, copies: bool, threads: usize, elements: usize) -> Vec<Vec<f32>> {
        let mut tensors: Vec<Vec<f32>> =
            [1.0, 2.0, 3.0].iter().map(|value| vec![*value; elements]).collect();
        let mut slices: Vec<&mut [u8]> =
            tensors.iter_mut().map(|tensor| bytemuck::cast_slice_mut(tensor)).collect();
        // One round after the warm-up, however slow this machine is.
        let program = InPlace::new(op, DType::F32, copies, threads, &mut slices);
        assert_eq!(times(&program, threads, 1, Duration::ZERO).len(), 1);
        tensors
    }

    #[test]
    fn the_program_does_the_work() {
        for (elements, threads) in [(1, 3), (3, 4), (1000, 3), (1000, 5), (100_001, 8)] {
            let mean = after(ReduceOp::Average, false, threads, elements);
            assert!(mean.iter().flatten().all(|value| *value == 2.0), "{elements} elements");
            // 6, then 18, then 54.
            let sum = after(ReduceOp::Sum, false, threads, elements);
            assert!(sum.iter().flatten().all(|value| *value == 54.0), "{elements} elements");
            let ones = f32::from_ne_bytes([1; 4]);
            let sum = after(ReduceOp::Sum, true, threads, elements);
            assert!(sum.iter().flatten().all(|value| *value > ones), "{elements} elements");
        }
    }

    /// The ranks' own tensors pass completely through smaller shared ones, including the last
    /// part.
    #[test]
    fn the_ranks_own_tensors_are_reduced_whole() {
        let elements = (2 * WINDOW + 4000) / 4;
        let mut shared = vec![vec![0f32; elements]; 3];
        let mut slices: Vec<&mut [u8]> =
            shared.iter_mut().map(|tensor| bytemuck::cast_slice_mut(tensor)).collect();
        let threads = 5;
        let program = InPlace::new(ReduceOp::Sum, DType::F32, true, threads, &mut slices);
        let barrier = SpinBarrier::new(threads);
        std::thread::scope(|scope| {
            for thread in 3..threads {
                let (program, barrier) = (&program, &barrier);
                scope.spawn(move || program.once(thread, &mut [], barrier));
            }
            for thread in 0..3 {
                let (program, barrier) = (&program, &barrier);
                scope.spawn(move || {
                    let value = |i: usize| (i % 1009) as f32 * (thread + 1) as f32;
                    let mut own: Vec<f32> = (0..elements).map(value).collect();
                    program.once(thread, bytemuck::cast_slice_mut(&mut own), barrier);
                    for (i, found) in own.into_iter().enumerate() {
                        assert_eq!(found, (i % 1009) as f32 * 6.0, "element {i}");
                    }
                });
            }
        });
    }
}
