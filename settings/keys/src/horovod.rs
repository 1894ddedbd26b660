//! Variables of Horovod and BytePS. If a variable corresponds to a setting, it belongs to a layer
//! below everything that is written for Gradwire.
//!
//! A value is parsed as in Horovod, in Horovod's unit, and clamped to the range of the setting,
//! because Horovod's ranges differ. An invalid value is an error, not 0. An empty one is ignored.

use std::collections::HashMap;

use crate::{
    error::SettingsError,
    key::{Key, Kind},
    origin::Origin,
};

/// What one of Horovod's variables does in Gradwire.
#[derive(Debug, Clone, Copy)]
pub enum Effect {
    /// It changes a setting.
    Sets {
        /// The setting's key.
        key: &'static str,
        /// How the value is converted.
        value: Reading,
    },
    /// Gradwire always does what it asks for.
    Always,
    /// The Python package reads it.
    Python,
    /// It has no counterpart.
    Nothing,
}

/// How a value of Horovod's becomes the value of a setting.
#[derive(Debug, Clone, Copy)]
pub enum Reading {
    /// A number, unchanged, but not below a minimum.
    Number {
        /// The smallest value that fits the defaults of other settings.
        min: u64,
    },
    /// Seconds, converted to milliseconds, but not below a minimum.
    Seconds {
        /// The smallest value that fits the defaults of other settings, in milliseconds.
        min: u64,
    },
    /// A number above 0 becomes the setting's largest value; 0 sets nothing.
    Largest,
    /// One of the log levels of both.
    Level,
    /// A text, unchanged.
    Text,
}

/// How long the job may take to start, in seconds.
pub const START_TIMEOUT: &str = "HOROVOD_START_TIMEOUT";

const fn sets(key: &'static str, value: Reading) -> Effect {
    Effect::Sets { key, value }
}

/// Every variable that tunes Horovod at run time, and two variables of BytePS; docs/horovod.md and
/// docs/byteps.md describe their effects.
pub const VARIABLES: &[(&str, Effect)] = &[
    // Not below data.chunk_bytes.
    ("BYTEPS_PARTITION_BYTES", sets("negotiation.piece_bytes", Reading::Number { min: 256 << 10 })),
    ("BYTEPS_LOG_LEVEL", sets("log.level", Reading::Level)),
    // Not below data.chunk_bytes.
    (
        "HOROVOD_FUSION_THRESHOLD",
        sets("negotiation.piece_bytes", Reading::Number { min: 256 << 10 }),
    ),
    ("HOROVOD_CYCLE_TIME", Effect::Nothing),
    ("HOROVOD_CACHE_CAPACITY", sets("negotiation.max_tensors", Reading::Number { min: 1 })),
    // Before the variable that disables the check, which takes precedence.
    (
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        sets("negotiation.stall_warning_ms", Reading::Seconds { min: 0 }),
    ),
    ("HOROVOD_STALL_CHECK_DISABLE", sets("negotiation.stall_warning_ms", Reading::Largest)),
    (
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        sets("negotiation.stall_shutdown_ms", Reading::Seconds { min: 0 }),
    ),
    ("HOROVOD_LOG_LEVEL", sets("log.level", Reading::Level)),
    ("HOROVOD_LOG_HIDE_TIME", Effect::Nothing),
    ("HOROVOD_GLOO_IFACE", sets("data.interface", Reading::Text)),
    // Not below heartbeat.timeout_ms.
    ("HOROVOD_GLOO_TIMEOUT_SECONDS", sets("job.timeout_ms", Reading::Seconds { min: 5000 })),
    (START_TIMEOUT, sets("launch.start_timeout_ms", Reading::Seconds { min: 0 })),
    ("HOROVOD_HIERARCHICAL_ALLREDUCE", Effect::Always),
    ("HOROVOD_HIERARCHICAL_ALLGATHER", Effect::Always),
    ("HOROVOD_DYNAMIC_PROCESS_SETS", Effect::Always),
    ("HOROVOD_ENABLE_ASYNC_COMPLETION", Effect::Always),
    ("HOROVOD_TORUS_ALLREDUCE", Effect::Nothing),
    ("HOROVOD_DISABLE_GROUP_FUSION", Effect::Nothing),
    ("HOROVOD_TIMELINE", Effect::Python),
    ("HOROVOD_TIMELINE_MARK_CYCLES", Effect::Nothing),
    ("HOROVOD_DISABLE_NVTX_RANGES", Effect::Nothing),
    ("HOROVOD_AUTOTUNE", Effect::Nothing),
    ("HOROVOD_AUTOTUNE_LOG", Effect::Nothing),
    ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", Effect::Nothing),
    ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", Effect::Nothing),
    ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", Effect::Nothing),
    ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", Effect::Nothing),
    ("HOROVOD_ADASUM_MPI_CHUNK_SIZE", Effect::Nothing),
    ("HOROVOD_BATCH_D2D_MEMCOPIES", Effect::Nothing),
    ("HOROVOD_NUM_NCCL_STREAMS", Effect::Nothing),
    ("HOROVOD_THREAD_AFFINITY", Effect::Nothing),
    ("HOROVOD_MPI_THREADS_DISABLE", Effect::Nothing),
    ("HOROVOD_CPU_OPERATIONS", Effect::Nothing),
    ("HOROVOD_CONTROLLER", Effect::Nothing),
    ("HOROVOD_CCL_CACHE", Effect::Nothing),
    ("HOROVOD_ENABLE_XLA_OPS", Effect::Nothing),
    ("HOROVOD_ELASTIC", Effect::Nothing),
    ("HOROVOD_ELASTIC_TIMEOUT", Effect::Nothing),
];

/// Horovod's log levels, and Gradwire's.
const LEVELS: &[(&str, &str)] = &[
    ("trace", "trace"),
    ("debug", "debug"),
    ("info", "info"),
    ("warning", "warn"),
    ("error", "error"),
    ("fatal", "error"),
];

/// Which of `keys` the variables change: key, value and variable, in the order of [`VARIABLES`].
///
/// # Errors
/// [`SettingsError::Value`] with the variable whose value is invalid.
pub fn settings(
    keys: &[Key],
    environment: &HashMap<String, String>,
) -> Result<Vec<(&'static str, String, Origin)>, SettingsError> {
    let mut all = Vec::new();
    for &(name, effect) in VARIABLES {
        let Effect::Sets { key, value } = effect else { continue };
        let Some(key) = keys.iter().find(|known| known.name == key) else { continue };
        let Some(given) = given(environment, name) else { continue };
        let origin = Origin::Variable(name.to_owned());
        match value.read(key, given) {
            Ok(Some(value)) => all.push((key.name, value, origin)),
            Ok(None) => {}
            Err(expected) => {
                let (key, given) = (key.name, given.to_owned());
                return Err(SettingsError::Value { key, given, origin, expected });
            }
        }
    }
    Ok(all)
}

/// The variables that are set but have no effect.
pub fn without_effect(environment: &HashMap<String, String>) -> Vec<&'static str> {
    VARIABLES
        .iter()
        .filter(|(name, effect)| {
            matches!(effect, Effect::Nothing) && given(environment, name).is_some()
        })
        .map(|(name, _)| *name)
        .collect()
}

fn given<'a>(environment: &'a HashMap<String, String>, name: &str) -> Option<&'a str> {
    environment.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
}

impl Reading {
    /// The setting's value in its written form, if it is set. The error says what is expected.
    fn read(self, key: &Key, given: &str) -> Result<Option<String>, String> {
        let (min, max) = match key.kind {
            Kind::Number { min, max } | Kind::Bytes { min, max } => (min, max),
            _ => (0, u64::MAX),
        };
        let number = |what: &str| {
            given
                .parse::<u64>()
                .map_err(|_| format!("expected a whole number{what}, as in Horovod"))
        };
        Ok(Some(match self {
            Self::Number { min: floor } => number("")?.clamp(min.max(floor), max).to_string(),
            Self::Seconds { min: floor } => {
                let ms = number(" of seconds")?.saturating_mul(1000);
                ms.clamp(min.max(floor), max).to_string()
            }
            Self::Largest => match number(": 1 or 0")? {
                0 => return Ok(None),
                _ => max.to_string(),
            },
            Self::Level => {
                let level = LEVELS.iter().find(|(theirs, _)| given.eq_ignore_ascii_case(theirs));
                let all =
                    || LEVELS.iter().map(|(theirs, _)| *theirs).collect::<Vec<_>>().join(", ");
                level.ok_or_else(|| format!("expected one of {}", all()))?.1.to_owned()
            }
            Self::Text => given.to_owned(),
        }))
    }
}
