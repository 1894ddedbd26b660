//! The variables of a job in which a launcher runs, because a rank or its program starts it. They
//! describe that job, and the processes of another one must not read them. Pure.

use std::collections::HashMap;

use gradwire_settings::RESERVED_VARIABLES;

/// The reserved variables that users set.
const OF_USERS: [&str; 5] = [
    "GRADWIRE_ALONE",
    "GRADWIRE_BIND",
    "GRADWIRE_CONFIG",
    "GRADWIRE_RENDEZVOUS",
    "GRADWIRE_SECRET_FILE",
];

/// The variable with the file in which a program of PyTorch describes its uncaught error.
pub const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";

/// The variables of other launchers that a launcher sets for its ranks.
const PLACES: [&str; 19] = [
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "HOROVOD_HOSTNAME",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    ERROR_FILE,
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
];

/// A setting that the launcher of an elastic job sets for each of its processes.
const ELASTIC_TIMEOUT: &str = "GRADWIRE_ELASTIC__TIMEOUT_MS";

/// The variables that describe the job of this process; `has` says whether one is set.
pub fn variables(has: impl Fn(&str) -> bool) -> Vec<&'static str> {
    let own = RESERVED_VARIABLES.iter().copied().filter(|name| !OF_USERS.contains(name));
    let places = PLACES.into_iter().filter(|_| has("GRADWIRE_JOB"));
    let timeout = Some(ELASTIC_TIMEOUT).filter(|_| has("GRADWIRE_ELASTIC"));
    own.chain(places).chain(timeout).filter(|name| has(name)).collect()
}

/// An environment without these variables.
#[must_use]
pub fn outside(mut environment: HashMap<String, String>) -> HashMap<String, String> {
    for name in variables(|name| environment.contains_key(name)) {
        environment.remove(name);
    }
    environment
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(names: &[&str]) -> Vec<String> {
        let all = names.iter().map(|name| ((*name).to_owned(), String::new()));
        let mut left: Vec<_> = outside(all.collect()).into_keys().collect();
        left.sort();
        left
    }

    #[test]
    fn only_the_variables_of_a_job_are_removed() {
        let kept = ["GRADWIRE_CONFIG", "GRADWIRE_ELASTIC__TIMEOUT_MS", "PATH", "RANK"];
        assert_eq!(left(&kept), kept, "this is not in a job");
        let of_job = ["GRADWIRE_JOB", "GRADWIRE_ELASTIC", "GRADWIRE_EPOCH", "GRADWIRE_WORKERS"];
        assert_eq!(left(&[&kept[..], &of_job].concat()), ["GRADWIRE_CONFIG", "PATH"]);
    }
}
