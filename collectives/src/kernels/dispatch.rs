//! From values to types: the one place that knows all element types, operations and levels.

use gradwire_proto::{DType, ReduceOp};

use super::{
    Job,
    element::{Bf16, Element, F16},
    level::{Baseline, Level},
    op::{Max, Min, Operation, Product, Sum},
    scalar,
    sweep::sweep,
};

/// Runs a job at a level.
///
/// # Safety
/// As for [`super::reduce_finish_to`]; this machine has the level.
pub(super) unsafe fn run(level: Level, job: &Job<'_>) {
    if job.inputs.is_empty() || job.count == 0 {
        return;
    }
    // SAFETY: the caller's promise; `dtype` says what the type is.
    unsafe {
        match job.combine.dtype {
            DType::F32 => with_type::<f32>(level, job),
            DType::F64 => with_type::<f64>(level, job),
            DType::F16 => with_type::<F16>(level, job),
            DType::Bf16 => with_type::<Bf16>(level, job),
            DType::I8 => with_type::<i8>(level, job),
            DType::U8 => with_type::<u8>(level, job),
            DType::I32 => with_type::<i32>(level, job),
            DType::I64 => with_type::<i64>(level, job),
        }
    }
}

unsafe fn with_type<E: Element>(level: Level, job: &Job<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match job.combine.op {
            ReduceOp::Sum | ReduceOp::Average => with_op::<E, Sum>(level, job),
            ReduceOp::Min => with_op::<E, Min>(level, job),
            ReduceOp::Max => with_op::<E, Max>(level, job),
            ReduceOp::Product => with_op::<E, Product>(level, job),
        }
    }
}

unsafe fn with_op<E: Element, O: Operation>(level: Level, job: &Job<'_>) {
    // SAFETY: the caller's promise; this machine has the level.
    unsafe {
        match level {
            Level::Scalar => scalar::run::<E, O>(job),
            Level::Baseline => sweep::<E, O, Baseline>(job),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::<E, O>(job),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::<E, O>(job),
            #[cfg(not(target_arch = "x86_64"))]
            Level::Avx2 | Level::Avx512 => sweep::<E, O, Baseline>(job),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn avx2<E: Element, O: Operation>(job: &Job<'_>) {
    // SAFETY: the caller's promise.
    unsafe { sweep::<E, O, super::level::Avx2>(job) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
unsafe fn avx512<E: Element, O: Operation>(job: &Job<'_>) {
    // SAFETY: the caller's promise.
    unsafe { sweep::<E, O, super::level::Avx512>(job) }
}
