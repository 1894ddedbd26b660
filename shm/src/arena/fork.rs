//! A forked child gets memory of its own.
//!
//! After `fork`, parent and child map the same shared memory: what the child writes to a tensor
//! would change the parent's. So in the child, private mappings of the same memory replace the
//! segments, at the same addresses ([`Reserve`]). This copies nothing: the kernel copies a page
//! when the child first writes to it. Until then the child sees what the parent and the daemon
//! write there.
//!
//! The C library calls the handlers below, whoever calls `fork`. (`vfork` and `posix_spawn` do not
//! call them. Their children touch no tensors.) A child has only the thread that called `fork`, so
//! a lock that another thread holds at that moment stays locked. Hence the handlers take all locks
//! of an arena before, and keep them during the fork.
//!
//! [`Reserve`]: crate::segment::reserve::Reserve

use std::{
    alloc::{Layout, handle_alloc_error},
    mem,
    sync::{Arc, Once, Weak},
};

use parking_lot::{Mutex, RawMutex, lock_api};

use super::shared::{ArenaState, Shared};
use crate::segment::adopt::Mappings;

struct Arenas {
    all: Vec<Weak<Shared>>,
    /// The arenas whose locks a fork holds.
    held: Vec<Arc<Shared>>,
}

static ARENAS: Mutex<Arenas> = Mutex::new(Arenas { all: Vec::new(), held: Vec::new() });

/// From now on, forked children get memory of their own in the place of this arena's.
pub(super) fn watch(arena: &Arc<Shared>) {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the handlers are functions of the right type, which don't panic.
        let error = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        if error != 0 {
            handle_alloc_error(Layout::new::<[usize; 4]>()); // its only reason
        }
    });
    let mut arenas = ARENAS.lock();
    arenas.all.retain(|arena| arena.strong_count() > 0);
    arenas.all.push(Arc::downgrade(arena));
}

extern "C" fn before() {
    let mut arenas = ARENAS.lock();
    arenas.held = arenas.all.iter().filter_map(Weak::upgrade).collect();
    for arena in &arenas.held {
        // In the order in which other threads take them.
        mem::forget(arena.adopting.lock());
        mem::forget(arena.state.lock());
    }
    mem::forget(arenas); // as well as its lock
}

extern "C" fn in_parent() {
    // SAFETY: `before`, in the same thread, has taken these locks for us.
    let held = unsafe {
        let held = mem::take(&mut (*ARENAS.data_ptr()).held);
        for arena in &held {
            arena.state.force_unlock();
            arena.adopting.force_unlock();
        }
        ARENAS.force_unlock();
        held
    };
    drop(held); // perhaps the last reference, so without a lock
}

extern "C" fn in_child() {
    // SAFETY: `before`, in the same thread, has taken these locks for us. There is no other thread.
    let held = unsafe {
        let held = mem::take(&mut (*ARENAS.data_ptr()).held);
        for arena in &held {
            reset(&arena.state);
            reset(&arena.adopting);
        }
        reset(&ARENAS);
        held
    };
    for arena in &held {
        separate(&arena.state.lock());
    }
    mem::forget(held); // what belongs to the session of the parent does not end here
}

/// Unlocks without waking anybody: those who waited are threads of the parent.
///
/// # Safety
/// This thread has the lock, and there is no other thread.
unsafe fn reset<T>(lock: &Mutex<T>) {
    let unlocked = <RawMutex as lock_api::RawMutex>::INIT;
    // SAFETY: nobody else uses the lock, and all of it may change behind a shared reference.
    unsafe { std::ptr::from_ref(lock.raw()).cast_mut().write(unlocked) };
}

/// Gives this process memory of its own.
fn separate(state: &ArenaState) {
    let mappings = Mappings::default();
    for lent in state.mapped() {
        // If the program has unmapped adopted memory, something else may be at its addresses.
        if !lent.is_there(&mappings) || lent.reserve.replace(&lent.segment).is_ok() {
            continue;
        }
        // The kernel has no memory for copies.
        // SAFETY: it is there.
        let read_only = unsafe { lent.segment.let_only_read() };
        let text: &[u8] = match read_only {
            Ok(()) => {
                b"gradwire: memory is missing for a forked process's own copy of tensors in shared \
                  memory: it can only read them, and a write will end it (SIGSEGV)\n"
            }
            Err(_) => {
                b"gradwire: memory is missing for a forked process's own copy of tensors in shared \
                  memory: what it writes to them reaches its parent\n"
            }
        };
        // Another thread of the parent may have locked the standard streams.
        let _ = rustix::io::write(rustix::stdio::stderr(), text);
    }
}
