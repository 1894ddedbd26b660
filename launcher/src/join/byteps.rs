//! The place of a host in a job that BytePS's `bpslaunch` would start: by the variables `DMLC_…`,
//! which are the same for `bpslaunch PROGRAM` and for `gradwire join -- PROGRAM`.
//!
//! A worker is a host with ranks, and a server is one without. A scheduler is not needed: the hosts
//! meet at worker 0, whose address must be in `DMLC_PS_ROOT_URI`.

use super::placement::{Placement, PlacementError, Variables};
use crate::machine::Machine;

const ROLE: &str = "DMLC_ROLE";
const WORKERS: &str = "DMLC_NUM_WORKER";
const SERVERS: &str = "DMLC_NUM_SERVER";
const WORKER: &str = "DMLC_WORKER_ID";
const SERVER: &str = "DMLC_SERVER_ID";
const ROOT: &str = "DMLC_PS_ROOT_URI";
const ROOT_PORT: &str = "DMLC_PS_ROOT_PORT";
/// As in BytePS, a single worker uses servers only if this is 1.
const DISTRIBUTED: &str = "BYTEPS_FORCE_DISTRIBUTED";
const GPUS: &str = "NVIDIA_VISIBLE_DEVICES";
/// The ranks of each worker, and the number of a rank among them. BytePS's launcher sets both for
/// its processes; here they may also be given.
pub(super) const RANKS: &str = "BYTEPS_LOCAL_SIZE";
pub(super) const LOCAL_RANK: &str = "BYTEPS_LOCAL_RANK";

pub(super) const BPSLAUNCH: &str = "bpslaunch";

/// The largest number of hosts or ranks.
const MOST: u32 = 1 << 20;

/// Why a host with these variables has nothing to do, if that is so.
pub(super) fn idle(given: &Variables<'_>) -> Option<String> {
    let role = given.get(ROLE)?;
    let why = match role.to_ascii_lowercase().as_str() {
        "scheduler" => "a job needs no scheduler",
        "server" if given.get(WORKERS) == Some("1") && !is_distributed(given) => {
            "a job with a single worker needs no servers"
        }
        _ => return None,
    };
    Some(format!("{ROLE}={role}: {why}"))
}

fn is_distributed(given: &Variables<'_>) -> bool {
    given.get(DISTRIBUTED) == Some("1")
}

/// The place of a host with these variables; `None` without those of BytePS.
pub(super) fn of_host(given: &Variables<'_>) -> Result<Option<Placement>, PlacementError> {
    let Some(role) = given.get(ROLE) else { return Ok(None) };
    if let Some(why) = idle(given) {
        return Err(PlacementError(why));
    }
    let (is_worker, id) = match role.to_ascii_lowercase().as_str() {
        "worker" => (true, WORKER),
        "server" => (false, SERVER),
        _ => {
            let what = format!("{ROLE}={role}: expected worker, server or scheduler");
            return Err(PlacementError(what));
        }
    };
    let workers = number(given, WORKERS, None)?;
    if workers == 0 {
        return Err(PlacementError(format!("{WORKERS}=0: a job needs at least one worker")));
    }
    let uses_servers = workers > 1 || is_distributed(given);
    let servers = if uses_servers { number(given, SERVERS, Some(0))? } else { 0 };
    let (count, name) = if is_worker { (workers, WORKERS) } else { (servers, SERVERS) };
    let own = number(given, id, (count == 1).then_some(0))?;
    if own >= count {
        return Err(PlacementError(format!("{id}={own}: it must be less than {name}={count}")));
    }
    let slots = ranks_of_worker(given, Machine::here)?;
    let Some(size) = workers.checked_mul(slots).filter(|size| *size <= MOST) else {
        let what = format!("{WORKERS}={workers} with {slots} ranks each: too many ranks");
        return Err(PlacementError(what));
    };
    let nodes = workers + servers;
    let master = if nodes == 1 { None } else { Some(root(given)?) };
    Ok(Some(Placement {
        starter: BPSLAUNCH,
        // A single host meets no others, so no other host needs to know the job's name.
        key: (nodes == 1).then(|| std::process::id().to_string()),
        rank: if is_worker { own * slots } else { size },
        size,
        local: 0,
        slots: if is_worker { slots } else { 0 },
        node: if is_worker { own } else { workers + own },
        nodes,
        servers,
        hosts: Vec::new(),
        master,
        starts_ranks: true,
    }))
}

fn number(
    given: &Variables<'_>,
    name: &'static str,
    default: Option<u32>,
) -> Result<u32, PlacementError> {
    match (given.get(name), default) {
        (None, Some(default)) => Ok(default),
        (None, None) => Err(PlacementError(format!("{ROLE} is set, but {name} is not"))),
        (Some(text), _) => text.parse().ok().filter(|number| *number <= MOST).ok_or_else(|| {
            PlacementError(format!("{name}={text}: it must be a number from 0 to {MOST}"))
        }),
    }
}

/// As in BytePS: one for each of the GPUs that the host's container is given, or else one.
fn ranks_of_worker(
    given: &Variables<'_>,
    machine: impl Fn() -> Machine,
) -> Result<u32, PlacementError> {
    if given.get(RANKS).is_some() {
        let ranks = number(given, RANKS, None)?;
        let none = || PlacementError(format!("{RANKS}=0: a worker has at least one rank"));
        return (ranks > 0).then_some(ranks).ok_or_else(none);
    }
    Ok(match given.get(GPUS) {
        None | Some("none" | "void") => 1,
        Some("all") => machine().gpus.max(1),
        Some(list) => list.split(',').filter(|gpu| !gpu.trim().is_empty()).count().max(1) as u32,
    })
}

/// Where the hosts meet.
fn root(given: &Variables<'_>) -> Result<(String, u16), PlacementError> {
    let missing = |name| PlacementError(format!("{ROLE} is set, but {name} is not"));
    let host = given.get(ROOT).ok_or_else(|| missing(ROOT))?;
    let text = given.get(ROOT_PORT).ok_or_else(|| missing(ROOT_PORT))?;
    let port = text.parse().ok().filter(|port| (1..u16::MAX).contains(port)).ok_or_else(|| {
        PlacementError(format!("{ROOT_PORT}={text}: it must be from 1 to {}", u16::MAX - 1))
    })?;
    Ok((host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn given(variables: &str) -> HashMap<String, String> {
        let pairs = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap());
        pairs.map(|(name, text)| (name.to_owned(), text.to_owned())).collect()
    }

    fn read(variables: &str) -> Result<Option<Placement>, PlacementError> {
        of_host(&Variables(&given(variables)))
    }

    fn place(variables: &str) -> Placement {
        read(variables).unwrap().unwrap()
    }

    fn numbers(placement: &Placement) -> [u32; 6] {
        let Placement { rank, size, slots, node, nodes, servers, .. } = *placement;
        [rank, size, slots, node, nodes, servers]
    }

    const JOB: &str =
        "DMLC_NUM_WORKER=2 DMLC_NUM_SERVER=2 DMLC_PS_ROOT_URI=10.0.0.1 DMLC_PS_ROOT_PORT=1234";

    #[test]
    fn workers_come_first_and_servers_last() {
        for (own, expected) in [
            ("DMLC_ROLE=worker DMLC_WORKER_ID=0", [0, 2, 1, 0, 4, 2]),
            ("DMLC_ROLE=worker DMLC_WORKER_ID=1 NVIDIA_VISIBLE_DEVICES=0,3", [2, 4, 2, 1, 4, 2]),
            ("DMLC_ROLE=WORKER DMLC_WORKER_ID=1 BYTEPS_LOCAL_SIZE=3", [3, 6, 3, 1, 4, 2]),
            ("DMLC_ROLE=server DMLC_SERVER_ID=1 BYTEPS_LOCAL_SIZE=3", [6, 6, 0, 3, 4, 2]),
        ] {
            let placement = place(&format!("{JOB} {own}"));
            assert_eq!(numbers(&placement), expected, "{own}");
            assert_eq!(placement.master, Some(("10.0.0.1".to_owned(), 1234)));
            assert!(placement.starts_ranks);
        }
        let one = JOB.replace("NUM_SERVER=2", "NUM_SERVER=1");
        assert_eq!(place(&format!("{one} DMLC_ROLE=server")).node, 2, "the only server");
    }

    #[test]
    fn a_single_worker_needs_nothing_else() {
        let alone = place("DMLC_ROLE=worker DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1");
        assert_eq!((numbers(&alone), &alone.master), ([0, 1, 1, 0, 1, 0], &None));
        let one = JOB.replace("NUM_WORKER=2", "NUM_WORKER=1");
        let server = format!("{one} DMLC_ROLE=server DMLC_SERVER_ID=0");
        for (variables, why) in [
            ("DMLC_ROLE=scheduler", "DMLC_ROLE=scheduler: a job needs no scheduler"),
            (&server, "DMLC_ROLE=server: a job with a single worker needs no servers"),
        ] {
            assert_eq!(idle(&Variables(&given(variables))).as_deref(), Some(why));
            assert_eq!(read(variables).unwrap_err().to_string(), why);
        }
        let forced = format!("{server} BYTEPS_FORCE_DISTRIBUTED=1");
        assert_eq!(idle(&Variables(&given(&forced))), None);
        assert_eq!(numbers(&place(&forced)), [1, 1, 0, 1, 3, 2]);
        assert_eq!(read("DMLC_NUM_WORKER=2"), Ok(None));
    }

    #[test]
    fn variables_that_disagree_are_named() {
        for (variables, says) in [
            ("DMLC_ROLE=master", "DMLC_ROLE=master: expected worker, server or scheduler"),
            ("DMLC_ROLE=worker", "DMLC_ROLE is set, but DMLC_NUM_WORKER is not"),
            ("DMLC_ROLE=worker DMLC_NUM_WORKER=0", "at least one worker"),
            ("DMLC_ROLE=worker DMLC_NUM_WORKER=x", "DMLC_NUM_WORKER=x: it must be a number"),
            ("DMLC_ROLE=worker DMLC_NUM_WORKER=2", "but DMLC_WORKER_ID is not"),
            ("DMLC_ROLE=worker DMLC_NUM_WORKER=2 DMLC_WORKER_ID=2", "less than DMLC_NUM_WORKER=2"),
            ("DMLC_ROLE=worker DMLC_NUM_WORKER=2 DMLC_WORKER_ID=0", "but DMLC_PS_ROOT_URI is not"),
            (
                "DMLC_ROLE=worker DMLC_NUM_WORKER=2 DMLC_WORKER_ID=0 DMLC_PS_ROOT_URI=a \
                 DMLC_PS_ROOT_PORT=65535",
                "DMLC_PS_ROOT_PORT=65535: it must be from 1 to 65534",
            ),
            (
                "DMLC_ROLE=server DMLC_NUM_WORKER=2 DMLC_NUM_SERVER=3",
                "DMLC_ROLE is set, but DMLC_SERVER_ID is not",
            ),
            ("DMLC_ROLE=server DMLC_NUM_WORKER=2", "DMLC_ROLE is set, but DMLC_SERVER_ID is not"),
            ("DMLC_ROLE=worker DMLC_NUM_WORKER=1 BYTEPS_LOCAL_SIZE=0", "at least one rank"),
            (
                "DMLC_ROLE=worker DMLC_NUM_WORKER=1048576 DMLC_WORKER_ID=0 BYTEPS_LOCAL_SIZE=2",
                "too many ranks",
            ),
        ] {
            let error = read(variables).unwrap_err().to_string();
            assert!(error.contains(says), "{variables}: {error}");
        }
    }

    #[test]
    fn ranks_follow_the_gpus_of_a_container() {
        let count = |variables: &str| {
            let machine = || Machine { gpus: 4, cores: 9 };
            ranks_of_worker(&Variables(&given(variables)), machine).unwrap()
        };
        assert_eq!(count(""), 1);
        assert_eq!(count("NVIDIA_VISIBLE_DEVICES=none"), 1);
        assert_eq!(count("NVIDIA_VISIBLE_DEVICES=all"), 4);
        assert_eq!(count("NVIDIA_VISIBLE_DEVICES=GPU-a,GPU-b,"), 2);
    }
}
