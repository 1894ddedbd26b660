//! The threads of every session. `gw-watch` receives the daemon's messages, `gw-beat` sends
//! heartbeats and checks the daemon's, and `gw-results` allocates memory for results.

use std::{
    os::unix::net::UnixStream,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use gradwire_proto::{
    Ending, Failure, FailureKind, Request,
    beat::Suspension,
    pb::{self, daemon_message::Message},
};
use gradwire_shm::{arena::Arena, handover::HandoverError};

use crate::{
    elastic::Change,
    error::GradwireError,
    flight::DaemonRecording,
    link::{self, LinkError},
    results,
    shared::{Shared, end::Unwatched},
    witness,
};

/// The names of threads of a session that never start operations.
pub(crate) const THREADS: [&str; 4] = [WATCH, BEATS, RESULTS, witness::NAME];
const WATCH: &str = "gw-watch";
const BEATS: &str = "gw-beat";
const RESULTS: &str = "gw-results";

/// The time between two heartbeats of the worker.
const BEAT: Duration = Duration::from_millis(200);

/// The session's threads. Dropping this leaves them running; see [`Threads::join`].
#[derive(Debug)]
pub(crate) struct Threads {
    watch: JoinHandle<()>,
    beat: JoinHandle<()>,
    results: JoinHandle<()>,
    /// Dropped to end `beat`.
    stop_beating: mpsc::Sender<()>,
}

impl Threads {
    /// Starts the threads. A daemon without a heartbeat for `silence` is lost: it is stopped or
    /// stuck. (If it was killed, the connection ends at once.)
    pub(crate) fn start(
        shared: &Arc<Shared>,
        arena: &Arena,
        silence: Duration,
    ) -> Result<Self, GradwireError> {
        let (stop_beating, stopped) = mpsc::channel();
        let own = shared.clone();
        let beat = spawn(BEATS, move || beat(&own, silence, &stopped))?;
        // At most one request for each operation in flight (BOUND): `Shared::asked` checks it.
        let (request, requests) = mpsc::channel();
        let (own, arena) = (shared.clone(), arena.clone());
        let results = spawn(RESULTS, move || results::serve(&own, &arena, &requests))?;
        let own = shared.clone();
        let watch = spawn(WATCH, move || watch(&own, &request))?;
        Ok(Self { watch, beat, results, stop_beating })
    }

    /// Ends the threads and waits for them. This ends the connection.
    pub(crate) fn join(self, shared: &Shared) {
        shared.hang_up();
        drop(self.stop_beating);
        // `Unwatched` reports panics. `results` ends after `watch`, which sends its requests.
        let _ = self.watch.join();
        let _ = self.beat.join();
        let _ = self.results.join();
        shared.wakers.join();
    }
}

/// Starts a thread.
pub(crate) fn spawn(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, GradwireError> {
    let started = thread::Builder::new().name(name.to_owned()).spawn(run);
    started.map_err(|source| GradwireError::System { what: "a thread", source })
}

fn watch(shared: &Arc<Shared>, request: &mpsc::Sender<(Request, pb::Allocate)>) {
    let _unwatched = Unwatched(shared);
    let end = loop {
        match link::receive(&shared.stream) {
            Ok((message, _)) => match message {
                Message::SegmentAdded(added) => shared.segment_taken(added.segment),
                Message::SegmentRefused(refused) => {
                    shared.segments.refused(refused.segment, refused.reason);
                }
                Message::TensorFailed(failed) => {
                    let failure = failed.failure.map_or_else(
                        || Failure::new(FailureKind::Internal, "the daemon gave no reason"),
                        Failure::from,
                    );
                    shared.fail(&failed.tickets, &failure);
                }
                Message::Completed(completed) => shared.complete(completed.ticket, completed.aux),
                Message::Allocate(allocate) => match shared.asked(&allocate) {
                    // The receiver ends only after this thread.
                    Ok(asked) => drop(request.send((asked, allocate))),
                    Err(failure) => break Ending::Failed(failure),
                },
                // By then the daemon's data threads have stopped.
                Message::Aborted(failure) => {
                    return shared.finish_stopped(Ending::Failed(failure.into()));
                }
                Message::Detached(_) => break Ending::Finished,
                Message::Explain(asked) => witness::answer(shared, asked.number),
                Message::Stalled(stalled) => witness::show(stalled.text),
                Message::Changed(pb::MembershipChanged { added, removed }) => {
                    shared.wants(Change { added, removed });
                }
                Message::Challenge(_)
                | Message::Attached(_)
                | Message::Refused(_)
                | Message::Later(_)
                | Message::Explanation(_) => {
                    break Ending::Failed(Failure::new(
                        FailureKind::Protocol,
                        "the daemon sent a message for a process that is not attached",
                    ));
                }
            },
            Err(error) => {
                shared.finish(lost(&shared.stream, &error));
                // After the program knows: the disk may be slow.
                return shared.recording.iter().for_each(DaemonRecording::save);
            }
        }
    };
    shared.finish(end);
}

/// The cause that the end of the connection implies.
fn lost(stream: &UnixStream, error: &LinkError) -> Ending {
    let failure = match error {
        LinkError::Ended => link::daemon_lost(stream, "while this rank was attached"),
        LinkError::Handover(HandoverError::Io(error)) => {
            link::daemon_lost(stream, &format!("while this rank was attached ({error})"))
        }
        error => Failure::new(FailureKind::Protocol, format!("the daemon's message: {error}")),
    };
    Ending::Failed(failure)
}

fn beat(shared: &Shared, silence: Duration, stopped: &mpsc::Receiver<()>) {
    let mut last = (shared.control.daemon_beats(), Instant::now());
    let mut suspension = Suspension::new(Instant::now());
    loop {
        shared.control.beat();
        match stopped.recv_timeout(BEAT) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
        let (beats, now) = (shared.control.daemon_beats(), Instant::now());
        if suspension.check(now, silence).is_some() || beats != last.0 {
            last = (beats, now);
        } else if beats != 0 && now - last.1 > silence {
            // 0 means no heartbeat yet.
            shared.finish(Ending::Failed(link::daemon_silent(silence)));
            return;
        }
    }
}
