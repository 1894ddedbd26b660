//! A forked child of a worker has memory of its own in the place of the arena's.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, OwnedFd},
    ptr::{self, NonNull},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use gradwire_proto::JobId;
use gradwire_shm::{
    arena::{Arena, ArenaBlock, ArenaConfig, Register, Release},
    segment::{HugePages, Segment, SegmentId},
};
use rustix::{
    fs::MemfdFlags,
    mm::{MapFlags, ProtFlags},
    process::{Pid, Signal, WaitOptions, kill_process, waitpid},
};

const BYTES: usize = 3 * 4096;

/// The segments that the daemon has, by number.
#[derive(Clone, Default)]
struct Daemon(Arc<Mutex<BTreeMap<SegmentId, Segment>>>);

impl Daemon {
    fn functions(&self) -> (Register, Release) {
        let (adding, removing) = (self.clone(), self.clone());
        let register = move |id, _: &Segment, fd: OwnedFd| {
            adding.0.lock().unwrap().insert(id, Segment::open(fd, u64::MAX).unwrap());
            Ok(())
        };
        let release = move |id| drop(removing.0.lock().unwrap().remove(&id));
        (Box::new(register), Box::new(release))
    }

    fn set(&self, block: &ArenaBlock, value: u8) {
        let segments = self.0.lock().unwrap();
        let start = segments[&block.segment()].range(block.offset(), block.bytes()).unwrap();
        // SAFETY: the range is mapped, and only this thread uses it.
        unsafe { start.write_bytes(value, block.bytes() as usize) };
    }

    fn get(&self, block: &ArenaBlock) -> u8 {
        let segments = self.0.lock().unwrap();
        let start = segments[&block.segment()].range(block.offset(), 1).unwrap();
        // SAFETY: as above.
        unsafe { start.read_volatile() }
    }
}

fn arena(daemon: &Daemon) -> Arena {
    let (register, release) = daemon.functions();
    let job = JobId::new("shm-test-fork").unwrap();
    Arena::new(ArenaConfig { huge: HugePages::Never, ..ArenaConfig::new(job) }, register, release)
}

fn set(block: &ArenaBlock, value: u8) {
    // SAFETY: it is mapped, and only this thread uses it.
    unsafe { block.as_ptr().write_bytes(value, block.bytes() as usize) };
}

fn get(block: &ArenaBlock) -> u8 {
    // SAFETY: as above.
    unsafe { block.as_ptr().read_volatile() }
}

/// Memory of the program.
struct Array(usize);

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: the range is exactly a mapping of `adopted`, whose block has ended.
        let _ = unsafe { rustix::mm::munmap(ptr::with_exposed_provenance_mut(self.0), BYTES) };
    }
}

/// A block in memory of the program, which stays mapped as long as the block lives.
fn adopted(arena: &Arena) -> ArenaBlock {
    let fd = rustix::fs::memfd_create("gradwire-test-fork", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, BYTES as u64).unwrap();
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
    let start =
        unsafe { rustix::mm::mmap(ptr::null_mut(), BYTES, access, MapFlags::SHARED, &fd, 0) };
    let start: NonNull<u8> = NonNull::new(start.unwrap().cast()).unwrap();
    let array = Arc::new(Array(start.as_ptr().expose_provenance()));
    let adoption = arena.adoption(BYTES as u64).unwrap().make().unwrap();
    // SAFETY: only this thread uses the memory and the file, and the owner unmaps it.
    unsafe { adoption.take_place(start, fd.as_fd(), start, array) }.unwrap()
}

/// Runs `work` in a forked child, and returns whether it ended with true.
fn in_child(work: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child takes no lock that another thread of the parent may have held, except those
    // that are tested, and ends without the handlers of the parent.
    match unsafe { libc::fork() } {
        -1 => panic!("no process can be made: {}", std::io::Error::last_os_error()),
        // SAFETY: as above.
        0 => unsafe { libc::_exit(if work() { 0 } else { 1 }) },
        child => {
            let (child, began) = (Pid::from_raw(child).unwrap(), Instant::now());
            loop {
                let ended = waitpid(Some(child), WaitOptions::NOHANG).unwrap();
                if let Some((_, status)) = ended {
                    return status.exit_status() == Some(0);
                }
                if began.elapsed() > Duration::from_secs(60) {
                    kill_process(child, Signal::KILL).unwrap();
                    panic!("the child hangs");
                }
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

#[test]
fn what_a_child_writes_stays_there() {
    let daemon = Daemon::default();
    let arena = arena(&daemon);
    let blocks = [arena.allocate(BYTES as u64).unwrap(), adopted(&arena)];
    blocks.iter().zip(1..).for_each(|(block, value)| set(block, value));
    assert!(in_child(|| {
        let same = blocks.iter().zip(1..).all(|(block, value)| get(block) == value);
        blocks.iter().for_each(|block| set(block, 7));
        // Nor do its own children share with it.
        let below = in_child(|| {
            let same = blocks.iter().all(|block| get(block) == 7);
            blocks.iter().for_each(|block| set(block, 8));
            same
        });
        same && below && blocks.iter().all(|block| get(block) == 7)
    }));
    for (block, value) in blocks.iter().zip(1..) {
        assert_eq!((get(block), daemon.get(block)), (value, value));
        // The parent and the daemon still share it.
        daemon.set(block, 9);
        assert_eq!(get(block), 9);
        set(block, 10);
        assert_eq!(daemon.get(block), 10);
    }
}

#[test]
fn memory_of_the_next_daemon_is_private_too() {
    let (first, second) = (Daemon::default(), Daemon::default());
    let arena = arena(&first);
    let blocks = [arena.allocate(BYTES as u64).unwrap(), adopted(&arena)];
    blocks.iter().for_each(|block| set(block, 1));
    let (register, release) = second.functions();
    // SAFETY: nobody uses the blocks meanwhile.
    unsafe { arena.renew(register, release) }.unwrap();
    assert!(in_child(|| {
        let same = blocks.iter().all(|block| get(block) == 1);
        blocks.iter().for_each(|block| set(block, 2));
        same
    }));
    for block in &blocks {
        assert_eq!((get(block), second.get(block)), (1, 1));
    }
}

/// The program may unmap adopted memory, and map something else there.
#[test]
fn other_mappings_stay_as_they_are() {
    let daemon = Daemon::default();
    let arena = arena(&daemon);
    let block = adopted(&arena);
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    // SAFETY: the memory is a mapping of this test, to which there are no references.
    unsafe { rustix::mm::mmap_anonymous(block.as_ptr().cast(), BYTES, access, flags) }.unwrap();
    set(&block, 1);
    assert!(in_child(|| {
        set(&block, 2);
        true
    }));
    assert_eq!(get(&block), 2, "shared with the child, as this test maps it");
}

/// A lock of another thread must not stay locked in the child.
#[test]
fn threads_that_use_the_arena_meanwhile() {
    let daemon = Daemon::default();
    let arena = arena(&daemon);
    let (kept, ends) = (arena.allocate(BYTES as u64).unwrap(), AtomicBool::new(false));
    set(&kept, 1);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !ends.load(Relaxed) {
                    drop(arena.allocate(100).unwrap());
                    drop(adopted(&arena));
                }
            });
        }
        let right = (0..100).filter(|_| {
            in_child(|| {
                let same = get(&kept) == 1;
                set(&kept, 2);
                drop(arena.allocate(100)); // as an object that ends in the child
                same
            })
        });
        let right = right.count();
        ends.store(true, Relaxed);
        assert_eq!(right, 100);
    });
    assert_eq!((get(&kept), daemon.get(&kept)), (1, 1));
}
