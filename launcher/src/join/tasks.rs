//! Which task of `srun`, or of `mpirun` (Open MPI, MPICH, Intel MPI), which host of BytePS or which
//! pod of Kubernetes a process is. The environment is an argument, so that reading it is pure.
//!
//! Gradwire numbers the ranks host by host. A launcher that deals its tasks out in turn
//! (`--distribution=cyclic`, `--map-by node`) is refused: its numbers would not be ours.

use std::collections::HashMap;

use super::{
    byteps, kubernetes,
    placement::{Placement, PlacementError, Variables},
};
use crate::slurm;

/// The variables of a launcher with the numbers of a task, and of its host.
struct Numbers {
    starter: &'static str,
    rank: &'static str,
    size: &'static str,
    local: &'static str,
    slots: &'static str,
    /// The first of these that is set is the key.
    keys: &'static [&'static str],
}

/// The launcher inside another one comes first: `mpirun` starts its helpers with `srun`.
const MPI: [Numbers; 2] = [
    Numbers {
        starter: "mpirun",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local: "OMPI_COMM_WORLD_LOCAL_RANK",
        slots: "OMPI_COMM_WORLD_LOCAL_SIZE",
        keys: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    },
    // Hydra, the launcher of MPICH, Intel MPI and MVAPICH. It has no name for the job.
    Numbers {
        starter: "mpiexec",
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local: "MPI_LOCALRANKID",
        slots: "MPI_LOCALNRANKS",
        keys: &[],
    },
];

/// The place of a process with these variables; `None` without the variables of a known launcher.
///
/// # Errors
/// [`PlacementError`] names the variables that are missing or disagree.
pub(super) fn find(
    variables: &HashMap<String, String>,
) -> Result<Option<Placement>, PlacementError> {
    let given = Variables(variables);
    let of_mpi = MPI.iter().find(|numbers| given.get(numbers.size).is_some());
    if let Some(numbers) = of_mpi
        // Slurm sets these, too, for a library of MPI.
        && (given.get(numbers.slots).is_some() || given.get("SLURM_PROCID").is_none())
    {
        return of_numbers(numbers, &given).map(Some);
    }
    match given.get("SLURM_PROCID") {
        Some(_) => of_slurm(&given).map(Some),
        None => match byteps::of_host(&given)? {
            Some(host) => Ok(Some(host)),
            None => kubernetes::of_pod(&given),
        },
    }
}

fn of_numbers(names: &Numbers, given: &Variables<'_>) -> Result<Placement, PlacementError> {
    let number = |name| given.number(&[name], names.starter);
    let (rank, size) = (number(names.rank)?, number(names.size)?);
    let (local, slots) = (number(names.local)?, number(names.slots)?);
    let disagree = |why: String| {
        let Numbers { rank: r, size: n, local: l, slots: s, .. } = names;
        PlacementError(format!("{r}={rank}, {n}={size}, {l}={local} and {s}={slots}: {why}"))
    };
    if rank >= size || local >= slots || slots > size {
        return Err(disagree("these contradict each other".to_owned()));
    }
    // On a single host, any order will do: Open MPI 5 numbers local ranks by their cores.
    let local = if slots == size { rank } else { local };
    if !size.is_multiple_of(slots) {
        // The numbers of a task don't say how many tasks other hosts have.
        let why = "hosts with different numbers of ranks; start the same number on each, or use \
                   gradwire run";
        return Err(disagree(why.to_owned()));
    }
    if rank < local || !(rank - local).is_multiple_of(slots) {
        let why = "the ranks of a host must follow each other, as with --map-by slot of Open MPI \
                   or -ppn of MPICH";
        return Err(disagree(why.to_owned()));
    }
    Ok(Placement {
        starter: names.starter,
        key: given.first(names.keys).map(|(_, key)| key.to_owned()),
        rank,
        size,
        local,
        slots,
        node: (rank - local) / slots,
        nodes: size / slots,
        servers: 0,
        hosts: Vec::new(),
        master: None,
        starts_ranks: false,
    })
}

const DEAL: &str = "the ranks of a host must follow each other, as with --distribution=block";

fn of_slurm(given: &Variables<'_>) -> Result<Placement, PlacementError> {
    let number = |names: &[&'static str]| given.number(names, "srun");
    let rank = number(&["SLURM_PROCID"])?;
    let size = number(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])?;
    let local = number(&["SLURM_LOCALID"])?;
    let node = number(&["SLURM_NODEID"])?;
    let text = |names: &[&'static str]| {
        given.first(names).ok_or_else(|| PlacementError(format!("srun has not set {}", names[0])))
    };
    let (tasks_name, tasks) = text(&["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"])?;
    let slots = slurm::tasks(tasks)
        .ok_or_else(|| PlacementError(format!("{tasks_name}={tasks}: expected such as 4(x2),3")))?;
    let (hosts_name, list) = text(&["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"])?;
    let hosts = slurm::hosts(list)
        .ok_or_else(|| PlacementError(format!("{hosts_name}={list}: expected such as n[1-3,7]")))?;
    let sum = slots.iter().try_fold(0_u32, |sum, slots| sum.checked_add(*slots));
    let Some(here) = slots.get(node as usize).copied().filter(|_| sum == Some(size)) else {
        let what = format!(
            "{tasks_name}={tasks}, SLURM_NODEID={node} and {size} tasks contradict each other"
        );
        return Err(PlacementError(what));
    };
    if hosts.len() != slots.len() {
        let what = format!("{hosts_name}={list} and {tasks_name}={tasks} have different lengths");
        return Err(PlacementError(what));
    }
    if let Some(how) = given.get("SLURM_DISTRIBUTION")
        && !matches!(how.split([':', ',']).next(), Some("block" | "*"))
        && slots.len() > 1
        && slots.iter().any(|slots| *slots > 1)
    {
        return Err(PlacementError(format!("SLURM_DISTRIBUTION={how}: {DEAL}")));
    }
    let first: u32 = slots[..node as usize].iter().sum();
    if local >= here || first + local != rank {
        let what =
            format!("SLURM_PROCID={rank}, SLURM_NODEID={node} and SLURM_LOCALID={local}: {DEAL}");
        return Err(PlacementError(what));
    }
    // Several clusters may share a host.
    let parts = ["SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"];
    let parts = parts.map(|name| given.get(name).unwrap_or("0"));
    Ok(Placement {
        starter: "srun",
        key: Some(parts.join(".")),
        rank,
        size,
        local,
        slots: here,
        node,
        nodes: slots.len() as u32,
        servers: 0,
        hosts,
        master: None,
        starts_ranks: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &str) -> Result<Option<Placement>, PlacementError> {
        let pairs = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap());
        find(&pairs.map(|(name, text)| (name.to_owned(), text.to_owned())).collect())
    }

    fn numbers(placement: &Placement) -> [u32; 6] {
        let Placement { rank, size, local, slots, node, nodes, .. } = *placement;
        [rank, size, local, slots, node, nodes]
    }

    #[test]
    fn every_launcher_says_where_a_task_is() {
        let slurm = "SLURM_CLUSTER_NAME=c SLURM_JOB_ID=7 SLURM_STEP_ID=2 \
                     SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=5 \
                     SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=3,2 \
                     SLURM_STEP_NODELIST=n[1-2]";
        let ompi = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                    OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=prterun-a-12@1 PMIX_RANK=3";
        let hydra = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
        for (variables, starter, key, expected) in [
            (slurm.to_owned(), "srun", Some("c.7.2.0"), [3, 5, 0, 2, 1, 2]),
            (format!("{slurm} PMI_RANK=3 PMI_SIZE=5"), "srun", Some("c.7.2.0"), [3, 5, 0, 2, 1, 2]),
            (ompi.to_owned(), "mpirun", Some("prterun-a-12@1"), [3, 4, 1, 2, 1, 2]),
            (format!("{slurm} {ompi}"), "mpirun", Some("prterun-a-12@1"), [3, 4, 1, 2, 1, 2]),
            (hydra.to_owned(), "mpiexec", None, [1, 2, 1, 2, 0, 1]),
            // Open MPI 5 on one host: rank 1 is the third process there.
            (
                ompi.replace("RANK=3", "RANK=1")
                    .replace("SIZE=2", "SIZE=4")
                    .replace("L_RANK=1", "L_RANK=2"),
                "mpirun",
                Some("prterun-a-12@1"),
                [1, 4, 1, 4, 0, 1],
            ),
        ] {
            let found = read(&variables).unwrap().unwrap();
            assert_eq!((found.starter, found.key.as_deref()), (starter, key), "{variables}");
            assert_eq!(numbers(&found), expected, "{variables}");
        }
        assert_eq!(read(slurm).unwrap().unwrap().hosts, ["n1", "n2"]);
        assert_eq!(read("HOME=/root RANK=0 WORLD_SIZE=4"), Ok(None));
        let host = read("DMLC_ROLE=worker DMLC_NUM_WORKER=1 JOB_COMPLETION_INDEX=0");
        assert_eq!(host.unwrap().unwrap().starter, "bpslaunch", "in a pod");
        let pod = "JOB_COMPLETION_INDEX=0 PET_NNODES=2";
        assert!(read(pod).unwrap().unwrap().starts_ranks);
        assert!(!read(&format!("{pod} {hydra}")).unwrap().unwrap().starts_ranks, "mpirun in a pod");
    }

    #[test]
    fn variables_that_disagree_are_named() {
        let slurm = |rank: u32, local: u32, tasks: &str, list: &str| {
            format!(
                "SLURM_PROCID={rank} SLURM_NTASKS=4 SLURM_LOCALID={local} SLURM_NODEID=1 \
                 SLURM_TASKS_PER_NODE={tasks} SLURM_JOB_NODELIST={list}"
            )
        };
        let ompi = |rank: u32, size: u32, local: u32, slots: u32| {
            format!(
                "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE={size} \
                 OMPI_COMM_WORLD_LOCAL_RANK={local} OMPI_COMM_WORLD_LOCAL_SIZE={slots}"
            )
        };
        for (variables, says) in [
            ("SLURM_PROCID=1".to_owned(), "srun has not set SLURM_STEP_NUM_TASKS"),
            (slurm(2, 0, "2(x2)", "a[1-"), "SLURM_JOB_NODELIST=a[1-: expected"),
            (slurm(2, 0, "2(x2)", "a1"), "different lengths"),
            (slurm(2, 0, "2,x", "a[1-2]"), "SLURM_TASKS_PER_NODE=2,x: expected"),
            (slurm(2, 0, "2(x3)", "a[1-3]"), "and 4 tasks contradict"),
            (slurm(2, 0, "4", "a1"), "SLURM_NODEID=1 and 4 tasks contradict"),
            (slurm(1, 0, "2(x2)", "a[1-2]"), "--distribution=block"),
            (
                format!("{} SLURM_DISTRIBUTION=cyclic:block", slurm(2, 0, "2(x2)", "a[1-2]")),
                "SLURM_DISTRIBUTION=cyclic:block: the ranks of a host must follow",
            ),
            (ompi(4, 4, 0, 2), "OMPI_COMM_WORLD_RANK=4, OMPI_COMM_WORLD_SIZE=4"),
            (ompi(0, 3, 0, 2), "different numbers of ranks"),
            (ompi(1, 4, 0, 2), "--map-by slot"),
            ("OMPI_COMM_WORLD_SIZE=2".to_owned(), "mpirun has not set OMPI_COMM_WORLD_RANK"),
            ("PMI_SIZE=2 PMI_RANK=0".to_owned(), "mpiexec has not set MPI_LOCALRANKID"),
            ("PMI_SIZE=2 PMI_RANK=x".to_owned(), "PMI_RANK=x: it must be a number"),
        ] {
            let error = read(&variables).unwrap_err().to_string();
            assert!(error.contains(says), "{variables}: {error}");
        }
    }
}
