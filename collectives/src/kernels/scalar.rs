//! The reference: one element after the other, the way the arithmetic is described.

use super::{
    Job,
    element::Element,
    op::{Number, Operation},
    sweep::Last,
};

/// Runs a job.
///
/// # Safety
/// As for [`super::reduce_finish_to`]; inputs aren't empty, all is of type `E` and the operation is
/// `O`.
pub(super) unsafe fn run<E: Element, O: Operation<E::Number>>(job: &Job<'_>) {
    let last = Last::<E::Number>::of(job);
    let prescale = <E::Number as Number>::factor(job.prescale);
    for i in 0..job.count {
        // SAFETY: all pointers are valid for `count` elements.
        let element = |input: &*const u8| unsafe { input.cast::<E>().add(i).read_unaligned() };
        let value = if matches!(last, Last::Copy) {
            element(&job.inputs[0])
        } else {
            let number = |input| element(input).widen().scale(prescale);
            let first = number(&job.inputs[0]);
            let all = job.inputs[1..].iter().map(number);
            E::narrow(last.apply(all.fold(first, O::apply)))
        };
        for dst in job.dsts {
            // SAFETY: all pointers are valid for `count` elements.
            unsafe { dst.cast::<E>().add(i).write_unaligned(value) }
        }
    }
}
