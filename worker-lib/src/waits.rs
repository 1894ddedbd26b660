//! How a process finds a daemon that attaches it.
//!
//! In a job that is not elastic there is one daemon on the node, which is there before the ranks.
//! In an elastic job daemons come and go on the same socket, one for each epoch, and an epoch may
//! not include this process. So it asks again and again. The launcher decides who belongs to an
//! epoch: a process tells it, by a line on standard error, that it has found no place.
//!
//! WAIT: the search ends at a deadline, when the session is shut down, or when it is cancelled.

use std::{
    fs::{self, File},
    io::{self, Write},
    mem,
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use gradwire_proto::{Epoch, Failure, FailureKind};
use gradwire_shm::control::WorkerControl;
use rustix::fs::{OFlags, fcntl_setfl};

use crate::{
    error::{GradwireError, Result},
    flight::DaemonRecording,
    launch::Launch,
    link::{self, Greeted, World},
    shared::Shared,
    stats::Counts,
};

/// The pauses between two attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// The line on standard error of a process that has found no place. As in
/// proto/services/src/launch.rs.
const WAITS: &[u8] = b"\x1egradwire: waits\n";

/// The line of a process that is asked to leave its job. As in proto/services/src/launch.rs.
const LEAVES: &[u8] = b"\x1egradwire: leaves\n";

/// The limits of a wait: a deadline, and a reason to end it earlier.
pub(crate) struct Limit<'a> {
    began: Instant,
    within: Duration,
    /// Why the wait must end now, if it must.
    stopped: &'a dyn Fn() -> Option<GradwireError>,
    what: String,
}

impl<'a> Limit<'a> {
    /// A wait that begins now. `what` is what it waits for.
    pub(crate) fn new(
        what: String,
        within: Duration,
        stopped: &'a dyn Fn() -> Option<GradwireError>,
    ) -> Self {
        Self { began: Instant::now(), within, stopped, what }
    }

    /// The time until the deadline.
    pub(crate) fn left(&self) -> Duration {
        self.within.saturating_sub(self.began.elapsed())
    }

    /// An error if the wait must end. `seen` says what is missing.
    pub(crate) fn check(&self, seen: &str) -> Result<()> {
        if let Some(error) = (self.stopped)() {
            return Err(error);
        }
        if self.left().is_zero() {
            let what = format!("{} ({seen})", self.what);
            return Err(GradwireError::Timeout { what, after: self.within });
        }
        Ok(())
    }

    fn is_stopped(&self) -> bool {
        (self.stopped)().is_some()
    }
}

/// The error of a call that was cancelled.
pub(crate) fn cancelled(what: &str) -> GradwireError {
    Failure::new(FailureKind::Cancelled, format!("{what} was cancelled")).into()
}

/// How much longer a rank waits than the start time limit, to learn the reason of a failure.
const REASON: Duration = Duration::from_secs(2);

/// Attaches to the daemon of a job that is not elastic.
pub(crate) fn attach(
    launch: &Launch,
    counts: &Arc<Counts>,
    cancelled: &dyn Fn() -> bool,
) -> Result<(Arc<Shared>, World)> {
    let greeted = link::greet(&launch.socket, cancelled).map_err(|error| match error {
        GradwireError::Timeout { after, .. } => link::daemon_silent(after).into(),
        error => error,
    })?;
    // The coordinator's limit is as long, and it knows who is missing (TELL).
    let within = launch.tuning.start.timeout + REASON;
    let attached = attach_to(greeted, launch, counts, within, cancelled)?;
    // A daemon says so only to workers of elastic jobs.
    attached.ok_or_else(|| GradwireError::Protocol("it has no place for this rank".into()))
}

/// Hands a new control page over to a daemon, and waits until it attaches this process. `None`: it
/// has no place.
fn attach_to(
    greeted: Greeted,
    launch: &Launch,
    counts: &Arc<Counts>,
    within: Duration,
    cancelled: &dyn Fn() -> bool,
) -> Result<Option<(Arc<Shared>, World)>> {
    let worker = &launch.tuning.worker;
    let page = format!("gradwire-{}-{}-control", launch.job, std::process::id());
    let (control, fd) = WorkerControl::create(&page, worker.max_in_flight)?;
    let attached = link::attach(greeted, launch, fd.as_fd(), within, cancelled)?;
    Ok(attached.map(|(stream, world, doorbell)| {
        let spin = worker.spin_on(world.local_size);
        let is_elastic = launch.place.worker().is_some();
        // Under an agent, the agent saves the recording.
        let folder = if launch.stderr.is_empty() { world.recorder.as_str() } else { "" };
        let recording = DaemonRecording::open(&stream, folder);
        let mut shared = Shared::new(control, stream, doorbell, spin, counts.clone(), is_elastic);
        shared.recording = recording;
        (Arc::new(shared), world)
    }))
}

/// Attaches to the daemon of an epoch after `after` that includes this process; waits for one.
///
/// # Errors
/// [`GradwireError::Timeout`] at the deadline; errors that would come again, such as a refusal.
pub(crate) fn attach_after(
    after: Epoch,
    launch: &Launch,
    counts: &Arc<Counts>,
    limit: &Limit<'_>,
) -> Result<(Arc<Shared>, World)> {
    let (mut pause, mut seen, mut has_told) = (FIRST_PAUSE, String::new(), false);
    loop {
        match attempt(after, launch, counts, limit) {
            Ok(attached) => return Ok(attached),
            Err(NotYet::Error(error)) => {
                limit.check("")?;
                return Err(error);
            }
            // At the deadline an attempt is cut short and has seen nothing new.
            Err(NotYet::Later(_) | NotYet::Silent(_))
                if limit.left().is_zero() && !seen.is_empty() => {}
            Err(NotYet::Later(now)) => seen = now,
            // TELL: the launcher ends a daemon that is stopped if it hears this from all its ranks.
            Err(NotYet::Silent(now)) => (seen, has_told) = (now, false),
        }
        limit.check(&seen)?;
        // Also after a change: the launcher then knows that the job goes on.
        if !mem::replace(&mut has_told, true) {
            tell_launcher(&launch.stderr);
        }
        thread::sleep(pause.min(limit.left()));
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Why an attempt did not succeed.
enum NotYet {
    /// There will be another daemon; what this attempt has seen.
    Later(String),
    /// There is a daemon that does not answer.
    Silent(String),
    /// It would fail again.
    Error(GradwireError),
}

impl From<GradwireError> for NotYet {
    fn from(error: GradwireError) -> Self {
        use io::ErrorKind as K;
        let passes = match &error {
            // Between two epochs no daemon listens, or one that is about to end.
            GradwireError::Connect { source, .. } => matches!(
                source.kind(),
                K::NotFound | K::ConnectionRefused | K::ConnectionReset | K::WouldBlock
            ),
            GradwireError::System { source, .. } => {
                matches!(source.kind(), K::BrokenPipe | K::ConnectionReset)
            }
            GradwireError::Failed(failure) => failure.is_recoverable(),
            GradwireError::Timeout { .. } => return Self::Silent(error.to_string()),
            _ => false,
        };
        if passes { Self::Later(error.to_string()) } else { Self::Error(error) }
    }
}

fn attempt(
    after: Epoch,
    launch: &Launch,
    counts: &Arc<Counts>,
    limit: &Limit<'_>,
) -> Result<(Arc<Shared>, World), NotYet> {
    let stopped = || limit.is_stopped();
    let greeted = link::greet(&launch.socket, &stopped)?;
    let epoch = greeted.epoch;
    if epoch == Epoch(0) {
        let text = "its job is not elastic, but this process is part of an elastic one";
        let failure = Failure::new(FailureKind::Invalid, text);
        return Err(NotYet::Error(GradwireError::Refused(failure)));
    }
    if epoch <= after {
        let text = format!("the daemon of this node is still that of epoch {}", epoch.0);
        return Err(NotYet::Later(text));
    }
    let attached = attach_to(greeted, launch, counts, limit.left(), &stopped)?;
    let later = || NotYet::Later(format!("epoch {} does not include this process", epoch.0));
    let (shared, world) = attached.ok_or_else(later)?;
    if world.epoch != epoch {
        let text = format!("it greeted for epoch {}, but attached for {}", epoch.0, world.epoch.0);
        return Err(NotYet::Error(GradwireError::Protocol(text)));
    }
    Ok((shared, world))
}

/// Tells the launcher that this process waits for an epoch that includes it. If that fails, the
/// launcher goes on after a while. `pipe` is the pipe that the agent reads.
fn tell_launcher(pipe: &str) {
    let _ = say(pipe, WAITS);
}

/// Tells the launcher that this process was asked to leave the job. Returns whether that worked.
pub(crate) fn tell_that_it_leaves(pipe: &str) -> bool {
    say(pipe, LEAVES)
}

/// Writes a line for the agent. `pipe` names its pipe, as `DEVICE:INODE` or with a descriptor that
/// is a copy: `DEVICE:INODE:NUMBER`. Standard error may go elsewhere.
fn say(pipe: &str, line: &[u8]) -> bool {
    let is_pipe = |about: io::Result<(u64, u64)>| {
        about.is_ok_and(|(device, inode)| {
            let own = format!("{device}:{inode}");
            pipe.strip_prefix(&own).is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
        })
    };
    let stderr = io::stderr();
    let about = rustix::fs::fstat(&stderr).map(|about| (about.st_dev, about.st_ino));
    if is_pipe(about.map_err(Into::into)) {
        return rustix::io::write(&stderr, line).is_ok();
    }
    // Safe code opens a descriptor by name, after a check: opening another file may have effects.
    let Some(number) = pipe.splitn(3, ':').nth(2) else { return false };
    let copy = format!("/proc/self/fd/{number}");
    if !is_pipe(fs::metadata(&copy).map(|about| (about.dev(), about.ino()))) {
        return false;
    }
    // An open for writing would wait for a reader, which may have ended.
    let at_once = OFlags::NONBLOCK.bits().cast_signed();
    let copy = File::options().write(true).custom_flags(at_once).open(copy);
    copy.is_ok_and(|mut copy| {
        fcntl_setfl(&copy, OFlags::empty()).is_ok() && copy.write_all(line).is_ok()
    })
}
