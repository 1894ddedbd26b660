//! The parameters of a session, from the variables that the launcher sets.
//!
//! The environment is an argument, so that reading it is a pure function. Settings are those of
//! `gradwire-keys`: their defaults, units and ranges are declared there.

use std::{collections::HashMap, env, path::PathBuf};

use gradwire_keys::{Origin, RankSettings, SettingsError};
use gradwire_proto::{JobId, Secret};

use crate::{
    error::{GradwireError, Result},
    joining,
    starters::{self, Program, Refusal},
};

const JOB: &str = "GRADWIRE_JOB";
const SECRET: &str = "GRADWIRE_SECRET";
const SOCKET: &str = "GRADWIRE_SOCKET";
const LOCAL_RANK: &str = "GRADWIRE_LOCAL_RANK";
const LAUNCHED: [&str; 4] = [JOB, SECRET, SOCKET, LOCAL_RANK];
/// Set to 1 for the ranks of an elastic job. Then [`WORKER`] replaces [`LOCAL_RANK`].
const ELASTIC: &str = "GRADWIRE_ELASTIC";
const WORKER: &str = "GRADWIRE_WORKER";
const STDERR: &str = "GRADWIRE_STDERR";

/// How the daemon of a node knows a training process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// By its number on the node, in a job whose ranks never change.
    LocalRank(u32),
    /// By the number that it has in an elastic job.
    Worker(u32),
}

impl Place {
    /// The number in the proof of a process.
    pub(crate) fn number(self) -> u32 {
        let (Self::LocalRank(number) | Self::Worker(number)) = self;
        number
    }

    /// Its number in an elastic job.
    pub(crate) fn worker(self) -> Option<u32> {
        match self {
            Self::LocalRank(_) => None,
            Self::Worker(worker) => Some(worker),
        }
    }
}

/// The record that is wanted of the rank ([`crate::record`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Recording {
    /// The folder of its record, which is made.
    pub(crate) folder: PathBuf,
    /// The most bytes of the record.
    pub(crate) bytes: u64,
}

impl Recording {
    /// The variable of the folder.
    pub(crate) const FOLDER: &str = "GRADWIRE_RECORD";
    /// The variable of the limit.
    pub(crate) const BYTES: &str = "GRADWIRE_RECORD_BYTES";

    fn read(variables: &HashMap<String, String>, place: Place) -> Result<Option<Self>> {
        let Some(folder) = variables.get(Self::FOLDER).filter(|folder| !folder.is_empty()) else {
            return Ok(None);
        };
        if place.worker().is_some() {
            let reason = "ranks of an elastic job can't be recorded";
            return Err(bad(Self::FOLDER, folder, reason));
        }
        let bytes = variables.get(Self::BYTES).map_or("", String::as_str);
        let bytes = bytes.parse().map_err(|_| bad(Self::BYTES, bytes, "it must be a number"))?;
        Ok(Some(Self { folder: folder.into(), bytes }))
    }
}

/// Everything that a session needs to attach.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    pub(crate) job: JobId,
    pub(crate) secret: Secret,
    /// A path, or `@name` for the abstract namespace.
    pub(crate) socket: String,
    pub(crate) place: Place,
    /// The pipe that is standard error under an agent (see [`crate::waits`]); may be empty.
    pub(crate) stderr: String,
    pub(crate) tuning: RankSettings,
    pub(crate) recording: Option<Recording>,
}

impl Launch {
    /// Reads the environment of this process.
    pub(crate) fn from_env() -> Result<Self> {
        let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
        let variables = env::vars_os().map(|(name, value)| (text(name), text(value)));
        let mut variables: HashMap<_, _> = variables.collect();
        let is_task = || starters::refusal(&variables, &Program::default()).is_some();
        if !is_launched(&variables) && is_task() {
            joining::join(joining::PROGRAM, &mut variables)?;
        }
        Self::read(variables)
    }

    fn read(variables: HashMap<String, String>) -> Result<Self> {
        let need = |name| match variables.get(name) {
            Some(text) => Ok(text.as_str()),
            None if is_launched(&variables) => {
                let reason = "it is not set, although other variables of the launcher are";
                Err(bad(name, "", reason))
            }
            // A trainer may go on alone, but not as one of several tasks.
            None => match starters::refusal(&variables, &Program::of_this_process()) {
                Some(Refusal { variable, value, reason }) => Err(bad(&variable, &value, reason)),
                None => Err(GradwireError::NotLaunched { missing: name }),
            },
        };
        let job = JobId::new(need(JOB)?)?;
        let socket = need(SOCKET)?.to_owned();
        if socket.is_empty() || socket == "@" {
            return Err(bad(SOCKET, &socket, "it must be a path, or @ and a name"));
        }
        let secret = Secret::from_hex(need(SECRET)?)?;
        let number = |name| {
            let text: &str = need(name)?;
            text.parse().map_err(|_| bad(name, text, "it must be a number from 0 to 4294967295"))
        };
        let place = match variables.get(ELASTIC).map_or("", String::as_str) {
            "" | "0" => Place::LocalRank(number(LOCAL_RANK)?),
            "1" => Place::Worker(number(WORKER)?),
            other => return Err(bad(ELASTIC, other, "it must be 0 or 1")),
        };
        let tuning = RankSettings::load(&variables).map_err(|error| refused(error, &variables))?;
        let stderr = variables.get(STDERR).cloned().unwrap_or_default();
        let recording = Recording::read(&variables, place)?;
        Ok(Self { job, secret, socket, place, stderr, tuning, recording })
    }
}

/// Whether a launcher has started this process. Users may set a secret for other launchers.
fn is_launched(variables: &HashMap<String, String>) -> bool {
    LAUNCHED.iter().any(|name| *name != SECRET && variables.contains_key(*name))
}

/// The error for a setting; it names the variable.
fn refused(error: SettingsError, variables: &HashMap<String, String>) -> GradwireError {
    match error {
        SettingsError::Value { given, origin: Origin::Variable(name), expected, .. } => {
            bad(&name, &given, expected)
        }
        SettingsError::Unknown { origin: Origin::Variable(name), suggestion, .. } => {
            let given = variables.get(&name).map_or("", String::as_str);
            bad(&name, given, format!("unknown setting{suggestion}"))
        }
        // The other errors concern files and flags, which are not used here.
        error => GradwireError::Settings(error.to_string()),
    }
}

pub(crate) fn bad(name: &str, given: &str, reason: impl Into<String>) -> GradwireError {
    GradwireError::Setting { name: name.into(), given: given.into(), reason: reason.into() }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gradwire_keys::{HugePages, horovod::START_TIMEOUT};

    use super::*;

    fn read(changes: &[(&str, Option<&str>)]) -> Result<Launch> {
        let secret = "ab".repeat(32);
        let mut all = HashMap::from([
            (JOB, "job"),
            (SECRET, &secret),
            (SOCKET, "@gradwire-job-0"),
            (LOCAL_RANK, "3"),
        ]);
        for (name, value) in changes {
            match value {
                Some(value) => all.insert(name, value),
                None => all.remove(name),
            };
        }
        let own = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        Launch::read(all.into_iter().map(own).collect())
    }

    #[test]
    fn the_launchers_variables_are_enough() {
        let launch = read(&[]).unwrap();
        assert_eq!((launch.job.as_str(), launch.place), ("job", Place::LocalRank(3)));
        assert_eq!(launch.tuning.worker, RankSettings::default().worker);
        let tuning = read(&[
            ("GRADWIRE_WORKER__ARENA_SEGMENT_BYTES", Some("64MB")),
            ("GRADWIRE_WORKER__SPIN_US", Some("20")),
            ("GRADWIRE_WORKER__HUGE_PAGES", Some("never")),
            ("GRADWIRE_WORKER__DAEMON_TIMEOUT_MS", Some("9000")),
            ("HOROVOD_START_TIMEOUT", Some("77")),
            // Settings of other processes are ignored.
            ("GRADWIRE_DATA__LANES", Some("many")),
            ("GRADWIRE_TEST", Some("1")),
        ])
        .unwrap()
        .tuning;
        let worker = tuning.worker;
        assert_eq!((worker.arena_segment_bytes, worker.arena_max_bytes), (64_000_000, 0));
        assert_eq!(worker.spin, Some(Duration::from_micros(20)));
        assert_eq!(worker.huge_pages, HugePages::Never);
        assert_eq!(worker.daemon_timeout, Duration::from_secs(9));
        assert_eq!(tuning.start.timeout, Duration::from_secs(77));
    }

    #[test]
    fn a_rank_of_an_elastic_job_is_a_worker() {
        let elastic = [(ELASTIC, Some("1")), (WORKER, Some("7")), (LOCAL_RANK, None)];
        let launch = read(&elastic).unwrap();
        assert_eq!((launch.place, launch.place.worker()), (Place::Worker(7), Some(7)));
        assert_eq!(launch.tuning.elastic.timeout, Duration::from_secs(600));
        assert_eq!(read(&[(ELASTIC, Some("0"))]).unwrap().place.worker(), None);
        let error = read(&[(ELASTIC, Some("1"))]).unwrap_err().to_string();
        assert!(error.contains(WORKER) && error.contains("not set"), "{error}");
        let error = read(&[(ELASTIC, Some("yes"))]).unwrap_err().to_string();
        assert!(error.contains(ELASTIC) && error.contains("0 or 1"), "{error}");
    }

    #[test]
    fn bad_variables_are_named_but_not_the_secret() {
        for missing in LAUNCHED {
            // Different from no launcher at all: here a trainer must not continue alone.
            let error = read(&[(missing, None)]).unwrap_err();
            assert!(matches!(&error, GradwireError::Setting { name, .. } if name == missing));
            assert!(error.to_string().contains("not set"), "{error}");
        }
        let nothing = read(&LAUNCHED.map(|name| (name, None))).unwrap_err();
        assert!(matches!(nothing, GradwireError::NotLaunched { .. }), "{nothing}");
        assert!(nothing.to_string().contains("gradwire run"), "{nothing}");
        let srun = [("SLURM_STEP_NUM_TASKS", Some("8"))];
        let several = [LAUNCHED.map(|name| (name, None)).as_slice(), &srun].concat();
        let several = read(&several).unwrap_err();
        assert!(matches!(several, GradwireError::Setting { .. }), "{several}");
        let cases = [
            (LOCAL_RANK, "-1"),
            (LOCAL_RANK, "4294967296"),
            (SOCKET, ""),
            (START_TIMEOUT, "soon"),
            ("GRADWIRE_LAUNCH__START_TIMEOUT_MS", "soon"),
            ("GRADWIRE_WORKER__ARENA_SEGMENT_BYTES", "64Zonk"),
            ("GRADWIRE_WORKER__ARENA_SEGMENT_BYTES", "65GiB"),
            ("GRADWIRE_WORKER__ARENA_SEGMENT_BYTES", "99999999999GiB"),
            ("GRADWIRE_WORKER__SPIN_US", "1.5"),
            ("GRADWIRE_WORKER__HUGE_PAGES", "yes"),
            ("GRADWIRE_WORKER__ARENA_SEGMENT_BITES", "1"),
        ];
        for (name, given) in cases {
            let text = read(&[(name, Some(given))]).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains(given), "{text}");
        }
        let recorded = (Recording::FOLDER, Some("/tmp/r/rank.3"));
        let text = read(&[recorded, (Recording::BYTES, Some("much"))]).unwrap_err().to_string();
        assert!(text.contains(Recording::BYTES) && text.contains("much"), "{text}");
        let elastic = [recorded, (ELASTIC, Some("1")), (WORKER, Some("7"))];
        let text = read(&elastic).unwrap_err().to_string();
        assert!(text.contains("elastic job can't be recorded"), "{text}");
        let rule = read(&[("GRADWIRE_WORKER__ARENA_MAX_BYTES", Some("1MiB"))]).unwrap_err();
        assert!(rule.to_string().starts_with("worker.arena_max_bytes = 1048576 must be"), "{rule}");
        let text = read(&[(SECRET, Some("cafe"))]).unwrap_err().to_string();
        assert!(text.contains(SECRET) && !text.contains("cafe"), "{text}");
    }
}
