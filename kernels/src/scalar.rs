//! The reference: one element after the other, as the arithmetic is defined.

use super::{
    element::Element,
    job::Job,
    op::{Number, Operation},
    sweep::Last,
};

/// Runs a job.
///
/// # Safety
/// As for [`super::reduce_finish_to`]; inputs aren't empty and of type `E`, destinations are of
/// type `D` and the operation is `O`.
pub(super) unsafe fn run<E, O, D>(job: &Job<'_>)
where
    E: Element,
    O: Operation<E::Number>,
    D: Element<Number = E::Number>,
{
    let last = Last::<E::Number>::of(job);
    let prescale = <E::Number as Number>::factor(job.prescale);
    for i in 0..job.count {
        // SAFETY: all pointers are valid for `count` elements.
        let element = |input: &*const u8| unsafe { input.cast::<E>().add(i).read_unaligned() };
        let number = |input| element(input).widen().scale(prescale);
        let first = number(&job.inputs[0]);
        let all = job.inputs[1..].iter().map(number);
        let value = D::narrow(last.apply(all.fold(first, O::apply)));
        for dst in job.dsts {
            // SAFETY: all pointers are valid for `count` elements.
            unsafe { dst.cast::<D>().add(i).write_unaligned(value) }
        }
    }
}

/// Copies the single input to every destination.
///
/// # Safety
/// As for [`super::sweep::copy`].
pub(super) unsafe fn copy(job: &Job<'_>) {
    for i in 0..job.count * job.result.size() {
        // SAFETY: all pointers are valid for `count` elements.
        unsafe {
            let value = job.inputs[0].add(i).read();
            job.dsts.iter().for_each(|dst| dst.add(i).write(value));
        }
    }
}
