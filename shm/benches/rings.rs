//! The cost of submitting and answering: in one thread, with both sides spinning, and with both
//! sides asleep. The two sides are threads, but use a futex and an eventfd as two processes do.

use std::{
    hint::{self, black_box},
    os::fd::OwnedFd,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::Duration,
};

use criterion::{Criterion, criterion_group, criterion_main};
use gradwire_proto::{DType, ReduceOp, Request, Shape, TensorName};
use gradwire_shm::control::{
    CallSite, Completion, CompletionWriter, DaemonControl, Doorbell, Origin, Place, Submission,
    SubmissionReader, WorkerControl,
};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};

fn submission() -> Submission {
    let place = Place { segment: 0, offset: 4096 };
    Submission {
        ticket: 1,
        process_set: 0,
        name: TensorName::new("layer4.2.conv1.weight").expect("a good name"),
        request: Request::allreduce(
            DType::F32,
            Shape::new(&[512, 512, 3, 3]).expect("a good shape"),
            ReduceOp::Average,
        ),
        priority: 3,
        inputs: vec![place],
        outputs: vec![place],
        origin: Origin::Plain,
        copied: false,
        site: CallSite::default(),
    }
}

fn sides() -> (WorkerControl, SubmissionReader, CompletionWriter) {
    let (worker, fd) = WorkerControl::create("gradwire-bench", 1 << 16).expect("a control page");
    let daemon = DaemonControl::open(fd, 1 << 16).expect("a good control page");
    (worker, daemon.submissions, daemon.completions)
}

fn one_thread(c: &mut Criterion) {
    let (worker, mut reader, writer) = sides();
    let submission = submission();
    c.bench_function("submit, pop, complete, pop", |b| {
        b.iter(|| {
            let _ = worker.submit(&submission).expect("room");
            let ticket = reader.pop().expect("no nonsense").expect("a submission").ticket;
            writer.push(Completion { ticket, aux: 0 }).expect("room");
            black_box(worker.pop_completion())
        });
    });
}

/// Answers everything until it is stopped; sleeps by the doorbell if there is one.
fn serve(
    mut reader: SubmissionReader,
    writer: &CompletionWriter,
    bell: Option<&OwnedFd>,
    stop: &AtomicBool,
) {
    while !stop.load(Relaxed) {
        while let Some(Submission { ticket, .. }) = reader.pop().expect("no nonsense") {
            writer.push(Completion { ticket, aux: 0 }).expect("room");
        }
        let Some(bell) = bell else {
            hint::spin_loop();
            continue;
        };
        if reader.prepare_sleep() {
            let limit = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            poll(&mut [PollFd::new(bell, PollFlags::IN)], Some(&limit)).expect("a poll");
            reader.awake();
            let _ = rustix::io::read(bell, &mut [0u8; 8]); // fails if nobody rang
        }
    }
}

/// Two spinners on one core would wait for the scheduler.
fn pin(core: usize) {
    let mut cores = CpuSet::new();
    cores.set(core);
    let _ = sched_setaffinity(None, &cores); // ignored: there may be no second core
}

fn round_trip(c: &mut Criterion, name: &str, bell: Option<OwnedFd>, spin: Duration) {
    let (worker, reader, writer) = sides();
    let submission = submission();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            if bell.is_none() {
                pin(1);
            }
            serve(reader, &writer, bell.as_ref(), &stop);
        });
        c.bench_function(name, |b| {
            b.iter(|| {
                let doorbell = worker.submit(&submission).expect("room");
                if let (Doorbell::Ring, Some(bell)) = (doorbell, &bell) {
                    rustix::io::write(bell, &1u64.to_ne_bytes()).expect("a doorbell");
                }
                loop {
                    let seen = worker.epoch();
                    if worker.pop_completion().is_ok_and(|popped| popped.is_some()) {
                        break;
                    }
                    worker.wait(seen, Duration::from_secs(1), spin);
                }
            });
        });
        stop.store(true, Relaxed);
    });
}

fn two_threads(c: &mut Criterion) {
    let bell = || Some(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a bell"));
    let cores = sched_getaffinity(None).expect("a set of cores");
    pin(0);
    round_trip(c, "round trip, both spin on cores of their own", None, Duration::from_micros(50));
    sched_setaffinity(None, &cores).expect("the cores we had");
    round_trip(c, "round trip, both sleep", bell(), Duration::ZERO);
    round_trip(
        c,
        "round trip, daemon sleeps, worker spins 50 us",
        bell(),
        Duration::from_micros(50),
    );
}

criterion_group!(benches, one_thread, two_threads);
criterion_main!(benches);
