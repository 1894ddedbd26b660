//! Attaching: from settings to a session.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use gradwire_keys::{
    Adopt, CheckFinite, HugePages, MIN_IN_FLIGHT, MIN_SEGMENT_BYTES, RankSettings,
};
use gradwire_proto::{Epoch, JobId, Secret};
use gradwire_shm::{
    arena::{Arena, ArenaConfig},
    segment,
};

#[cfg(doc)]
use crate::error::GradwireError;
use crate::{
    call_site::CallSite,
    elastic::Elastic,
    epoch::Membership,
    error::Result,
    handover,
    launch::{Launch, Place, Recording, bad},
    panics,
    record::session as session_record,
    rejoin,
    session::{Limits, Session},
    shared::Shared,
    standard_streams,
    stats::Counts,
    waits::{self, Limit},
};

/// Creates a session. Settings can be changed before it attaches.
///
/// ```no_run
/// # fn main() -> Result<(), gradwire_worker::GradwireError> {
/// use std::time::Duration;
///
/// use gradwire_worker::Session;
///
/// let session = Session::builder_from_env()?
///     .arena_max_bytes(2 << 30)
///     .start_timeout(Duration::from_secs(300))
///     .attach()?;
/// # session.shutdown()
/// # }
/// ```
#[derive(Debug, Clone)]
#[must_use = "nothing happens before `attach`"]
pub struct SessionBuilder {
    launch: Launch,
    cancel: Option<Arc<AtomicBool>>,
    any_thread: bool,
    site: Option<CallSite>,
}

impl Session {
    /// Attaches as the rank that the launcher's variables name (`GRADWIRE_JOB`, `GRADWIRE_SECRET`,
    /// `GRADWIRE_SOCKET`, `GRADWIRE_LOCAL_RANK`; settings `GRADWIRE_WORKER__…`). A task of `srun`
    /// or `mpirun` joins the job of all their tasks, if the program `gradwire` is in PATH.
    ///
    /// # Errors
    /// [`GradwireError::NotLaunched`] if these variables are not set and the process may go on
    /// alone. An error for another variable if it shows that another starter has started several
    /// tasks ([`crate::starters`]), or [`GradwireError::Settings`] if these tasks can't form a job.
    /// Otherwise as for [`SessionBuilder::attach`].
    #[track_caller]
    pub fn from_env() -> Result<Self> {
        Self::builder_from_env()?.attach()
    }

    /// A builder from the launcher's variables.
    ///
    /// # Errors
    /// As for the variables of [`Session::from_env`].
    pub fn builder_from_env() -> Result<SessionBuilder> {
        Ok(SessionBuilder {
            launch: Launch::from_env()?,
            cancel: None,
            any_thread: false,
            site: None,
        })
    }

    /// A builder for a session of `job`, with local rank `local_rank`. The daemon listens at
    /// `socket`: a path, or `@` and a name in the abstract namespace.
    pub fn builder(
        job: JobId,
        secret: Secret,
        socket: impl Into<String>,
        local_rank: u32,
    ) -> SessionBuilder {
        let socket = socket.into();
        let (place, stderr) = (Place::LocalRank(local_rank), String::new());
        let (tuning, recording) = (RankSettings::default(), None);
        let launch = Launch { job, secret, socket, place, stderr, tuning, recording };
        SessionBuilder { launch, cancel: None, any_thread: false, site: None }
    }
}

impl SessionBuilder {
    /// The largest regular segment of the arena, in bytes. Segments double from 4 MiB up to this
    /// size. Larger tensors get their own segment. At least 64 KiB; the default is 64 MiB.
    pub fn arena_segment_bytes(mut self, bytes: usize) -> Self {
        self.launch.tuning.worker.arena_segment_bytes = bytes as u64;
        self
    }

    /// The most shared memory of this rank, in bytes. 0, the default, means no limit.
    pub fn arena_max_bytes(mut self, bytes: usize) -> Self {
        self.launch.tuning.worker.arena_max_bytes = bytes as u64;
        self
    }

    /// Whether the arena uses huge pages. The default is [`HugePages::Advise`].
    pub fn huge_pages(mut self, huge: HugePages) -> Self {
        self.launch.tuning.worker.huge_pages = huge;
        self
    }

    /// Whether the program's memory may be adopted ([`Session::adopt`]). The default is
    /// [`Adopt::Auto`].
    pub fn adopt(mut self, adopt: Adopt) -> Self {
        self.launch.tuning.worker.adopt = adopt;
        self
    }

    /// The largest tensor that may be adopted, in bytes. The default is 4 GiB.
    pub fn adopt_max_bytes(mut self, bytes: usize) -> Self {
        self.launch.tuning.worker.adopt_max_bytes = bytes as u64;
        self
    }

    /// How long a waiting thread spins before it sleeps. The default is 50 µs if there are a core
    /// for each local rank and three for the daemon, otherwise 0, because spinning takes a core
    /// from other threads.
    pub fn spin(mut self, spin: Duration) -> Self {
        self.launch.tuning.worker.spin = Some(spin);
        self
    }

    /// How long the job may take to start (WAIT). The default is 30 s.
    pub fn start_timeout(mut self, timeout: Duration) -> Self {
        self.launch.tuning.start.timeout = timeout;
        self
    }

    /// The process belongs to an elastic job, in which it is worker `worker`: the number that the
    /// launcher gave to this process, and to no other. The local rank is not used.
    pub fn elastic(mut self, worker: u32) -> Self {
        self.launch.place = Place::Worker(worker);
        self
    }

    /// How long a process of an elastic job waits for an epoch that includes it (WAIT). The default
    /// is 10 minutes.
    pub fn elastic_timeout(mut self, timeout: Duration) -> Self {
        self.launch.tuning.elastic.timeout = timeout;
        self
    }

    /// The daemon counts as lost after this time without a heartbeat (WAIT). The default is 4 s.
    pub fn daemon_timeout(mut self, timeout: Duration) -> Self {
        self.launch.tuning.worker.daemon_timeout = timeout;
        self
    }

    /// The most operations of this rank that may be in flight; a further call fails (BOUND). At
    /// least 64; the default is 65,536. The node's daemon has the setting `worker.max_in_flight`,
    /// and gives a rank up that exceeds it.
    pub fn max_in_flight(mut self, operations: u32) -> Self {
        self.launch.tuning.worker.max_in_flight = operations;
        self
    }

    /// The largest object that this rank may give to [`Session::broadcast_object`] and
    /// [`Session::allgather_object`], in bytes. The default is 1 GiB.
    pub fn max_object_bytes(mut self, bytes: usize) -> Self {
        self.launch.tuning.worker.max_object_bytes = bytes as u64;
        self
    }

    /// What happens when this rank contributes NaN or an infinite value to a reduction, a gather or
    /// an alltoall. By default nobody looks; looking reads each tensor once more.
    pub fn check_finite(mut self, check: CheckFinite) -> Self {
        self.launch.tuning.checks.finite = check;
        self
    }

    /// Unnamed operations may be in flight from several threads at once. The program ensures that
    /// the threads start them in the same order on all ranks; otherwise results get mixed up. By
    /// default this is an error.
    pub fn unnamed_from_any_thread(mut self) -> Self {
        self.any_thread = true;
        self
    }

    /// Records what this rank receives, in a new folder and at most this many bytes: see
    /// [`crate::record`].
    pub fn record(mut self, folder: impl Into<PathBuf>, bytes: u64) -> Self {
        self.launch.recording = Some(Recording { folder: folder.into(), bytes });
        self
    }

    /// A flag that cancels [`SessionBuilder::attach`] within 100 ms once it is true.
    pub fn cancel(mut self, cancel: Arc<AtomicBool>) -> Self {
        self.cancel = Some(cancel);
        self
    }

    /// [`SessionBuilder::attach`] counts as called from this line of the program. For language
    /// bindings.
    pub fn called_at(mut self, site: CallSite) -> Self {
        self.site = Some(site);
        self
    }

    /// Attaches to the daemon and returns once every node of the job has joined. Some ranks may not
    /// have attached by then; use a barrier to wait for them. In an elastic job, waits for an epoch
    /// that includes this process, and for all its ranks.
    ///
    /// # Errors
    /// [`GradwireError`] if no daemon answers, if it refuses this process, at the start timeout, or
    /// if memory can't be allocated.
    #[track_caller]
    pub fn attach(self) -> Result<Session> {
        let Self { launch, cancel, any_thread, site } = self;
        let site = site.unwrap_or_else(CallSite::here);
        panics::keep_texts();
        standard_streams::hold();
        let worker = &launch.tuning.worker;
        if worker.arena_segment_bytes < MIN_SEGMENT_BYTES {
            let given = worker.arena_segment_bytes.to_string();
            let reason = format!("it must be at least {MIN_SEGMENT_BYTES}");
            return Err(bad("arena_segment_bytes", &given, reason));
        }
        if worker.max_in_flight < MIN_IN_FLIGHT {
            let given = worker.max_in_flight.to_string();
            let reason = format!("it must be at least {MIN_IN_FLIGHT}");
            return Err(bad("max_in_flight", &given, reason));
        }
        let record = session_record::file_of(&launch)?;
        let process = std::process::id();
        let counts = Arc::<Counts>::default();
        let cancelled = || cancel.as_ref().is_some_and(|flag| flag.load(Relaxed));
        let stopped = || cancelled().then(|| waits::cancelled("attaching"));
        let worker = launch.place.worker();
        let within = launch.tuning.elastic.timeout;
        let limit = Limit::new(rejoin::awaited(launch.place.number()), within, &stopped);
        let (shared, world) = match worker {
            None => waits::attach(&launch, &counts, &cancelled)?,
            Some(_) => waits::attach_after(Epoch(0), &launch, &counts, &limit)?,
        };
        if let Some((file, limit)) = record {
            let recorder = session_record::Recorder::start(file, &launch, &world, limit)?;
            // No other recorder was set before.
            let _ = shared.recorder.set(recorder);
        }
        let (job, tuning) = (launch.job.clone(), launch.tuning.clone());
        let arena = arena(&shared, job.clone(), &tuning);
        let attached = world.epoch;
        let silence = tuning.worker.daemon_timeout;
        let membership = Membership::start(shared, world, &arena, silence)?;
        let adopt_bytes = match tuning.worker.adopt {
            Adopt::Auto => Some(tuning.worker.adopt_max_bytes as usize),
            Adopt::Off => None,
        };
        let limits = Limits {
            object_bytes: tuning.worker.max_object_bytes as usize,
            adopt_bytes,
            any_thread,
            check_gradients: tuning.checks.gradients,
            check_finite: tuning.checks.finite,
            stop_signal: tuning.worker.stop_signal,
        };
        let elastic = worker.map(|worker| Elastic::new(launch, worker, attached));
        let session = Session::new(membership, elastic, counts, arena, job, process, limits);
        session.called_at(site).first_epoch(&limit)?;
        Ok(session)
    }
}

/// An arena that hands each segment to the daemon before anything is allocated in it.
fn arena(shared: &Arc<Shared>, job: JobId, tuning: &RankSettings) -> Arena {
    let mut config = ArenaConfig::new(job);
    config.segment_bytes = tuning.worker.arena_segment_bytes;
    config.max_bytes = Some(tuning.worker.arena_max_bytes).filter(|&max| max > 0);
    config.max_adopted = tuning.worker.max_segments / 2;
    config.huge = match tuning.worker.huge_pages {
        HugePages::Never => segment::HugePages::Never,
        HugePages::Advise => segment::HugePages::Advise,
        HugePages::Require => segment::HugePages::Require,
    };
    let (register, release) = handover::functions(shared, tuning);
    Arena::new(config, register, release)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{handle::Handle, memory::Buffer};

    #[test]
    fn threads_can_share_a_builder_and_a_handle() {
        fn shared<T: Send + Sync>() {}
        shared::<SessionBuilder>();
        shared::<Handle<Buffer>>();
    }
}
