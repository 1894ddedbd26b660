//! Shared by several tests: requests, and child processes that run this test binary.
#![allow(dead_code, reason = "each test binary uses its own part; expect would fail in the others")]

use std::{
    env, fs,
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Child, Command, Stdio},
};

use gradwire_proto::{DType, Part, ReduceOp, Request, Shape, TensorName};
use gradwire_shm::control::{
    CallSite, MAX_CALL_SITE_BYTES, MAX_CALL_SITES, Origin, Place, Submission,
};
use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng, SeedableRng},
};

/// The limit of operations in flight.
pub(crate) const MAX_IN_FLIGHT: u32 = 4096;

/// The role of a child process; unset in the test itself.
pub(crate) const ROLE: &str = "GRADWIRE_TEST_ROLE";

pub(crate) fn role() -> Option<String> {
    env::var(ROLE).ok()
}

/// Runs the test `entry` of this binary in a process of its own, with `role` set and, if given,
/// the socket as its standard input.
pub(crate) fn spawn(entry: &str, role: &str, socket: Option<UnixStream>) -> Child {
    let stdin = socket.map_or_else(Stdio::null, |socket| Stdio::from(OwnedFd::from(socket)));
    Command::new(env::current_exe().unwrap())
        .args(["--exact", entry, "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap()
}

/// The socket that [`spawn`] gave to this child.
pub(crate) fn socket() -> UnixStream {
    use std::os::fd::AsFd;
    UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap())
}

/// Counts the open descriptors of this process.
///
/// Files of `/proc` are left out: the system's allocator reads some of them, in any thread and at
/// any time (`/proc/sys/vm/overcommit_memory` when it first shrinks a heap).
pub(crate) fn open_fds() -> usize {
    let all = fs::read_dir("/proc/self/fd").unwrap();
    // A descriptor that is closed meanwhile has no link any more.
    let links = all.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    links.filter(|link| !link.starts_with("/proc")).count()
}

/// The submission of a ticket: a random name, shape and request, always the same for the same
/// ticket.
pub(crate) fn submission(ticket: u64) -> Submission {
    let mut random = SplitMix64::seed_from_u64(ticket);
    let mut next = move |below: u64| random.next_u64() % below;
    let dims: Vec<u64> = (0..next(5)).map(|_| next(9)).collect();
    let name = format!("layer{}.{}", next(100), "é".repeat(next(20) as usize));
    let dtype = DType::ALL[next(DType::ALL.len() as u64) as usize];
    let op = ReduceOp::ALL[next(ReduceOp::ALL.len() as u64) as usize];
    let op = if op.refuses(dtype).is_some() { ReduceOp::Sum } else { op };
    let shape = Shape::new(&dims).unwrap();
    let mut request = Request::allreduce(dtype, shape.clone(), op);
    if dtype.is_float() {
        request.prescale = 1.0 / (next(7) + 1) as f64;
    }
    request.more = (0..next(4)).map(|_| Part { dtype, shape: shape.clone() }).collect();
    let mut place = || Place { segment: next(9) as u32, offset: next(1 << 40) };
    let inputs: Vec<Place> = (0..request.parts()).map(|_| place()).collect();
    let mut outputs = inputs.clone();
    if ticket.is_multiple_of(2) {
        outputs.iter_mut().for_each(|output| *output = place());
    }
    let origin = Origin::ALL[next(Origin::ALL.len() as u64) as usize];
    Submission {
        ticket,
        process_set: next(4) as u32,
        name: TensorName::new(&name).unwrap(),
        request,
        priority: next(2000) as i32 - 1000,
        inputs,
        outputs,
        origin,
        copied: ticket.is_multiple_of(3),
        site: CallSite {
            number: next(u64::from(MAX_CALL_SITES)) as u32,
            text: "x".repeat(next(MAX_CALL_SITE_BYTES as u64) as usize).into(),
        },
    }
}
