//! Measures how fast this machine reduces and copies, for the cost model.

use std::time::{Duration, Instant};

use gradwire_collectives::algorithms::probe::Pattern;
use gradwire_kernels::{Combine, reduce_slices};
use gradwire_proto::{DType, ReduceOp};

use crate::model::memory;

/// Runs a pattern in memory, and returns how long it took. Other patterns take no time.
pub(super) fn measure(pattern: Pattern) -> Duration {
    let combine = Combine { dtype: DType::F32, op: ReduceOp::Sum };
    match pattern {
        Pattern::Reduce(bytes) => {
            let (mut sum, received) = (vec![0; bytes as usize], vec![0; bytes as usize]);
            timed(|| memory::combine(combine, &mut sum, &received, false))
        }
        Pattern::Copy(bytes) => {
            let (mut target, source) = (vec![0; bytes as usize], vec![1; bytes as usize]);
            // Both have the same length, so this can't fail.
            timed(|| drop(reduce_slices(combine, 1.0, &mut target, &[&source])))
        }
        _ => Duration::ZERO,
    }
}

/// The time of a second run: the first one also faults pages.
fn timed(mut work: impl FnMut()) -> Duration {
    work();
    let began = Instant::now();
    work();
    began.elapsed()
}
