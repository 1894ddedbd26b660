//! What a task knows from its variables, and from what the user gives: the job and its place in it.

use std::collections::HashMap;

use gradwire_proto::{JobId, Secret};
use gradwire_settings::{Loaded, Origin, RankSettings, Settings};
use procfs::process::Process;

use super::{
    byteps::{self, BPSLAUNCH},
    given::{self, RENDEZVOUS, Rendezvous},
    kubernetes::KUBERNETES,
    meeting::Place,
    placement::Placement,
    tasks,
};
use crate::error::CommandError;

/// The exit code if the launcher of the task is unknown.
pub const UNKNOWN_LAUNCHER: u8 = 3;

/// Launchers of MPI that give the job no name. All tasks of a host descend from one such process.
const ANCESTORS: [&str; 4] = ["hydra_pmi_proxy", "hydra_bstrap_pr", "pmi_proxy", "mpiexec.hydra"];

const SECRET_OF_HOSTS: &str = "once, in a folder that all hosts share: gradwire secret \
                               ~/.gradwire-secret; and in the script that starts the job: export \
                               GRADWIRE_SECRET_FILE=~/.gradwire-secret";

const SECRET_OF_PODS: &str = "once: kubectl create secret generic gradwire \
                              --from-literal=secret=$(gradwire secret); mount it in all pods, and \
                              set GRADWIRE_SECRET_FILE to its path there";

/// What the tasks of this host know.
#[derive(Debug)]
pub struct Join<'a> {
    pub(super) placement: Placement,
    pub(super) settings: &'a Settings,
    /// The variables of settings of the file that the ranks read.
    pub(super) of_ranks: Vec<(String, String)>,
    pub(super) environment: &'a HashMap<String, String>,
    /// The task of this process.
    pub(super) pid: u32,
    /// How many jobs the task has been in.
    pub(super) session: u32,
    pub(super) job: JobId,
    /// If there are several hosts: where the coordinator is to be.
    pub(super) rendezvous: Option<Rendezvous>,
    /// The port for the store of PyTorch, on the host of rank 0.
    master_port: u16,
    pub(super) secret: Option<Secret>,
}

impl<'a> Join<'a> {
    /// Finds out which rank the task with process id `pid` is. In a pod it must be this process
    /// ([`Self::starts_ranks`]). `session` is the number of jobs that the task has been in.
    ///
    /// # Errors
    /// [`CommandError`] if the variables don't say it, or several hosts lack a secret or a
    /// rendezvous.
    pub fn new(
        loaded: &'a Loaded,
        environment: &'a HashMap<String, String>,
        pid: u32,
        session: u32,
    ) -> Result<Self, CommandError> {
        let found = tasks::find(environment).map_err(|error| {
            let hint = "start the job once, with gradwire run; or set GRADWIRE_ALONE=1 if each \
                        process is to train alone";
            CommandError::usage(error).hint(hint)
        })?;
        let Some(placement) = found else {
            let what = "no variables of srun, mpirun, Kubernetes or BytePS say which rank this \
                        process is";
            let hint = "start the job with gradwire run, or under srun or mpirun";
            let error = CommandError::usage(what).hint(hint);
            return Err(CommandError { code: UNKNOWN_LAUNCHER, ..error });
        };
        if placement.starts_ranks && pid != std::process::id() {
            let here = if placement.starter == BPSLAUNCH { "host of BytePS" } else { "pod" };
            let what = format!(
                "a process on a {here} can't make itself a rank: what starts the ranks of a {here} \
                 must outlive them"
            );
            let hint = format!("let the {here} run: gradwire join -- PROGRAM");
            return Err(CommandError::usage(what).hint(hint));
        }
        let (given, secret) = (given::rendezvous(environment)?, given::secret(environment)?);
        let named = || placement.master.clone().map(|(host, port)| Rendezvous { host, port });
        let given = given.or_else(named);
        let by_rendezvous =
            || given.as_ref().map(|Rendezvous { host, port }| format!("{host}:{port}"));
        let found = match &placement.key {
            Some(_) => Some(String::new()),
            // Several jobs of one host may have the same rendezvous, because none of them uses it.
            None if placement.nodes == 1 => ancestor(pid).or_else(by_rendezvous),
            // Without a key, several hosts have only the rendezvous in common.
            None => by_rendezvous().or_else(|| ancestor(pid)),
        };
        let meeting = found.ok_or_else(|| {
            let what =
                format!("{} does not say to which job this process belongs", placement.starter);
            CommandError::usage(what).hint(format!(
                "set {RENDEZVOUS}=HOST:PORT, with the host of rank 0 and a free port"
            ))
        })?;
        let (job, port) = placement.job(&meeting, session);
        let rendezvous = match given {
            _ if placement.nodes == 1 => None,
            Some(given) => Some(given),
            None => Some(default_rendezvous(&placement, port)?),
        };
        let master_port = rendezvous.as_ref().map_or(port, |at| at.port) + 1;
        if rendezvous.is_some() && secret.is_none() {
            let what = format!(
                "the {} ranks are on {} hosts, which needs a secret: with it they prove that they \
                 belong to one job",
                placement.size, placement.nodes
            );
            let hint =
                if placement.starter == KUBERNETES { SECRET_OF_PODS } else { SECRET_OF_HOSTS };
            return Err(CommandError::usage(what).hint(hint));
        }
        // Each task has its environment, but does not read the file.
        let of_ranks = loaded.variables_of(|row| {
            matches!(row.origin, Origin::File(_)) && RankSettings::has(row.key.name)
        });
        Ok(Self {
            placement,
            settings: &loaded.settings,
            of_ranks: of_ranks.collect(),
            environment,
            pid,
            session,
            job,
            rendezvous,
            master_port,
            secret,
        })
    }

    /// Whether this process is to start the ranks of its host ([`Self::run_ranks`]).
    pub fn starts_ranks(&self) -> bool {
        self.placement.starts_ranks
    }

    /// The variables with which this rank attaches: its numbers, and the `job` as lines.
    pub(super) fn attaching(&self, job: &str, place: &Placement) -> Vec<(String, String)> {
        let pairs = job.lines().filter_map(|line| line.split_once('='));
        let own = [
            ("GRADWIRE_LOCAL_RANK", place.local),
            ("GRADWIRE_RANK", place.rank),
            ("GRADWIRE_SIZE", place.size),
            ("GRADWIRE_LOCAL_SIZE", place.slots),
        ];
        let own = own.map(|(name, number)| (name.to_owned(), number.to_string()));
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).chain(own).collect()
    }

    /// The variables that other programs read: those of Horovod's launcher and of torchrun.
    pub fn for_programs(&self) -> Vec<(String, String)> {
        self.for_programs_at(&self.placement)
    }

    pub(super) fn for_programs_at(&self, place: &Placement) -> Vec<(String, String)> {
        let Placement { rank, size, local, slots, node, nodes, .. } = *place;
        let master = self.rendezvous.as_ref().map_or("127.0.0.1", |at| &at.host);
        let numbers = [
            ("HOROVOD_RANK", rank),
            ("HOROVOD_SIZE", size),
            ("HOROVOD_LOCAL_RANK", local),
            ("HOROVOD_LOCAL_SIZE", slots),
            ("HOROVOD_CROSS_RANK", node),
            ("HOROVOD_CROSS_SIZE", nodes),
            ("RANK", rank),
            ("WORLD_SIZE", size),
            ("LOCAL_RANK", local),
            ("LOCAL_WORLD_SIZE", slots),
            ("GROUP_RANK", node),
            ("NODE_RANK", node),
            ("GROUP_WORLD_SIZE", nodes),
            ("MASTER_PORT", u32::from(self.master_port)),
        ];
        let mut all = numbers.map(|(name, number)| (name.to_owned(), number.to_string())).to_vec();
        all.push(("MASTER_ADDR".to_owned(), master.to_owned()));
        if place.starter == BPSLAUNCH {
            let own = [(byteps::LOCAL_RANK, local), (byteps::RANKS, slots)];
            all.extend(own.map(|(name, number)| (name.to_owned(), number.to_string())));
        }
        all
    }

    /// Where the tasks of this host meet.
    pub(super) fn place(&self) -> Place {
        Place { job: self.job.clone(), node: self.placement.node }
    }
}

/// The first host that Slurm names, and a port that follows from the numbers of job and step.
fn default_rendezvous(placement: &Placement, port: u16) -> Result<Rendezvous, CommandError> {
    match placement.hosts.first() {
        Some(host) => Ok(Rendezvous { host: host.clone(), port }),
        None => Err(CommandError::usage(format!(
            "the ranks are on {} hosts, and {} does not say where rank 0 is",
            placement.nodes, placement.starter
        ))
        .hint(format!("set {RENDEZVOUS}=HOST:PORT, with the host of rank 0 and a free port"))),
    }
}

/// What the tasks of a host have in common under a launcher that gives the job no name: the process
/// of the launcher from which all of them descend.
fn ancestor(pid: u32) -> Option<String> {
    let mut at = i32::try_from(pid).ok()?;
    while at > 1 {
        let stat = Process::new(at).and_then(|process| process.stat()).ok()?;
        if ANCESTORS.contains(&stat.comm.as_str()) {
            return Some(format!("{} {}", stat.pid, stat.starttime));
        }
        at = stat.ppid;
    }
    None
}

#[cfg(test)]
mod tests {
    use gradwire_settings::Layers;

    use super::*;

    fn joined(variables: &str) -> Result<(String, Option<Rendezvous>), CommandError> {
        let pairs = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap());
        let environment: HashMap<String, String> =
            pairs.map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
        let loaded = Settings::load(&Layers::default()).unwrap();
        let join = Join::new(&loaded, &environment, std::process::id(), 0)?;
        Ok((join.job.to_string(), join.rendezvous))
    }

    #[test]
    fn several_hosts_need_a_secret_and_a_place() {
        let secret = format!("GRADWIRE_SECRET={}", "ab".repeat(32));
        let slurm = "SLURM_JOB_ID=7 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID=1 \
                     SLURM_TASKS_PER_NODE=1(x2) SLURM_JOB_NODELIST=n[1-2]";
        let ompi = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 \
                    OMPI_COMM_WORLD_LOCAL_SIZE=1 PMIX_NAMESPACE=a";
        let text = |variables: &str| joined(variables).unwrap_err().to_string();
        let error = text(slurm);
        assert!(error.contains("2 ranks are on 2 hosts, which needs a secret"), "{error}");
        assert!(error.contains("GRADWIRE_SECRET_FILE="), "{error}");
        let (job, first) = joined(&format!("{slurm} {secret}")).unwrap();
        assert_eq!(first.unwrap().host, "n1");
        let later = slurm.replace("JOB_ID=7", "JOB_ID=8");
        assert_ne!(joined(&format!("{later} {secret}")).unwrap().0, job);
        let error = text(&format!("{ompi} {secret}"));
        assert!(error.contains("GRADWIRE_RENDEZVOUS=HOST:PORT"), "{error}");
        let given = format!("{ompi} {secret} GRADWIRE_RENDEZVOUS=n5:77");
        let expected = Rendezvous { host: "n5".to_owned(), port: 77 };
        assert_eq!(joined(&given).unwrap().1, Some(expected));
        let one = ompi.replace("LOCAL_SIZE=1", "LOCAL_SIZE=2").replace("RANK=0", "RANK=1");
        assert_eq!(joined(&one).unwrap().1, None);
        let nameless = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
        let error = text(nameless);
        assert!(error.contains("does not say to which job"), "{error}");
        let unknown = joined("HOME=/root").unwrap_err();
        assert_eq!(unknown.code, UNKNOWN_LAUNCHER);
    }
}
