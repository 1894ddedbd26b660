//! Whether a rank can do nothing until one of its operations ends.
//!
//! The worker says so together with the epoch of its completions and the number of its submissions
//! without an answer. If the daemon has answered anything since, or has not read a submission yet,
//! one of the two differs, so what the worker said is out of date, and the worker need not take it
//! back in time.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::page::Page;

/// `epoch` and `in_flight` in one word, so that they are read together.
fn word(epoch: u32, in_flight: u32) -> u64 {
    u64::from(in_flight) << 32 | u64::from(epoch)
}

/// The worker can do nothing until one of `in_flight` submissions ends. `epoch` was read before the
/// worker found this out.
pub(super) fn say(page: &Page, epoch: u32, in_flight: u32, ticket: u64) {
    page.stuck_on().store(ticket, Relaxed);
    page.stuck().store(word(epoch, in_flight), Release);
}

/// The worker can go on.
pub(super) fn take_back(page: &Page) {
    page.stuck().store(0, Relaxed);
}

/// A ticket that the worker waits for, if it can do nothing until one of its operations ends. The
/// daemon counts `in_flight` submissions without an answer (TRUST: the rank may have written
/// anything, which can only end its own job).
pub(super) fn look(page: &Page, in_flight: u32) -> Option<u64> {
    let said = page.stuck().load(Acquire);
    let epoch = page.completions().epoch.load(Acquire);
    (in_flight > 0 && said == word(epoch, in_flight)).then(|| page.stuck_on().load(Relaxed))
}
