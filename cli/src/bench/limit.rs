//! The limit: the same work by a plain program, measured in the same run.
//!
//! Within a node the program has one thread for each rank of the node, and one tensor for each in
//! the same kind of shared memory that ranks get. Each thread reduces its slice of all tensors with
//! the same kernels and writes it over all of them, between two barriers at which threads spin: no
//! daemon, no rings, no negotiation, no wake-ups. For tensors in ordinary memory each thread has
//! one of its own besides, copied in before and out after.
//!
//! Threads of one process take the place of processes with a mapping in common: the bytes that pass
//! between processor and memory are the same, and a plain program would have no daemon either.
//!
//! Between nodes the limit is the line, whose rate has to be given.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use gradwire_collectives::kernels::{
    Combine, Finish, Store, level, reduce_finish_in_place, reduce_finish_slices,
};
use gradwire_proto::{DType, Shape};
use gradwire_worker::Session;

use super::{
    args::Memory,
    measure::{now, seconds as between},
    operation::Plain,
    rank::Bound,
    stats::Stats,
};
use crate::error::CliError;

/// The largest tensors of the plain program, in bytes. Its time grows with the size by then, so
/// that of larger ones is computed.
const LARGEST: u64 = 256 << 20;

/// How long the plain program may take for one size (WAIT): the other ranks wait for it.
const LONGEST: Duration = Duration::from_secs(2);

/// How often it runs before it counts.
const WARMUP: usize = 2;

/// How often a thread looks before it lets others have its core, where each has one.
const SPINS: u32 = 2000;

/// The time that a collective of `bytes` takes at least, in seconds, where that is known. All ranks
/// call this; the first one measures.
///
/// # Errors
/// [`CliError`] if there is no memory, or the session fails.
pub fn seconds(session: &Session, bound: &Bound, bytes: u64) -> Result<Option<f64>, CliError> {
    if bound.nodes > 1 {
        let over_line = bound.operation.line_factor(bound.nodes) * bytes as f64;
        return Ok(bound.line_rate.map(|rate| rate.seconds(over_line)));
    }
    let Some(plain) = bound.operation.plain() else { return Ok(None) };
    let mut limit = None;
    if session.rank() == 0 {
        limit = Some(in_memory(session, bound, plain, bytes)?);
    }
    session.barrier().map_err(CliError::failed)?;
    Ok(limit)
}

fn in_memory(session: &Session, bound: &Bound, plain: Plain, bytes: u64) -> Result<f64, CliError> {
    let element = bound.dtype.size() as u64;
    let measured = bytes.min(LARGEST) / element * element;
    let shape = Shape::new(&[measured / element]).map_err(CliError::failed)?;
    let mut tensors = (0..bound.ranks)
        .map(|_| session.buffer(bound.dtype, shape.clone()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(CliError::failed)?;
    let mut slices: Vec<&mut [u8]> = tensors.iter_mut().map(|t| t.bytes_mut()).collect();
    let work = Work { plain, dtype: bound.dtype, memory: bound.memory };
    let times = work.times(&mut slices, bound.iters as usize, LONGEST);
    Ok(least(&times) * (bytes as f64 / measured.max(1) as f64))
}

/// The best median of three stretches. Others who use the machine for a while only ever add to a
/// limit, and a single round may look shorter than it was.
fn least(times: &[f64]) -> f64 {
    let stretches = times.chunks(times.len().div_ceil(3).max(1));
    stretches.map(|stretch| Stats::of(stretch).median()).reduce(f64::min).unwrap_or_default()
}

/// What the plain program does.
#[derive(Debug, Clone, Copy)]
struct Work {
    plain: Plain,
    dtype: DType,
    memory: Memory,
}

/// One rank's tensor, cut so that each thread can have its slice of all. Who has which is decided
/// by the barriers; the locks, never waited for, are how the compiler is told.
type Slices<'a> = Vec<Mutex<&'a mut [u8]>>;

impl Work {
    /// Does it up to `rounds` times in about `longest` at most, at least once: times in seconds.
    fn times(self, tensors: &mut [&mut [u8]], rounds: usize, longest: Duration) -> Vec<f64> {
        let threads = tensors.len();
        let size = self.dtype.size();
        let bytes = tensors.first().map_or(0, |tensor| tensor.len());
        // Slices of whole cache lines, so that no two threads write to the same one.
        let slice = (bytes / size).div_ceil(threads.max(1)).next_multiple_of(64) * size;
        let slices: Vec<Slices<'_>> = tensors
            .iter_mut()
            .map(|tensor| tensor.chunks_mut(slice.max(1)).map(Mutex::new).collect())
            .collect();
        let (barrier, end_at) = (SpinBarrier::new(threads), AtomicUsize::new(usize::MAX));
        let began = Instant::now();
        let (slices, barrier, end_at) = (&slices, &barrier, &end_at);
        thread::scope(|scope| {
            for thread in 1..threads {
                scope.spawn(move || {
                    let mut private = self.private(bytes);
                    barrier.wait();
                    let mut round = 0;
                    while round < end_at.load(Ordering::Relaxed) {
                        self.once(slices, thread, &mut private, barrier);
                        round += 1;
                    }
                });
            }
            let (mut times, mut private) = (Vec::new(), self.private(bytes));
            barrier.wait();
            // From end to end: where there are more threads than cores, the others may be done
            // with half of a round before this one learns that it has begun.
            let mut end = now();
            for round in 0.. {
                let late = round >= WARMUP && began.elapsed() > longest;
                let last = late || round + 1 >= WARMUP + rounds.max(1);
                if last {
                    // Told before the barrier that ends this round, so all know before the next.
                    end_at.store(round + 1, Ordering::Relaxed);
                }
                self.once(slices, 0, &mut private, barrier);
                let begin = std::mem::replace(&mut end, now());
                if round >= WARMUP {
                    times.push(between(begin, end));
                }
                if last {
                    break;
                }
            }
            times
        })
    }

    /// A rank's own tensor. Not zeros: the system gives those out without any memory behind them.
    fn private(self, bytes: usize) -> Vec<u8> {
        match self.memory {
            Memory::Arena => Vec::new(),
            Memory::Ordinary => vec![1; bytes],
        }
    }

    /// One collective, as one of the threads; afterwards all of them are done.
    fn once(
        self,
        tensors: &[Slices<'_>],
        thread: usize,
        private: &mut [u8],
        barrier: &SpinBarrier,
    ) {
        // A reduction takes from and gives to all; a copy takes from the first and gives to others.
        let all = matches!(self.plain, Plain::Reduce(_));
        let copies = self.memory == Memory::Ordinary;
        if copies && (all || thread == 0) {
            let mut rest: &[u8] = private;
            for part in &tensors[thread] {
                let mut part = lock(part);
                let (now, later) = rest.split_at(part.len());
                part.copy_from_slice(now);
                rest = later;
            }
        }
        if copies {
            barrier.wait();
        }
        self.sweep(tensors, thread);
        barrier.wait();
        if copies && (all || thread != 0) {
            let mut rest = private;
            for part in &tensors[thread] {
                let part = lock(part);
                let (now, later) = rest.split_at_mut(part.len());
                now.copy_from_slice(&part);
                rest = later;
            }
        }
        if copies {
            barrier.wait();
        }
    }

    /// A thread's slice of all tensors.
    fn sweep(self, tensors: &[Slices<'_>], thread: usize) {
        let mut parts: Vec<_> =
            tensors.iter().filter_map(|tensor| tensor.get(thread)).map(lock).collect();
        let mut slices: Vec<&mut [u8]> = parts.iter_mut().map(|part| &mut ***part).collect();
        let dtype = self.dtype;
        let done = match self.plain {
            Plain::Reduce(op) => {
                let finish =
                    Finish { op, contributors: tensors.len() as u32, ..Finish::none(dtype) };
                let combine = Combine { dtype, op };
                reduce_finish_in_place(level(), combine, 1.0, &finish, &mut slices, Store::Cached)
            }
            Plain::Copy => {
                let Some((root, others)) = slices.split_first_mut() else { return };
                let combine = Combine { dtype, op: gradwire_proto::ReduceOp::Sum };
                let finish = Finish::none(dtype);
                let root: &[u8] = root;
                reduce_finish_slices(
                    level(),
                    combine,
                    1.0,
                    &finish,
                    others,
                    &[root],
                    Store::Streaming,
                )
            }
        };
        debug_assert_eq!(done, Ok(()), "slices of one thread are equally long");
    }
}

fn lock<'a, 'b>(part: &'a Mutex<&'b mut [u8]>) -> std::sync::MutexGuard<'a, &'b mut [u8]> {
    part.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A barrier at which threads stay awake, and let others run where there are not enough cores.
#[derive(Debug)]
struct SpinBarrier {
    threads: usize,
    spins: u32,
    arrived: AtomicUsize,
    round: AtomicUsize,
}

impl SpinBarrier {
    fn new(threads: usize) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        // Who looks on while others need the core only delays what it waits for.
        let spins = if threads <= cores { SPINS } else { 0 };
        Self { threads, spins, arrived: AtomicUsize::new(0), round: AtomicUsize::new(0) }
    }

    fn wait(&self) {
        let round = self.round.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.arrived.store(0, Ordering::Relaxed);
            self.round.store(round.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut spins = 0;
        while self.round.load(Ordering::Acquire) == round {
            if spins < self.spins {
                spins += 1;
                std::hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::ReduceOp;

    use super::*;

    /// Three tensors with 1, 2 and 3 in every element.
    fn after(plain: Plain, memory: Memory, elements: usize) -> Vec<Vec<f32>> {
        let mut tensors: Vec<Vec<f32>> =
            [1.0, 2.0, 3.0].iter().map(|value| vec![*value; elements]).collect();
        let mut slices: Vec<&mut [u8]> =
            tensors.iter_mut().map(|tensor| bytemuck::cast_slice_mut(tensor)).collect();
        let work = Work { plain, dtype: DType::F32, memory };
        // One round besides the warm-up, however slow this machine is.
        let times = work.times(&mut slices, 1, Duration::ZERO);
        assert_eq!(times.len(), 1);
        assert!(times[0] >= 0.0);
        tensors
    }

    #[test]
    fn the_plain_program_does_the_work() {
        for elements in [1, 3, 1000, 100_001] {
            let max = after(Plain::Reduce(ReduceOp::Max), Memory::Arena, elements);
            assert!(max.iter().flatten().all(|value| *value == 3.0), "{elements} elements");
            // 6, then 18, then 54.
            let sum = after(Plain::Reduce(ReduceOp::Sum), Memory::Arena, elements);
            assert!(sum.iter().flatten().all(|value| *value == 54.0), "{elements} elements");
            let copy = after(Plain::Copy, Memory::Arena, elements);
            assert!(copy.iter().flatten().all(|value| *value == 1.0), "{elements} elements");
            // Copied in: what private memory holds is in all of them.
            let ones = f32::from_ne_bytes([1; 4]);
            let copied = after(Plain::Copy, Memory::Ordinary, elements);
            assert!(copied.iter().flatten().all(|value| *value == ones), "{elements} elements");
            let sum = after(Plain::Reduce(ReduceOp::Sum), Memory::Ordinary, elements);
            assert!(sum.iter().flatten().all(|value| *value > ones), "{elements} elements");
        }
    }

    #[test]
    fn what_others_add_for_a_while_is_not_in_the_limit() {
        let seconds = |us: &[f64]| us.iter().map(|us| us / 1e6).collect::<Vec<_>>();
        let times = seconds(&[9.0, 9.0, 9.0, 2.0, 1.0, 3.0, 8.0, 8.0]);
        assert_eq!(least(&times), 2e-6);
        assert_eq!(least(&seconds(&[5.0])), 5e-6);
        assert_eq!(least(&[]), 0.0);
    }

    #[test]
    fn it_stops_in_time_but_not_before_it_has_a_figure() {
        let mut tensor = [1.0_f32; 64];
        let work =
            Work { plain: Plain::Reduce(ReduceOp::Sum), dtype: DType::F32, memory: Memory::Arena };
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut tensor);
        assert_eq!(work.times(&mut [bytes], 1000, Duration::ZERO).len(), 1);
    }
}
