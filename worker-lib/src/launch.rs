//! Where a session's parameters come from: the variables that the launcher sets.
//!
//! The environment is passed in as a function, so that reading it is a value to value affair.

use std::{env, time::Duration};

use gradwire_proto::{JobId, Secret};
use gradwire_shm::segment::HugePages;

use crate::error::{GradwireError, Result};

const JOB: &str = "GRADWIRE_JOB";
const SECRET: &str = "GRADWIRE_SECRET";
const SOCKET: &str = "GRADWIRE_SOCKET";
const LOCAL_RANK: &str = "GRADWIRE_LOCAL_RANK";
const LAUNCHED: [&str; 4] = [JOB, SECRET, SOCKET, LOCAL_RANK];
const START_TIMEOUT: &str = "GRADWIRE_LAUNCH__START_TIMEOUT_MS";
const HOROVODS_TIMEOUT: &str = "HOROVOD_START_TIMEOUT";
const WORKER: &str = "GRADWIRE_WORKER__";

/// All that a session needs to know before it attaches.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    pub(crate) job: JobId,
    pub(crate) secret: Secret,
    /// A path, or `@name` for the abstract namespace.
    pub(crate) socket: String,
    pub(crate) local_rank: u32,
    pub(crate) tuning: Tuning,
}

/// What may be left at its default.
#[derive(Debug, Clone)]
pub(crate) struct Tuning {
    /// The size up to which the arena's segments double.
    pub(crate) segment_bytes: u64,
    /// The most shared memory, if there is a limit.
    pub(crate) max_bytes: Option<u64>,
    pub(crate) max_segments: u32,
    /// How long a waiter spins before it sleeps; by cores and local ranks where not set.
    pub(crate) spin: Option<Duration>,
    pub(crate) huge_pages: HugePages,
    /// The largest object of this rank.
    pub(crate) max_object_bytes: u64,
    /// How long the world may take to form, and a segment to be taken.
    pub(crate) start_timeout: Duration,
    /// A daemon whose own beats stop for this long is lost.
    pub(crate) silence: Duration,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            segment_bytes: 64 << 20,
            max_bytes: None,
            max_segments: 1024,
            spin: None,
            huge_pages: HugePages::Advise,
            max_object_bytes: 1 << 30,
            start_timeout: Duration::from_secs(30),
            silence: Duration::from_secs(4),
        }
    }
}

impl Launch {
    /// Reads the environment of this process.
    pub(crate) fn from_env() -> Result<Self> {
        let mut unknown = env::vars_os()
            .filter_map(|(name, _)| name.into_string().ok())
            .filter(|name| name.starts_with(WORKER))
            .collect::<Vec<_>>();
        unknown.sort();
        Self::read(&|name| env::var_os(name).map(|v| v.to_string_lossy().into_owned()), &unknown)
    }

    /// Reads variables through `get`; `worker` names those of `GRADWIRE_WORKER__…` that there are.
    fn read(get: &dyn Fn(&str) -> Option<String>, worker: &[String]) -> Result<Self> {
        let need = |name| match get(name) {
            Some(text) => Ok(text),
            None if LAUNCHED.iter().any(|other| get(other).is_some()) => {
                let reason = "it is not set, though others of the launcher's variables are";
                Err(bad(name, "", reason))
            }
            None => Err(GradwireError::NotLaunched { missing: name }),
        };
        let job = JobId::new(&need(JOB)?)?;
        let socket = need(SOCKET)?;
        if socket.is_empty() || socket == "@" {
            return Err(bad(SOCKET, &socket, "it must be a path, or @ and a name"));
        }
        let secret = Secret::from_hex(&need(SECRET)?)?;
        let local_rank = number(LOCAL_RANK, &need(LOCAL_RANK)?, 0, u64::from(u32::MAX))?;
        let mut tuning = Tuning::default();
        if let Some(text) = get(START_TIMEOUT) {
            let ms = number(START_TIMEOUT, &text, 1, 86_400_000)?;
            tuning.start_timeout = Duration::from_millis(ms);
        } else if let Some(text) = get(HOROVODS_TIMEOUT).filter(|text| !text.trim().is_empty()) {
            let seconds = number(HOROVODS_TIMEOUT, text.trim(), 0, u64::MAX)?;
            tuning.start_timeout = Duration::from_secs(seconds.clamp(1, 86_400));
        }
        for name in worker {
            if let Some(text) = get(name) {
                tuning.set(name, &text)?;
            }
        }
        // The number was checked against u32::MAX.
        Ok(Self { job, secret, socket, local_rank: local_rank as u32, tuning })
    }
}

impl Tuning {
    fn set(&mut self, name: &str, text: &str) -> Result<()> {
        match name.strip_prefix(WORKER).unwrap_or(name) {
            "ARENA_SEGMENT_BYTES" => self.segment_bytes = bytes(name, text, 1 << 16, 1 << 40)?,
            "ARENA_MAX_BYTES" => {
                self.max_bytes = Some(bytes(name, text, 0, 1 << 50)?).filter(|&max| max > 0);
            }
            "MAX_OBJECT_BYTES" => self.max_object_bytes = bytes(name, text, 1, 1 << 40)?,
            "MAX_SEGMENTS" => self.max_segments = number(name, text, 1, 1 << 20)? as u32,
            "SPIN_US" => {
                self.spin = match text {
                    "auto" | "-1" => None,
                    _ => Some(Duration::from_micros(number(name, text, 0, 1_000_000)?)),
                };
            }
            "HUGE_PAGES" => {
                self.huge_pages = match text {
                    "never" => HugePages::Never,
                    "advise" => HugePages::Advise,
                    "require" => HugePages::Require,
                    _ => return Err(bad(name, text, "it must be never, advise or require")),
                };
            }
            _ => return Err(bad(name, text, "there is no such setting of a worker")),
        }
        Ok(())
    }
}

pub(crate) fn bad(name: &str, given: &str, reason: impl Into<String>) -> GradwireError {
    GradwireError::Setting { name: name.into(), given: given.into(), reason: reason.into() }
}

fn number(name: &str, text: &str, min: u64, max: u64) -> Result<u64> {
    text.parse()
        .ok()
        .filter(|n| (min..=max).contains(n))
        .ok_or_else(|| bad(name, text, format!("it must be a whole number from {min} to {max}")))
}

/// Plain bytes, or with a unit: `64MiB`.
fn bytes(name: &str, text: &str, min: u64, max: u64) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => Some(1),
        "KiB" => Some(1 << 10),
        "MiB" => Some(1 << 20),
        "GiB" => Some(1u64 << 30),
        _ => None,
    };
    digits
        .parse::<u64>()
        .ok()
        .zip(unit)
        .and_then(|(n, unit)| n.checked_mul(unit))
        .filter(|n| (min..=max).contains(n))
        .ok_or_else(|| {
            let reason = format!("it must be bytes from {min} to {max}, such as 65536 or 64MiB");
            bad(name, text, reason)
        })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn read(changes: &[(&str, Option<&str>)]) -> Result<Launch> {
        let secret = "ab".repeat(32);
        let mut all = BTreeMap::from([
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
        let worker: Vec<_> =
            all.keys().filter(|n| n.starts_with(WORKER)).map(|n| (*n).to_owned()).collect();
        Launch::read(&|name| all.get(name).map(|v| (*v).to_owned()), &worker)
    }

    #[test]
    fn the_launchers_variables_are_enough() {
        let launch = read(&[]).unwrap();
        assert_eq!((launch.job.as_str(), launch.local_rank), ("job", 3));
        assert_eq!(launch.tuning.segment_bytes, 64 << 20);
        let tuned = read(&[
            ("GRADWIRE_WORKER__ARENA_SEGMENT_BYTES", Some("2MiB")),
            ("GRADWIRE_WORKER__ARENA_MAX_BYTES", Some("0")),
            ("GRADWIRE_WORKER__SPIN_US", Some("20")),
            ("GRADWIRE_WORKER__HUGE_PAGES", Some("never")),
            ("GRADWIRE_WORKER__MAX_OBJECT_BYTES", Some("4KiB")),
        ])
        .unwrap()
        .tuning;
        assert_eq!((tuned.segment_bytes, tuned.max_bytes), (2 << 20, None));
        assert_eq!(tuned.spin, Some(Duration::from_micros(20)));
        assert!(matches!(tuned.huge_pages, HugePages::Never));
        assert_eq!(tuned.max_object_bytes, 4096);
    }

    #[test]
    fn each_bad_variable_is_named_and_the_secret_never_shown() {
        for missing in LAUNCHED {
            // Not the same as no launcher at all: a trainer must not go on alone then.
            let error = read(&[(missing, None)]).unwrap_err();
            assert!(matches!(&error, GradwireError::Setting { name, .. } if name == missing));
            assert!(error.to_string().contains("not set"), "{error}");
        }
        let nothing = read(&LAUNCHED.map(|name| (name, None))).unwrap_err();
        assert!(matches!(nothing, GradwireError::NotLaunched { .. }), "{nothing}");
        assert!(nothing.to_string().contains("gradwire run"), "{nothing}");
        let cases = [
            (LOCAL_RANK, "-1"),
            (LOCAL_RANK, "4294967296"),
            (SOCKET, ""),
            (START_TIMEOUT, "soon"),
            ("GRADWIRE_WORKER__ARENA_SEGMENT_BYTES", "64MB"),
            ("GRADWIRE_WORKER__ARENA_SEGMENT_BYTES", "99999999999GiB"),
            ("GRADWIRE_WORKER__SPIN_US", "1.5"),
            ("GRADWIRE_WORKER__HUGE_PAGES", "yes"),
            ("GRADWIRE_WORKER__ARENA_SEGMENT_BITES", "1"),
        ];
        for (name, given) in cases {
            let text = read(&[(name, Some(given))]).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains(given), "{text}");
        }
        let text = read(&[(SECRET, Some("cafe"))]).unwrap_err().to_string();
        assert!(text.contains(SECRET) && !text.contains("cafe"), "{text}");
    }
}
