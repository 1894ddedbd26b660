//! The daemon of a replayed rank. Results are written to the memory segments as to files.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{self, ErrorKind},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::FileExt, net::UnixStream},
    },
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use gradwire_proto::{
    Failure, FailureKind, PROTOCOL, VERSION,
    auth::{self, Claim},
    pb::{self, daemon_message::Message, worker_message},
};
use gradwire_shm::{
    control::{Completion, CompletionWriter, DaemonControl, Place, RingError, Submission},
    handover,
};
use gradwire_worker::record::{
    format::Outcome,
    reader::{Call, Reader, RecordError},
};
use prost::Message as _;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::{
    job::{Replay, Summary},
    script::{Answer, Asked, Script},
};

/// The most operations in flight (BOUND); a session refuses more.
const MAX_IN_FLIGHT: u32 = 1 << 20;

/// How long a process may take to prove who it is.
const GREETING: Duration = Duration::from_secs(5);

/// How long a process may take to tell its place when a call differs.
const PLACE: Duration = Duration::from_secs(3);

/// How often the end of the program is looked for.
const TICK: Duration = Duration::from_millis(20);

/// The time between two heartbeats.
const BEAT: Duration = Duration::from_millis(200);

/// The most frames of the program that an error shows.
const FRAMES: usize = 4;

fn say(stream: &UnixStream, message: Message, fd: Option<&OwnedFd>) -> bool {
    let frame = pb::DaemonMessage { message: Some(message) }.encode_to_vec();
    handover::send(stream, &frame, fd.map(AsFd::as_fd).as_slice()).is_ok()
}

fn receive(stream: &UnixStream) -> Option<(worker_message::Message, Vec<OwnedFd>)> {
    let frame = handover::receive(stream).ok()??;
    let message = pb::WorkerMessage::decode(frame.bytes.as_slice()).ok()?.message?;
    Some((message, frame.fds))
}

impl Replay {
    /// Serves the program, each time that it becomes a rank, until `stopped`. Returns what happened
    /// the last time; `None` if it never became a rank.
    ///
    /// # Errors
    /// If the system refuses connections.
    pub fn serve(&self, stopped: &AtomicBool) -> io::Result<Option<Summary>> {
        let mut last = None;
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => last = serve(self, stream, stopped).or(last),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if stopped.load(SeqCst) {
                        return Ok(last);
                    }
                    thread::sleep(TICK);
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Serves one process until it ends; `None` if it is not the rank.
fn serve(replay: &Replay, stream: UnixStream, stopped: &AtomicBool) -> Option<Summary> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(GREETING)).ok()?;
    stream.set_write_timeout(Some(GREETING)).ok()?;
    let nonce = auth::nonce().to_vec();
    let (protocol, version) = (PROTOCOL, VERSION.to_owned());
    let challenge = pb::Challenge { nonce: nonce.clone(), protocol, version, epoch: 0 };
    say(&stream, Message::Challenge(challenge), None);
    let (worker_message::Message::Attach(attach), fds) = receive(&stream)? else { return None };
    let local_rank = attach.local_rank;
    let claim = Claim::Attach { challenge: &nonce, job: &attach.job, local_rank };
    if !replay.secret.verify(&claim, &attach.proof) || local_rank != replay.attached.local_rank {
        let failure = Failure::new(FailureKind::Invalid, "this process is not the replayed rank");
        say(&stream, Message::Refused(failure.into()), None);
        return None;
    }
    let page = fds.into_iter().next()?;
    let DaemonControl { mut submissions, completions, heartbeats, .. } =
        DaemonControl::open(page, MAX_IN_FLIGHT).ok()?;
    let doorbell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
    let opened = Reader::open(&replay.folder, replay.rank);
    let reader = opened.inspect_err(|error| {
        let failure = Failure::new(FailureKind::Internal, error.to_string());
        say(&stream, Message::Refused(failure.into()), None);
    });
    let mut rank = Rank {
        stream,
        completions,
        segments: BTreeMap::new(),
        script: Script::new(replay.header.limit),
        reader: reader.ok()?,
        roomless: HashMap::new(),
        differs: None,
        problem: None,
    };
    rank.say(Message::Attached(replay.attached.clone()), Some(&doorbell));
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        // A large result takes longer than a process waits for a heartbeat.
        scope.spawn(|| {
            while !ended.load(SeqCst) {
                heartbeats.beat();
                thread::sleep(BEAT);
            }
        });
        'serving: while !stopped.load(SeqCst) {
            loop {
                match submissions.pop() {
                    Ok(Some(submission)) => rank.submitted(submission),
                    Ok(None) => break,
                    Err(error) => {
                        rank.abort(Failure::new(FailureKind::Protocol, error.to_string()));
                        break 'serving;
                    }
                }
            }
            rank.look_at_time();
            if submissions.prepare_sleep() {
                let is_news = rank.wait(&doorbell);
                submissions.awake();
                if is_news && !rank.message() {
                    break;
                }
            }
        }
        ended.store(true, SeqCst);
    });
    Some(rank.summary())
}

/// The process that is served.
struct Rank {
    stream: UnixStream,
    completions: CompletionWriter,
    segments: BTreeMap<u32, File>,
    script: Script,
    reader: Reader,
    /// Operations that wait for memory for their results.
    roomless: HashMap<u64, Box<Call>>,
    /// A call that differs, until the place in the program is known or this time.
    differs: Option<(String, Instant)>,
    /// Why the replay has ended early.
    problem: Option<String>,
}

impl Rank {
    fn say(&self, message: Message, fd: Option<&OwnedFd>) {
        // If the process has ended, so has its connection, which is noticed there.
        say(&self.stream, message, fd);
    }

    /// Waits a short while. Returns whether there is a message.
    fn wait(&self, doorbell: &OwnedFd) -> bool {
        let mut polled =
            [PollFd::new(&self.stream, PollFlags::IN), PollFd::new(doorbell, PollFlags::IN)];
        let tick = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        let polled_some = poll(&mut polled, Some(&tick)).is_ok();
        let is_news = polled_some && !polled[0].revents().is_empty();
        let _ = rustix::io::read(doorbell, &mut [0u8; 8]);
        is_news
    }

    /// Ends the session with a failure.
    fn abort(&mut self, failure: Failure) {
        if self.problem.is_none() {
            self.problem = Some(failure.to_string());
            self.say(Message::Aborted(failure.into()), None);
        }
    }

    fn unreadable(&mut self, error: &RecordError) {
        self.abort(Failure::new(FailureKind::Internal, error.to_string()));
    }

    fn submitted(&mut self, submission: Submission) {
        if self.problem.is_some() || self.differs.is_some() {
            return;
        }
        let Submission { ticket, process_set, name, request, outputs, .. } = submission;
        let asked = Asked { number: ticket, process_set, name: &name, request: &request };
        match self.script.ask(asked, &mut self.reader) {
            Ok(Answer::Recorded(call)) => self.end(ticket, call, &outputs),
            Ok(Answer::Open) => {}
            Ok(Answer::Over(failure)) => return self.abort(failure),
            Ok(Answer::Differs(text)) => {
                self.differs = Some((text, Instant::now() + PLACE));
                return self.say(Message::Explain(pb::Explain { number: 1, save: false }), None);
            }
            Err(error) => return self.unreadable(&error),
        }
        match self.script.is_over(&mut self.reader) {
            Ok(None) => {}
            Ok(Some(failure)) => self.abort(failure),
            Err(error) => self.unreadable(&error),
        }
    }

    /// Ends an operation as in the record.
    fn end(&mut self, ticket: u64, call: Box<Call>, outputs: &[Place]) {
        match &call.head.outcome {
            Outcome::Failed(failure) => {
                self.completions.answered();
                let (tickets, failure) = (vec![ticket], Some(failure.clone().into()));
                self.say(Message::TensorFailed(pb::TensorFailed { tickets, failure }), None);
            }
            Outcome::Done { moved: true, results, .. } => {
                let output = |stored: &gradwire_worker::record::format::Stored| pb::Output {
                    shape: stored.shape.clone(),
                    rows: stored.rows.clone(),
                };
                let outputs = results.iter().map(output).collect();
                self.roomless.insert(ticket, call);
                self.say(Message::Allocate(pb::Allocate { ticket, outputs }), None);
            }
            Outcome::Done { .. } => self.complete(ticket, &call, outputs),
            Outcome::Open => {}
        }
    }

    /// Writes the results of an operation, and completes it.
    fn complete(&mut self, ticket: u64, call: &Call, outputs: &[Place]) {
        let Outcome::Done { aux, results, .. } = &call.head.outcome else { return };
        let mut places = results.iter().map(|stored| stored.bytes).zip(outputs);
        let mut now = places.next().map(|(bytes, place)| (bytes, *place));
        let mut written: io::Result<()> = Ok(());
        let read = self.reader.results(call, |mut data| {
            while !data.is_empty() && written.is_ok() {
                let Some((left, place)) = &mut now else {
                    written = Err(io::Error::other("a result has no place"));
                    return;
                };
                if *left == 0 {
                    now = places.next().map(|(bytes, place)| (bytes, *place));
                    continue;
                }
                let (head, tail) = data.split_at(data.len().min(*left as usize));
                written = match self.segments.get(&place.segment) {
                    Some(segment) => segment.write_all_at(head, place.offset),
                    None => Err(io::Error::other("a result has no memory segment")),
                };
                (*left, place.offset) =
                    (*left - head.len() as u64, place.offset + head.len() as u64);
                data = tail;
            }
        });
        if let Err(error) = read {
            return self.unreadable(&error);
        }
        if let Err(error) = written {
            let what = format!("the result of '{}' can't be written: {error}", call.name);
            return self.abort(Failure::new(FailureKind::Internal, what));
        }
        let aux = *aux;
        match self.completions.push(Completion { ticket, aux }) {
            Ok(()) => {}
            Err(RingError::CompletionsFull) => {
                self.say(Message::Completed(pb::Completed { ticket, aux }), None);
            }
            Err(error) => self.abort(Failure::new(FailureKind::Protocol, error.to_string())),
        }
    }

    /// Handles a message; false if the process has left or ended.
    fn message(&mut self) -> bool {
        let Some((message, fds)) = receive(&self.stream) else { return false };
        match message {
            worker_message::Message::AddSegment(add) => {
                let segment = add.segment;
                let Some(memory) = fds.into_iter().next() else { return false };
                self.segments.insert(segment, File::from(memory));
                self.say(Message::SegmentAdded(pb::SegmentAdded { segment }), None);
            }
            worker_message::Message::DropSegment(gone) => {
                self.segments.remove(&gone.segment);
            }
            worker_message::Message::Allocated(allocated) => {
                let place =
                    |place: &pb::Place| Place { segment: place.segment, offset: place.offset };
                let places: Vec<Place> = allocated.places.iter().map(place).collect();
                if let Some(call) = self.roomless.remove(&allocated.ticket) {
                    self.complete(allocated.ticket, &call, &places);
                }
            }
            worker_message::Message::Observed(observed) => {
                if let Some((text, _)) = self.differs.take() {
                    self.say_differs(&text, &observed.threads);
                }
            }
            // Nobody watches the steps of a replayed rank.
            worker_message::Message::Paused(_) => {}
            worker_message::Message::Detach(_) => {
                self.say(Message::Detached(pb::Detached {}), None);
                return false;
            }
            worker_message::Message::GiveUp(_)
            | worker_message::Message::Attach(_)
            | worker_message::Message::Look(_) => return false,
        }
        true
    }

    /// Reports a call that differs without its place, which the process may be unable to tell.
    fn look_at_time(&mut self) {
        if let Some((text, _)) = self.differs.take_if(|(_, until)| Instant::now() >= *until) {
            self.say_differs(&text, &[]);
        }
    }

    fn say_differs(&mut self, text: &str, threads: &[pb::ThreadStack]) {
        let frames = threads.iter().find(|thread| !thread.frames.is_empty());
        let frames = frames.into_iter().flat_map(|thread| &thread.frames);
        let is_own = |frame: &&String| !frame.starts_with("gradwire/");
        let shown: Vec<&str> = frames.filter(is_own).map(String::as_str).take(FRAMES).collect();
        let mut what = text.to_owned();
        if !shown.is_empty() {
            what += "\n  at: ";
            what += &shown.join(", called from ");
        }
        let hint =
            "a replay needs the program, the data and the random numbers of the recorded job";
        self.abort(Failure::new(FailureKind::Disagreement, what).hint(hint));
    }

    fn summary(mut self) -> Summary {
        let counts = self.script.counts(&mut self.reader);
        let (made, recorded) = match counts {
            Ok(counts) => counts,
            Err(error) => {
                self.problem.get_or_insert(error.to_string());
                Default::default()
            }
        };
        Summary { made, recorded, problem: self.problem }
    }
}
