//! The place of a pod among the pods of a job on Kubernetes. A pod is a host, and starts its ranks
//! itself.
//!
//! The variables are those of torchrun's options (`PET_NNODES` is `--nnodes`), which the Trainer of
//! Kubeflow sets, and the number that Kubernetes gives a pod of an indexed job. So one manifest
//! serves both `torchrun train.py` and `gradwire join -- python train.py`.

use super::placement::{Placement, PlacementError, Variables};
use crate::machine::Machine;

const NODE: [&str; 2] = ["PET_NODE_RANK", "JOB_COMPLETION_INDEX"];
const NODES: &str = "PET_NNODES";
const RANKS: &str = "PET_NPROC_PER_NODE";
const MASTER: &str = "PET_MASTER_ADDR";
const MASTER_PORT: &str = "PET_MASTER_PORT";

/// The name of a job, and of a pod.
const KEYS: [&str; 2] = ["PET_RDZV_ID", "HOSTNAME"];

/// The port that the Trainer of Kubeflow chooses.
const DEFAULT_PORT: u16 = 29_400;

pub(super) const KUBERNETES: &str = "Kubernetes";

/// The place of a pod with these variables; `None` without those of a pod.
pub(super) fn of_pod(given: &Variables<'_>) -> Result<Option<Placement>, PlacementError> {
    let Some((name, text)) = given.first(&NODE) else { return Ok(None) };
    let number = |name: &str, text: &str| {
        text.parse().map_err(|_| PlacementError(format!("{name}={text}: it must be a number")))
    };
    let node: u32 = number(name, text)?;
    let Some(count) = given.get(NODES) else {
        return Err(PlacementError(format!(
            "{name}={text} is the number of this pod: set {NODES} to the number of pods, and let \
             each run: gradwire join -- PROGRAM"
        )));
    };
    let nodes: u32 = number(NODES, count)?;
    if node >= nodes {
        let what = format!("{name}={node}: it must be less than {NODES}={nodes}");
        return Err(PlacementError(what));
    }
    let slots = given.get(RANKS).map_or(Ok(1), |text| per_pod(text, Machine::here))?;
    let Some(size) = nodes.checked_mul(slots) else {
        let what = format!("{NODES}={nodes} and {RANKS}={slots}: too many ranks");
        return Err(PlacementError(what));
    };
    let port = match given.get(MASTER_PORT) {
        None => DEFAULT_PORT,
        Some(text) => {
            text.parse().ok().filter(|port| (1..u16::MAX).contains(port)).ok_or_else(|| {
                PlacementError(format!("{MASTER_PORT}={text}: it must be from 1 to 65534"))
            })?
        }
    };
    let keys = if nodes == 1 { &KEYS[..] } else { &KEYS[..1] };
    let alone = (nodes == 1).then_some("pod");
    Ok(Some(Placement {
        starter: KUBERNETES,
        key: given.first(keys).map(|(_, key)| key).or(alone).map(ToOwned::to_owned),
        rank: node * slots,
        size,
        local: 0,
        slots,
        node,
        nodes,
        servers: 0,
        hosts: Vec::new(),
        master: given.get(MASTER).map(|host| (host.to_owned(), port)),
        starts_ranks: true,
    }))
}

/// The number of ranks of a pod, in the words of torchrun.
fn per_pod(text: &str, machine: impl Fn() -> Machine) -> Result<u32, PlacementError> {
    let bad = |why: &str| PlacementError(format!("{RANKS}={text}: {why}"));
    match text {
        "cpu" => Ok(machine().cores),
        "auto" => Ok(machine().ranks()),
        "gpu" => match machine().gpus {
            0 => Err(bad("this pod has no GPU of NVIDIA")),
            gpus => Ok(gpus),
        },
        number => match number.parse() {
            Ok(0) | Err(_) => Err(bad("it must be a number from 1, or auto, gpu or cpu")),
            Ok(ranks) => Ok(ranks),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn read(variables: &str) -> Result<Option<Placement>, PlacementError> {
        let pairs = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap());
        let variables: HashMap<_, _> =
            pairs.map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
        of_pod(&Variables(&variables))
    }

    #[test]
    fn a_pod_starts_ranks_that_follow_each_other() {
        let trainer = "PET_NNODES=3 PET_NODE_RANK=2 PET_NPROC_PER_NODE=4 \
                       PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29500";
        let pod = read(&format!("{trainer} JOB_COMPLETION_INDEX=0 HOSTNAME=a")).unwrap().unwrap();
        let Placement { rank, size, local, slots, node, nodes, .. } = pod;
        assert_eq!([rank, size, local, slots, node, nodes], [8, 12, 0, 4, 2, 3]);
        assert_eq!(pod.master, Some(("job-node-0-0.job".to_owned(), 29_500)));
        assert!(pod.starts_ranks && pod.key.is_none(), "a pod's own name says nothing to others");
        let indexed = read("JOB_COMPLETION_INDEX=1 PET_NNODES=2 PET_MASTER_ADDR=a").unwrap();
        let indexed = indexed.unwrap();
        assert_eq!((indexed.rank, indexed.size, indexed.slots), (1, 2, 1));
        assert_eq!(indexed.master, Some(("a".to_owned(), DEFAULT_PORT)));
        let single = read("JOB_COMPLETION_INDEX=0 PET_NNODES=1 HOSTNAME=a").unwrap().unwrap();
        assert_eq!(single.key.as_deref(), Some("a"));
    }

    #[test]
    fn variables_that_disagree_are_named() {
        for (variables, says) in [
            (
                "JOB_COMPLETION_INDEX=1",
                "JOB_COMPLETION_INDEX=1 is the number of this pod: set PET_",
            ),
            ("JOB_COMPLETION_INDEX=x", "JOB_COMPLETION_INDEX=x: it must be a number"),
            ("PET_NODE_RANK=2 PET_NNODES=2", "PET_NODE_RANK=2: it must be less than PET_NNODES=2"),
            ("PET_NODE_RANK=0 PET_NNODES=1:4", "PET_NNODES=1:4: it must be a number"),
            ("PET_NODE_RANK=0 PET_NNODES=1 PET_NPROC_PER_NODE=0", "PET_NPROC_PER_NODE=0: it must"),
            ("PET_NODE_RANK=0 PET_NNODES=1 PET_MASTER_PORT=0", "PET_MASTER_PORT=0: it must be"),
            ("PET_NODE_RANK=0 PET_NNODES=65536 PET_NPROC_PER_NODE=65536", "too many ranks"),
        ] {
            let error = read(variables).unwrap_err().to_string();
            assert!(error.contains(says), "{variables}: {error}");
        }
    }

    #[test]
    fn ranks_per_pod_in_the_words_of_torchrun() {
        let count = |text, gpus| per_pod(text, || Machine { gpus, cores: 6 });
        assert_eq!(count("3", 2), Ok(3));
        assert_eq!(count("auto", 2), Ok(2));
        assert_eq!(count("auto", 0), Ok(6));
        assert_eq!(count("cpu", 2), Ok(6));
        assert_eq!(count("gpu", 2), Ok(2));
        let error = count("gpu", 0).unwrap_err().to_string();
        assert_eq!(error, "PET_NPROC_PER_NODE=gpu: this pod has no GPU of NVIDIA");
    }
}
