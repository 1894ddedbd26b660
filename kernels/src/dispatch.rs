//! From values to types: only this module knows all element types, operations and levels.
//!
//! The sweep is compiled for each pair of type and operation at each level, so equivalent pairs
//! share code: bits of all types are bits of bytes, complex numbers are added as twice as many
//! floats, products of signed integers have the bits of unsigned ones, and truth values have three
//! operations.
//!
//! Requests with meaningless pairs are refused before ([`ReduceOp::refuses`], TRUST). Such a pair
//! is still computed here, in the same way everywhere: bits of floats are combined as bits,
//! minimum, maximum and product of complex numbers are those of their parts, and the average of
//! truth values is "any".

use gradwire_proto::{DType, F8E4m3, F8E5m2, ReduceOp};

use super::{
    element::{Bf16, Element, F16, Truth},
    job::{Combine, Finish, Job},
    level::{Baseline, Level},
    op::{And, Max, Min, Operation, Or, Product, Sum, Xor},
    scalar,
    scaled::{self, Scaled},
    sweep::{copy, is_copy, sweep},
};

/// Runs a job at a level.
///
/// # Safety
/// As for [`super::reduce_finish_to`]; this machine has the level.
pub(super) unsafe fn run(level: Level, job: &Job<'_>) {
    if job.inputs.is_empty() || job.count == 0 {
        return;
    }
    if job.result != job.combine.dtype {
        // SAFETY: the caller's promise.
        return unsafe { converted(level, job) };
    }
    // SAFETY: the caller's promise; `dtype` is the type of the elements. A complex number is two
    // floats, the real part first, without padding.
    unsafe {
        match job.combine.dtype {
            DType::F32 => float::<f32>(level, job),
            DType::F64 => float::<f64>(level, job),
            DType::F16 => float::<F16>(level, job),
            DType::Bf16 => float::<Bf16>(level, job),
            DType::F8E4m3 => float::<F8E4m3>(level, job),
            DType::F8E5m2 => float::<F8E5m2>(level, job),
            DType::C64 => float::<f32>(level, &job.as_type(DType::F32, 2)),
            DType::C128 => float::<f64>(level, &job.as_type(DType::F64, 2)),
            DType::I8 => integer::<i8, u8>(level, job),
            DType::U8 => integer::<u8, u8>(level, job),
            DType::I16 => integer::<i16, u16>(level, job),
            DType::U16 => integer::<u16, u16>(level, job),
            DType::I32 => integer::<i32, u32>(level, job),
            DType::U32 => integer::<u32, u32>(level, job),
            DType::I64 => integer::<i64, u64>(level, job),
            DType::U64 => integer::<u64, u64>(level, job),
            DType::Bool => truth(level, job),
        }
    }
}

/// Whether these are sums that [`run_sums`] knows.
pub(super) fn is_a_sum(combine: Combine) -> bool {
    matches!(combine.op, ReduceOp::Sum | ReduceOp::Average)
        && matches!(combine.dtype, DType::F32 | DType::F64 | DType::F16 | DType::Bf16)
}

/// Whether [`run_sums`] can run this job.
pub(super) fn is_among_sums(job: &Job<'_>) -> bool {
    is_copy(job) || is_a_sum(job.combine) && job.result == job.combine.dtype
}

/// [`run`] for sums of floats and for copies. A program that calls only this does not contain the
/// kernels for anything else.
///
/// # Safety
/// As for [`run`]; the job [is among these](is_among_sums).
pub(super) unsafe fn run_sums(level: Level, job: &Job<'_>) {
    if job.inputs.is_empty() || job.count == 0 {
        return;
    }
    // SAFETY: the caller's promise; `dtype` is the type of the elements.
    unsafe {
        match job.combine.dtype {
            _ if is_copy(job) => copied(level, job),
            DType::F32 => with_op::<f32, Sum>(level, job),
            DType::F64 => with_op::<f64, Sum>(level, job),
            DType::F16 => with_op::<F16, Sum>(level, job),
            DType::Bf16 => with_op::<Bf16, Sum>(level, job),
            other => unreachable!("{other} is not among the sums"),
        }
    }
}

/// Results of another type than the inputs: f32 for shorter floats, or shorter floats for f32.
unsafe fn converted(level: Level, job: &Job<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match (job.combine.dtype, job.result) {
            (DType::F16, DType::F32) => computed::<F16, f32>(level, job),
            (DType::Bf16, DType::F32) => computed::<Bf16, f32>(level, job),
            (DType::F8E4m3, DType::F32) => computed::<F8E4m3, f32>(level, job),
            (DType::F8E5m2, DType::F32) => computed::<F8E5m2, f32>(level, job),
            (DType::F32, DType::F16) => computed::<f32, F16>(level, job),
            (DType::F32, DType::Bf16) => computed::<f32, Bf16>(level, job),
            (DType::F32, DType::F8E4m3) => computed::<f32, F8E4m3>(level, job),
            (DType::F32, DType::F8E5m2) => computed::<f32, F8E5m2>(level, job),
            (from, to) => unreachable!("{from} is not converted to {to}"),
        }
    }
}

unsafe fn computed<E: Element, D: Element<Number = E::Number>>(level: Level, job: &Job<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match job.combine.op {
            ReduceOp::Product => at_level::<E, Product, D>(level, job),
            ReduceOp::Min => at_level::<E, Min, D>(level, job),
            ReduceOp::Max => at_level::<E, Max, D>(level, job),
            _ => at_level::<E, Sum, D>(level, job),
        }
    }
}

impl Job<'_> {
    /// The same job on elements of another type: `each` of them stand for one element.
    fn as_type(self, dtype: DType, each: usize) -> Self {
        Self {
            combine: Combine { dtype, ..self.combine },
            finish: Finish { dtype, ..self.finish },
            result: dtype,
            count: self.count * each,
            ..self
        }
    }

    /// The same job without factors and divisions.
    fn unfinished(self) -> Self {
        Self { prescale: 1.0, finish: Finish::none(self.combine.dtype), ..self }
    }
}

unsafe fn float<E: Element>(level: Level, job: &Job<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        match job.combine.op {
            ReduceOp::Sum | ReduceOp::Average => with_op::<E, Sum>(level, job),
            ReduceOp::Min => with_op::<E, Min>(level, job),
            ReduceOp::Max => with_op::<E, Max>(level, job),
            ReduceOp::Product => with_op::<E, Product>(level, job),
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => bits(level, job),
        }
    }
}

/// `U` is `E` without a sign.
unsafe fn integer<E: Element + Scaled, U: Element>(level: Level, job: &Job<'_>) {
    // SAFETY: the caller's promise; both types are of one size.
    unsafe {
        match job.combine.op {
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => bits(level, job),
            _ if job.has_factors() => scaled::run::<E>(level, job, run),
            // Signs matter for the division.
            ReduceOp::Sum | ReduceOp::Average => with_op::<E, Sum>(level, job),
            ReduceOp::Min => with_op::<E, Min>(level, job),
            ReduceOp::Max => with_op::<E, Max>(level, job),
            ReduceOp::Product => with_op::<U, Product>(level, job),
        }
    }
}

unsafe fn bits(level: Level, job: &Job<'_>) {
    let job = &job.as_type(DType::U8, job.combine.dtype.size()).unfinished();
    // SAFETY: the caller's promise; an element is as many bytes as its size.
    unsafe {
        match job.combine.op {
            ReduceOp::BitAnd => with_op::<u8, And>(level, job),
            ReduceOp::BitOr => with_op::<u8, Or>(level, job),
            _ => with_op::<u8, Xor>(level, job),
        }
    }
}

unsafe fn truth(level: Level, job: &Job<'_>) {
    let job = &job.unfinished();
    // SAFETY: the caller's promise.
    unsafe {
        match job.combine.op {
            ReduceOp::Sum | ReduceOp::Average | ReduceOp::Max | ReduceOp::BitOr => {
                with_op::<Truth, Or>(level, job);
            }
            ReduceOp::Min | ReduceOp::Product | ReduceOp::BitAnd => {
                with_op::<Truth, And>(level, job);
            }
            ReduceOp::BitXor => with_op::<Truth, Xor>(level, job),
        }
    }
}

unsafe fn with_op<E: Element, O: Operation<E::Number>>(level: Level, job: &Job<'_>) {
    // SAFETY: the caller's promise.
    unsafe { at_level::<E, O, E>(level, job) }
}

unsafe fn at_level<E, O, D>(level: Level, job: &Job<'_>)
where
    E: Element,
    O: Operation<E::Number>,
    D: Element<Number = E::Number>,
{
    if is_copy(job) {
        // SAFETY: the caller's promise; this machine has the level.
        return unsafe { copied(level, job) };
    }
    // SAFETY: the caller's promise; this machine has the level.
    unsafe {
        match level {
            Level::Scalar => scalar::run::<E, O, D>(job),
            Level::Baseline => sweep::<E, O, D, Baseline>(job),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::<E, O, D>(job),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::<E, O, D>(job),
            #[cfg(not(target_arch = "x86_64"))]
            Level::Avx2 | Level::Avx512 => sweep::<E, O, D, Baseline>(job),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn avx2<E, O, D>(job: &Job<'_>)
where
    E: Element,
    O: Operation<E::Number>,
    D: Element<Number = E::Number>,
{
    // SAFETY: the caller's promise.
    unsafe { sweep::<E, O, D, super::level::Avx2>(job) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
unsafe fn avx512<E, O, D>(job: &Job<'_>)
where
    E: Element,
    O: Operation<E::Number>,
    D: Element<Number = E::Number>,
{
    // SAFETY: the caller's promise.
    unsafe { sweep::<E, O, D, super::level::Avx512>(job) }
}

/// A job that only moves bits.
unsafe fn copied(level: Level, job: &Job<'_>) {
    // SAFETY: the caller's promise; this machine has the level.
    unsafe {
        match level {
            Level::Scalar => scalar::copy(job),
            Level::Baseline => copy::<Baseline>(job),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => copy_avx2(job),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => copy_avx512(job),
            #[cfg(not(target_arch = "x86_64"))]
            Level::Avx2 | Level::Avx512 => copy::<Baseline>(job),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn copy_avx2(job: &Job<'_>) {
    // SAFETY: the caller's promise.
    unsafe { copy::<super::level::Avx2>(job) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
unsafe fn copy_avx512(job: &Job<'_>) {
    // SAFETY: the caller's promise.
    unsafe { copy::<super::level::Avx512>(job) }
}
