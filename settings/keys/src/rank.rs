//! The settings of a training process.

use std::{collections::HashMap, time::Duration};

use crate::{
    error::SettingsError,
    horovod::START_TIMEOUT,
    key::{Checked, Key, Kind},
    layers::{self, merge},
    section::{Field, values},
    sections,
};

const KIB: u64 = 1 << 10;
const GIB: u64 = 1 << 30;
const HOUR_MS: u64 = 3_600_000;

/// The smallest `worker.arena_segment_bytes`.
pub const MIN_SEGMENT_BYTES: u64 = 64 * KIB;

/// The least `worker.max_in_flight`: some calls consist of several operations.
pub const MIN_IN_FLIGHT: u32 = 64;

/// Whether ordinary tensors move into shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adopt {
    /// When they are exchanged again.
    Auto,
    /// Never: they are copied each time.
    Off,
}

/// When gradients are compared by value, to see what a program has written to them while they were
/// exchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckGradients {
    /// In the first steps, and now and then.
    Start,
    /// In every step.
    Always,
    /// Never.
    Never,
}

/// What happens when a rank contributes NaN or an infinite value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckFinite {
    /// Nothing; nobody looks.
    Off,
    /// The rank reports the first one on its standard error.
    Warn,
    /// The job ends.
    Fail,
}

/// Whether a worker's memory is backed by huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePages {
    /// Ordinary pages.
    Never,
    /// Huge pages where the system offers them.
    Advise,
    /// Huge pages, or an error.
    Require,
}

/// The signal that asks all ranks to stop, besides SIGTERM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// No other one.
    Term,
    /// SIGUSR1.
    Usr1,
    /// SIGUSR2.
    Usr2,
}

impl StopSignal {
    /// The names that the setting accepts: those of signals that a launcher leaves to its ranks.
    pub const NAMES: &'static [&'static str] = &["SIGTERM", "SIGUSR1", "SIGUSR2"];

    /// The name of the signal.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// The signal with this name, with or without `SIG`.
    pub fn named(name: &str) -> Option<Self> {
        let name = name.to_ascii_uppercase();
        let is_named = |signal: &Self| {
            signal.name() == name || signal.name().strip_prefix("SIG") == Some(&name)
        };
        [Self::Term, Self::Usr1, Self::Usr2].into_iter().find(is_named)
    }
}

impl Field for StopSignal {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        Self::named(&String::read(value, unit)?)
    }
}

impl Field for Adopt {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        match String::read(value, unit)?.as_str() {
            "auto" => Some(Self::Auto),
            "off" => Some(Self::Off),
            _ => None,
        }
    }
}

impl Field for CheckGradients {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        match String::read(value, unit)?.as_str() {
            "start" => Some(Self::Start),
            "always" => Some(Self::Always),
            "never" => Some(Self::Never),
            _ => None,
        }
    }
}

impl Field for CheckFinite {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        match String::read(value, unit)?.as_str() {
            "off" => Some(Self::Off),
            "warn" => Some(Self::Warn),
            "fail" => Some(Self::Fail),
            _ => None,
        }
    }
}

impl Field for HugePages {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        match String::read(value, unit)?.as_str() {
            "never" => Some(Self::Never),
            "advise" => Some(Self::Advise),
            "require" => Some(Self::Require),
            _ => None,
        }
    }
}

sections! {
    /// The start of a job.
    Start {
        /// How long it may take until every daemon is ready and every rank is started, and then,
        /// once the first rank has called init(), until all have.
        timeout: Duration =
            "launch.start_timeout_ms",
            Kind::Number { min: 100, max: 24 * HOUR_MS }, "30000", "ms", User;
    }
    /// Elastic jobs.
    Elastic {
        /// How long a job may take from a loss or a change until enough ranks continue: the
        /// launcher waits for processes, a process for an epoch that includes it, and the others
        /// for a rank that still computes.
        timeout: Duration =
            "elastic.timeout_ms", Kind::Number { min: 1000, max: 24 * HOUR_MS }, "600000", "ms";
        /// Whether SIGTERM to a rank makes it leave at the next commit or step, which is not a
        /// fault. A second SIGTERM ends it. With false, or if the program handles the signal
        /// itself, the first one does.
        drain_on_term: bool =
            "elastic.drain_on_term", Kind::Choice(&["false", "true"]), "true", "";
    }
    /// Checks of a training process.
    Checks {
        /// When an optimizer compares its gradients by value, to see what the program has written
        /// to them while they were exchanged: in the first ten steps and then in every hundredth
        /// one, always, or never. These steps are slower.
        gradients: CheckGradients =
            "checks.gradients", Kind::Choice(&["start", "always", "never"]), "start", "";
        /// Whether each rank looks for NaN and infinite values in what it contributes, so that the
        /// rank and the tensor are known where they came from: warn writes the first one to
        /// standard error, fail ends the job. Each tensor is read once more.
        finite: CheckFinite =
            "checks.finite", Kind::Choice(&["off", "warn", "fail"]), "off", "", User;
    }
    /// A training process.
    Worker {
        /// A worker's shared memory grows in segments of 4, 4, 8, 16 … MiB, up to this segment
        /// size; a larger tensor gets its own segment.
        arena_segment_bytes: u64 =
            "worker.arena_segment_bytes",
            Kind::Bytes { min: MIN_SEGMENT_BYTES, max: 64 * GIB }, "64MiB", "bytes";
        /// The most shared memory of one worker; 0: no limit but that of the machine.
        arena_max_bytes: u64 =
            "worker.arena_max_bytes", Kind::Bytes { min: 0, max: 1024 * GIB }, "0", "bytes", User;
        /// The most segments of one worker. Adopted tensors take at most half of them.
        max_segments: u32 =
            "worker.max_segments", Kind::Number { min: 1, max: 65_536 }, "1024", "segments";
        /// The most operations of one worker that are in flight. Its daemon refuses more, too.
        max_in_flight: u32 =
            "worker.max_in_flight",
            Kind::Number { min: MIN_IN_FLIGHT as u64, max: 1 << 20 }, "65536", "operations";
        /// Whether the memory of a PyTorch CPU tensor is moved into shared memory when the tensor
        /// is exchanged in place a second time, so that it is not copied any more.
        adopt: Adopt = "worker.adopt", Kind::Choice(&["auto", "off"]), "auto", "";
        /// Larger tensors are not moved.
        adopt_max_bytes: u64 =
            "worker.adopt_max_bytes", Kind::Bytes { min: 64 << 10, max: 1024 * GIB }, "4GiB",
            "bytes";
        /// How long a waiting worker, and the daemon that waits for submissions, spins before it
        /// sleeps; auto: depends on the number of cores and workers.
        spin: Option<Duration> =
            "worker.spin_us", Kind::NumberOrAuto { min: 0, max: 1_000_000 }, "auto", "us";
        /// The largest object that a worker sends with broadcast_object or allgather_object.
        max_object_bytes: u64 =
            "worker.max_object_bytes", Kind::Bytes { min: 1, max: 1024 * GIB }, "1GiB", "bytes";
        /// A worker considers the daemon lost after this long without its heartbeat.
        daemon_timeout: Duration =
            "worker.daemon_timeout_ms", Kind::Number { min: 1000, max: HOUR_MS }, "4000", "ms";
        /// Whether shared memory is backed by huge pages; require takes each page twice from the
        /// pool, and also needs Linux 5.16.
        huge_pages: HugePages =
            "worker.huge_pages", Kind::Choice(&["never", "advise", "require"]), "advise", "";
        /// Binds each rank to its share of the cores of its host (core), or to the NUMA node of
        /// this share (numa). none: the system chooses a core at any time.
        bind_to: String =
            "worker.bind_to", Kind::Choice(&["none", "core", "numa"]), "none", "", User;
        /// The signal that makes should_stop() true, besides SIGTERM. The launcher passes it on to
        /// all ranks, which note it from init() on.
        stop_signal: StopSignal =
            "worker.stop_signal", Kind::Choice(StopSignal::NAMES), "SIGTERM", "", User;
    }
}

impl Worker {
    /// How long the threads of a node with this many ranks spin before they sleep. By default,
    /// 50 µs if there are a core for each rank and three for the daemon, otherwise 0: spinning must
    /// not take a core from a thread that has work.
    pub fn spin_on(&self, ranks: u32) -> Duration {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        self.spin.unwrap_or_else(|| default_spin(cores, ranks as usize))
    }

    /// Checks that the values fit together.
    ///
    /// # Errors
    /// A text that names the keys, their values and what to change.
    pub fn check(&self) -> Result<(), String> {
        if self.arena_max_bytes != 0 && self.arena_max_bytes < self.arena_segment_bytes {
            return Err(format!(
                "worker.arena_max_bytes = {} must be 0 (no limit) or at least \
                 worker.arena_segment_bytes = {}",
                self.arena_max_bytes, self.arena_segment_bytes
            ));
        }
        Ok(())
    }
}

/// The control thread and the data threads of a daemon, if there are two.
const DAEMON_CORES: usize = 3;

fn default_spin(cores: usize, ranks: usize) -> Duration {
    if cores >= ranks + DAEMON_CORES { Duration::from_micros(50) } else { Duration::ZERO }
}

/// What a training process reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankSettings {
    /// `launch.start_timeout_ms`
    pub start: Start,
    /// `elastic.*`
    pub elastic: Elastic,
    /// `checks.*`
    pub checks: Checks,
    /// `worker.*`
    pub worker: Worker,
}

/// The prefixes of the variables that set them; a training process ignores all others.
const VARIABLES: [&str; 5] = [
    "GRADWIRE_ELASTIC__",
    "GRADWIRE_CHECKS__",
    "GRADWIRE_WORKER__",
    "GRADWIRE_LAUNCH__START_TIMEOUT_MS",
    START_TIMEOUT,
];

impl Default for RankSettings {
    fn default() -> Self {
        match Self::load(&HashMap::new()) {
            Ok(settings) => settings,
            Err(error) => unreachable!("the defaults are valid: {error}"),
        }
    }
}

impl RankSettings {
    const SECTIONS: [&[Key]; 4] = [Start::KEYS, Elastic::KEYS, Checks::KEYS, Worker::KEYS];

    /// Whether a training process reads the setting with this name.
    pub fn has(name: &str) -> bool {
        Self::SECTIONS.iter().any(|keys| keys.iter().any(|key| key.name == name))
    }

    /// Reads them from the environment: defaults, then Horovod's variables, then Gradwire's.
    ///
    /// # Errors
    /// [`SettingsError`] with the variable and what would be accepted.
    pub fn load(environment: &HashMap<String, String>) -> Result<Self, SettingsError> {
        let keys: Vec<Key> = Self::SECTIONS.concat();
        let own = |(name, _): &(&String, &String)| VARIABLES.iter().any(|v| name.starts_with(v));
        let own = environment.iter().filter(own).map(|(name, value)| (name.clone(), value.clone()));
        let own: HashMap<_, _> = own.collect();
        let layers =
            [layers::defaults(&keys), layers::horovods(&keys, &own)?, layers::environment(&own)];
        let values = values(merge(&keys, layers, |_, checked| Ok(checked))?);
        let (Some(start), Some(elastic), Some(checks), Some(worker)) = (
            Start::from_values(&values),
            Elastic::from_values(&values),
            Checks::from_values(&values),
            Worker::from_values(&values),
        ) else {
            unreachable!("every key has a default of its kind; a test loads them all")
        };
        worker.check().map_err(SettingsError::Rule)?;
        Ok(Self { start, elastic, checks, worker })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_spins_on_a_core_that_others_need() {
        let spins = |cores, ranks| !default_spin(cores, ranks).is_zero();
        assert!(!spins(1, 1) && !spins(2, 1) && !spins(2, 2) && !spins(4, 4));
        assert!(spins(4, 1) && spins(8, 4) && spins(16, 8) && spins(16, 13));
        assert!(!spins(16, 14) && !spins(16, 16));
        let worker = |spin| Worker { spin, ..RankSettings::default().worker };
        let set = Duration::from_micros(7);
        assert_eq!(worker(Some(set)).spin_on(4096), set);
    }
}
