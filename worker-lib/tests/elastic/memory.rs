//! Memory over several epochs.

use std::{
    os::fd::{AsFd, OwnedFd},
    ptr::{self, NonNull},
    slice,
    sync::Arc,
};

use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

use super::*;

/// Memory of the program in a file of its own.
struct Own {
    start: NonNull<u8>,
    bytes: usize,
    file: OwnedFd,
}

// SAFETY: the memory belongs to this value, wherever that is.
#[expect(unsafe_code, reason = "a mapping is a pointer")]
unsafe impl Send for Own {}
// SAFETY: it has no methods that use the memory.
#[expect(unsafe_code, reason = "a mapping is a pointer")]
unsafe impl Sync for Own {}

impl Own {
    fn new(bytes: usize) -> Self {
        let file = memfd_create("gradwire-test-own", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, bytes as u64).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which nothing else knows.
        #[expect(unsafe_code, reason = "maps memory")]
        let start = unsafe { mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0) };
        Self { start: NonNull::new(start.unwrap().cast()).unwrap(), bytes, file }
    }

    /// Its contents, while nothing writes there.
    fn contents(&self) -> &[u8] {
        // SAFETY: mapped until this value is dropped, and no operation is in flight.
        #[expect(unsafe_code, reason = "a mapping is a pointer")]
        unsafe {
            slice::from_raw_parts(self.start.as_ptr(), self.bytes)
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: the session holds this value while it uses the memory.
        #[expect(unsafe_code, reason = "unmaps memory")]
        unsafe {
            munmap(self.start.as_ptr().cast(), self.bytes).unwrap();
        }
    }
}

const BYTES: usize = 1 << 20;

#[test]
fn adopted_memory_moves_to_the_next_daemon() {
    let daemon = FakeDaemon::elastic(&[0, 1]);
    let ranks = on_each(attach(&daemon, &[0, 1]), |at, session| {
        let own = Arc::new(Own::new(BYTES));
        // SAFETY: only operations write to the memory, and the owner unmaps it.
        #[expect(unsafe_code, reason = "adopts memory")]
        let adopted = unsafe {
            own.start.as_ptr().write_bytes(at as u8 + 1, BYTES);
            session.adopt(own.start, BYTES, own.file.as_fd(), own.clone()).unwrap()
        };
        // Room that was made, but is not used, does not outlive the epoch.
        let unused = session.adoption(BYTES).unwrap();
        (session, own, adopted, unused)
    });
    let daemon = daemon.succeed(&[0, 1]);
    let ranks = on_each(ranks, |at, (session, own, adopted, unused)| {
        until_lost(&session);
        rejoin(&session).unwrap();
        drop(unused);
        assert!(own.contents().iter().all(|byte| *byte == at as u8 + 1));
        assert_eq!(session.stats().arena.adopted, 1);
        let gathered = session.allgather(&adopted, Default::default()).unwrap();
        assert_eq!(gathered.rows, [BYTES, BYTES]);
        let options = BroadcastOptions::from_rank(1).name("adopted");
        let adopted = session.broadcast_async(adopted, options).unwrap().wait().unwrap();
        assert!(own.contents().iter().all(|byte| *byte == 2), "the daemon writes there");
        (session, own, adopted)
    });
    // And to that after it.
    let daemon = daemon.succeed(&[0, 1]);
    on_each(ranks, |_, (session, own, adopted)| {
        until_lost(&session);
        rejoin(&session).unwrap();
        let options = BroadcastOptions::from_rank(0).name("adopted");
        session.broadcast_async(adopted, options).unwrap().wait().unwrap();
        assert!(own.contents().iter().all(|byte| *byte == 2));
        session.shutdown().unwrap();
        assert_eq!(own.contents()[BYTES - 1], 2, "the program keeps it");
    });
    drop(daemon);
}

#[test]
fn memory_of_a_gpus_driver_is_retired() {
    let daemon = FakeDaemon::elastic(&[0]);
    let session = daemon.worker(0).attach().unwrap();
    let pinned = session.tensor(&[3.0f32; 1000], &[1000]).unwrap().into_buffer().into_shared();
    pinned.mapping();
    let daemon = daemon.succeed(&[0]);
    until_lost(&session);
    rejoin(&session).unwrap();
    let refused = session.allreduce_async(pinned.clone(), named("pinned")).unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("could not be kept in this epoch of the job, because a GPU's"), "{text}");
    let new = session.tensor(&[4.0f32; 1000], &[1000]).unwrap();
    let new = session.allreduce_async(new, named("new")).unwrap().wait().unwrap();
    assert_eq!(new[999], 4.0);
    session.shutdown().unwrap();
    drop(daemon);
}

#[test]
fn memory_survives_a_daemon_that_can_not_take_it() {
    let daemon = FakeDaemon::elastic(&[0]);
    let session = daemon.worker(0).attach().unwrap();
    let mut own = session.tensor(&[5.0f32; 70_000], &[70_000]).unwrap();
    let daemon = daemon.succeed(&[0]);
    daemon.has_memory(false);
    until_lost(&session);
    let error = rejoin(&session).unwrap_err();
    assert!(!error.is_recoverable(), "{error}");
    assert!(error.to_string().contains("it has no address space"), "{error}");
    // TELL: the other ranks of that epoch do not wait for this one.
    assert!(daemon.reason().starts_with("it could not join the job again: "));
    assert!(own.iter().all(|value| *value == 5.0));
    let daemon = daemon.succeed(&[0]);
    assert_eq!(rejoin(&session).unwrap().epoch, 3);
    session.allreduce(&mut own, named("own")).unwrap();
    assert_eq!((own[0], own[69_999]), (5.0, 5.0));
    session.shutdown().unwrap();
    drop(daemon);
}
