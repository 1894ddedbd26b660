//! The atomic words of the ring algorithms, as traits: shared memory in production, the model
//! checker's types in tests.
//!
//! The model checker's types do not have the layout of integers, so they cannot live in a mapping.
//! A compile-time switch would apply to every dependency at once. A type parameter costs nothing,
//! and one test binary can run both.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
    time::Duration,
};

use rustix::thread::futex::{self, Flags, Timespec};

/// A 64-bit word that both sides see.
pub trait Cell {
    /// Reads the word once.
    fn load(&self, order: Ordering) -> u64;
    /// Writes the word.
    fn store(&self, value: u64, order: Ordering);
}

/// A 32-bit word that both sides see and may change at the same time.
pub trait Flag {
    /// Reads the word once.
    fn load(&self, order: Ordering) -> u32;
    /// Writes the word.
    fn store(&self, value: u32, order: Ordering);
    /// Writes the word and returns its previous value.
    fn swap(&self, value: u32, order: Ordering) -> u32;
    /// Adds, wrapping around, and returns the previous value.
    fn fetch_add(&self, value: u32, order: Ordering) -> u32;
}

/// A [`Flag`] that threads can sleep on.
pub trait Signal: Flag {
    /// Sleeps until somebody calls [`Signal::wake_all`] or the time is up; returns at once if the
    /// word is no longer `seen`. Spurious wake-ups are possible.
    fn sleep(&self, seen: u32, timeout: Duration);
    /// Wakes every sleeper.
    fn wake_all(&self);
}

/// The word types of one kind of memory.
pub trait Backing {
    /// Positions and contents of the rings.
    type Cell: Cell;
    /// Flags and counts of sleepers.
    type Flag: Flag;
    /// The word that waiters sleep on.
    type Signal: Signal;
    /// A sequentially consistent fence.
    fn fence();
}

/// Words in memory that two processes map.
#[derive(Debug, Clone, Copy)]
pub struct Shared;

impl Backing for Shared {
    type Cell = AtomicU64;
    type Flag = AtomicU32;
    type Signal = AtomicU32;

    fn fence() {
        fence(Ordering::SeqCst);
    }
}

impl Cell for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
}

impl Flag for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }

    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.swap(value, order)
    }

    fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        self.fetch_add(value, order)
    }
}

impl Signal for AtomicU32 {
    fn sleep(&self, seen: u32, timeout: Duration) {
        // Not a private futex: the sleeper and the waker are different processes.
        let timeout = Timespec::try_from(timeout).ok();
        // After any outcome (woken, timed out, interrupted, already changed) the caller checks its
        // condition again, so none of them is an error.
        let _ = futex::wait(self, Flags::empty(), seen, timeout.as_ref());
    }

    fn wake_all(&self) {
        // Fails only if the word is not mapped, and the reference ensures that it is.
        let _ = futex::wake(self, Flags::empty(), i32::MAX as u32);
    }
}
