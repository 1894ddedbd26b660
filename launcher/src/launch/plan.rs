//! What runs where: assigns ranks to hosts, and gives each process its environment. Pure.

use std::{collections::BTreeMap, net::IpAddr, net::SocketAddr, path::PathBuf, time::Duration};

use gradwire_proto::{Rank, Secret};
use gradwire_services::launch::HERE;
use gradwire_services::launch::{REPORTS_ARE_READ, Text};
use gradwire_settings::{Loaded, RankSettings, Settings};

pub use super::hosts::count;
use super::{elastic::Elastic, files::error_file, hosts::Host};
use crate::{error::CommandError, outer::ERROR_FILE};

/// The variable of the setting `elastic.timeout_ms`.
const ELASTIC_TIMEOUT: &str = "GRADWIRE_ELASTIC__TIMEOUT_MS";

/// How much longer a rank waits for the next epoch than the launcher.
const PATIENCE: Duration = Duration::from_secs(10);

/// The longest wait that the setting allows.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// Environment variables of one process.
pub type Variables = BTreeMap<String, String>;

/// A host with its ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// The host, as the user gave it.
    pub host: String,
    /// The number of its agent, which is never given to another agent of the job. As long as no
    /// host comes or goes, it is the position of the node.
    pub agent: usize,
    /// Its first rank; the others follow.
    pub first_rank: u32,
    /// The workers whose ranks these are, in their order; none for a server. In the first epoch,
    /// the id of a worker is its rank.
    pub workers: Vec<u32>,
    /// How many of them were in an earlier epoch: the first ones.
    pub survivors: u32,
    /// The label of its rack, instead of the setting `node.rack`; empty to use the setting.
    pub rack: String,
    /// The rate of its line, instead of the setting `node.line_mbit`.
    pub line_mbit: Option<u32>,
    /// The network that carries its data, instead of the setting `data.interface`.
    pub interface: Option<String>,
}

impl Node {
    /// How many ranks it runs; none for a server.
    pub fn ranks(&self) -> u32 {
        u32::try_from(self.workers.len()).unwrap_or(u32::MAX)
    }
}

/// A job before anything is started. An elastic job changes `epoch` and `nodes` later.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The job's id.
    pub job: String,
    /// The secret by which its processes authenticate.
    pub secret: Secret,
    /// The number of the formation of the world; from 1.
    pub epoch: u64,
    /// The hosts with ranks, in order, and then the servers.
    pub nodes: Vec<Node>,
    /// How the membership may change; `None` if it is fixed.
    pub elastic: Option<Elastic>,
    /// The program of each rank; [`ITSELF`](gradwire_services::launch::ITSELF) for `gradwire`.
    pub program: Text,
    /// Its arguments.
    pub args: Vec<Text>,
    /// The settings that are set explicitly, for the services.
    pub service_settings: Variables,
    /// All `worker.*` and `elastic.*` settings, for the ranks.
    pub worker_settings: Variables,
    /// The variables that the user sets for the ranks. They replace those that ranks get otherwise.
    pub exported: Variables,
    /// What is recorded.
    pub record: Option<Record>,
    /// The folder of `--output-dir`; absolute.
    pub output_dir: Option<PathBuf>,
}

/// Ranks whose results are recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The folder, on each host; absolute.
    pub folder: String,
    /// The first and the last rank of each range.
    pub ranks: Vec<(u32, u32)>,
    /// The most bytes of the record of a rank.
    pub bytes: u64,
}

impl Record {
    /// The variables of a rank, as in worker-lib/src/launch.rs.
    fn variables(&self, rank: u32) -> Variables {
        if !self.ranks.iter().any(|(first, last)| (*first..=*last).contains(&rank)) {
            return Variables::new();
        }
        variables([
            ("GRADWIRE_RECORD", format!("{}/rank.{rank}", self.folder)),
            ("GRADWIRE_RECORD_BYTES", self.bytes.to_string()),
        ])
    }
}

/// Facts that are known only once the daemons serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// The address of each node by which the others reach it.
    pub addresses: Vec<IpAddr>,
    /// A port that was free on the first node.
    pub master_port: u16,
    /// Where each node's daemon serves its metrics.
    pub daemon_metrics: Vec<String>,
}

impl Plan {
    /// Fills hosts in order until `np` ranks have a slot. Without `np`, all slots are used; without
    /// hosts with slots, all ranks run here. Hosts without a rank are dropped, except servers,
    /// which come last.
    ///
    /// # Errors
    /// [`CommandError`] if there are more ranks than slots.
    pub fn nodes(hosts: &[Host], np: Option<u32>) -> Result<Vec<Node>, CommandError> {
        let here = [Host::new("localhost", np.unwrap_or(1))];
        let (servers, mut hosts): (Vec<&Host>, Vec<&Host>) =
            hosts.iter().partition(|host| host.slots == 0);
        if hosts.is_empty() {
            hosts.extend(&here);
        }
        let slots: u64 = hosts.iter().map(|host| u64::from(host.slots)).sum();
        let np = np.map_or(slots, u64::from);
        if np > slots {
            let list: Vec<_> = hosts.iter().take(8).map(ToString::to_string).collect();
            let more = if hosts.len() > 8 { ", …" } else { "" };
            return Err(CommandError::usage(format!(
                "-np {np} is more than the {slots} slots of the given hosts ({}{more})",
                list.join(",")
            ))
            .hint("add hosts, or give the hosts more slots"));
        }
        if np > u64::from(Rank::MAX) {
            let what = format!("{np} ranks are more than the maximum of {}", Rank::MAX);
            return Err(CommandError::usage(what).hint("start fewer ranks with -np"));
        }
        let node = |(agent, (host, first_rank, ranks)): (usize, (&Host, u32, u32))| {
            let Host { name: host, rack, line_mbit, interface, .. } = host.clone();
            let (workers, survivors) = ((first_rank..first_rank + ranks).collect(), 0);
            Node { host, agent, first_rank, workers, survivors, rack, line_mbit, interface }
        };
        let (mut nodes, mut next) = (Vec::new(), 0);
        for host in &hosts {
            let left = u32::try_from(np).unwrap_or(Rank::MAX) - next;
            let ranks = host.slots.min(left);
            if ranks == 0 {
                break;
            }
            nodes.push((*host, next, ranks));
            next += ranks;
        }
        nodes.extend(servers.into_iter().map(|server| (server, next, 0)));
        Ok(nodes.into_iter().enumerate().map(node).collect())
    }

    /// Checks that the settings fit these nodes.
    ///
    /// # Errors
    /// [`CommandError`] if a setting does not fit the number of nodes.
    pub fn check(nodes: &[Node], settings: &Settings) -> Result<(), CommandError> {
        let rules = &settings.negotiation.algorithm.0;
        let with_ranks = nodes.iter().filter(|node| node.ranks() > 0).count();
        rules.fits(with_ranks as u32).map_err(|error| {
            CommandError::usage(format!("setting negotiation.algorithm = \"{rules}\": {error}"))
        })
    }

    /// A job with a new id and a new secret.
    ///
    /// # Errors
    /// As [`Plan::check`].
    pub fn new(
        nodes: Vec<Node>,
        program: impl Into<Text>,
        args: impl IntoIterator<Item = impl Into<Text>>,
        settings: &Loaded,
    ) -> Result<Self, CommandError> {
        Self::check(&nodes, &settings.settings)?;
        let id: String =
            gradwire_proto::auth::nonce()[..6].iter().map(|b| format!("{b:02x}")).collect();
        let of_ranks = settings.variables_of(|row| RankSettings::has(row.key.name));
        Ok(Self {
            job: format!("gw{id}"),
            secret: Secret::generate(),
            epoch: 1,
            nodes,
            elastic: None,
            program: program.into(),
            args: args.into_iter().map(Into::into).collect(),
            service_settings: settings.variables().collect(),
            worker_settings: of_ranks.collect(),
            exported: Variables::new(),
            record: None,
            output_dir: None,
        })
    }

    /// How many hosts have no ranks.
    pub fn servers(&self) -> usize {
        self.nodes.iter().filter(|node| node.ranks() == 0).count()
    }

    /// How many ranks there are.
    pub fn size(&self) -> u32 {
        self.nodes.iter().map(Node::ranks).sum()
    }

    /// The agents of all ranks and the ids of their workers, in the order of ranks.
    pub fn members(&self) -> impl Iterator<Item = (usize, u32)> {
        self.nodes.iter().flat_map(|node| node.workers.iter().map(|worker| (node.agent, *worker)))
    }

    /// The Unix socket of the daemon beside an agent; abstract, so that it vanishes with the daemon
    /// (CLEAN). It stays the same in later epochs.
    pub fn socket(&self, agent: usize) -> String {
        format!("@gradwire-{}-{agent}", self.job)
    }

    fn job_variables(&self) -> Variables {
        variables([("GRADWIRE_JOB", self.job.clone()), ("GRADWIRE_SECRET", self.secret.to_hex())])
    }

    /// The environment of a node's daemon, which hosts the coordinator if `coordinator` is `None`.
    pub fn daemon_variables(
        &self,
        node: usize,
        address: IpAddr,
        coordinator: Option<SocketAddr>,
    ) -> Variables {
        let here = &self.nodes[node];
        let mut all = self.service_settings.clone();
        all.extend(self.job_variables());
        let mut add = |name: &str, value: String| all.insert(name.to_owned(), value);
        add("GRADWIRE_HOST", here.host.clone());
        add("GRADWIRE_ADDRESS", address.to_string());
        add("GRADWIRE_SLOTS", here.ranks().to_string());
        add("GRADWIRE_ORDER", node.to_string());
        add("GRADWIRE_SOCKET", self.socket(here.agent));
        add(REPORTS_ARE_READ, "1".to_owned());
        if !here.rack.is_empty() {
            add("GRADWIRE_NODE__RACK", here.rack.clone());
        }
        if let Some(interface) = &here.interface {
            add("GRADWIRE_DATA__INTERFACE", interface.clone());
        }
        if let Some(rate) = here.line_mbit {
            add("GRADWIRE_NODE__LINE_MBIT", rate.to_string());
        }
        add("GRADWIRE_COORDINATOR", coordinator.map_or(HERE.to_owned(), |at| at.to_string()));
        if coordinator.is_none() {
            add("GRADWIRE_NODES", self.nodes.len().to_string());
            add("GRADWIRE_SERVERS", self.servers().to_string());
            add("GRADWIRE_RANKS", self.size().to_string());
        }
        if self.elastic.is_some() {
            let workers: Vec<_> = here.workers.iter().map(ToString::to_string).collect();
            add("GRADWIRE_ELASTIC", "1".to_owned());
            add("GRADWIRE_EPOCH", self.epoch.to_string());
            add("GRADWIRE_WORKERS", workers.join(","));
            add("GRADWIRE_SURVIVORS", here.survivors.to_string());
        }
        all
    }

    /// The environment of a training process that starts while the job runs. It learns its rank and
    /// the size of the world when it attaches.
    pub fn newcomer_variables(&self, agent: usize, host: &str, worker: u32) -> Variables {
        let mut all = self.worker_variables(agent, host, worker);
        // A spare may wait for as long as the job runs.
        if self.elastic.is_some() {
            all.insert(ELASTIC_TIMEOUT.to_owned(), LONGEST_WAIT.as_millis().to_string());
        }
        all.extend(self.exported.clone());
        all
    }

    /// What every training process gets on a host.
    fn worker_variables(&self, agent: usize, host: &str, worker: u32) -> Variables {
        let mut all = self.worker_settings.clone();
        all.extend(self.job_variables());
        all.extend(variables([
            ("GRADWIRE_SOCKET", self.socket(agent)),
            ("GRADWIRE_HOST", host.to_owned()),
            ("HOROVOD_HOSTNAME", host.to_owned()),
        ]));
        if let Some(elastic) = &self.elastic {
            // The launcher gives up first, and says why (TELL).
            let wait = (elastic.timeout + PATIENCE).min(LONGEST_WAIT);
            all.extend(variables([
                ("GRADWIRE_ELASTIC", "1".to_owned()),
                ("GRADWIRE_WORKER", worker.to_string()),
                (ELASTIC_TIMEOUT, wait.as_millis().to_string()),
            ]));
        }
        all
    }

    /// The environment of a rank of the first epoch.
    pub fn rank_variables(&self, node: usize, rank: u32, places: &Places) -> Variables {
        let here = &self.nodes[node];
        let local = rank - here.first_rank;
        // The ranks with this local rank on all nodes: Horovod's cross communicator.
        let across = self.nodes.iter().filter(|n| n.ranks() > local).count();
        let before = self.nodes[..node].iter().filter(|n| n.ranks() > local).count();
        let has_ranks = |node: &&Node| node.ranks() > 0;
        let group = self.nodes[..node].iter().filter(has_ranks).count().to_string();
        let mut all = self.worker_variables(here.agent, &here.host, rank);
        // Also with Horovod's names, for scripts that read them.
        for (name, value) in variables([
            ("RANK", rank.to_string()),
            ("SIZE", self.size().to_string()),
            ("LOCAL_RANK", local.to_string()),
            ("LOCAL_SIZE", here.ranks().to_string()),
            ("CROSS_RANK", before.to_string()),
            ("CROSS_SIZE", across.to_string()),
        ]) {
            all.insert(format!("GRADWIRE_{name}"), value.clone());
            all.insert(format!("HOROVOD_{name}"), value);
        }
        all.extend(variables([
            ("GRADWIRE_DAEMON_METRICS", places.daemon_metrics[node].clone()),
            ("GRADWIRE_COORDINATOR_METRICS", places.daemon_metrics[0].clone()),
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", self.size().to_string()),
            ("LOCAL_RANK", local.to_string()),
            ("LOCAL_WORLD_SIZE", here.ranks().to_string()),
            ("GROUP_RANK", group.clone()),
            ("NODE_RANK", group),
            ("GROUP_WORLD_SIZE", self.nodes.iter().filter(has_ranks).count().to_string()),
            ("MASTER_ADDR", places.addresses[0].to_string()),
            ("MASTER_PORT", places.master_port.to_string()),
            // Trainers take ranks with these for those of torchrun, which they need not start.
            ("TORCHELASTIC_RUN_ID", self.job.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", "0".to_owned()),
        ]));
        if let Some(folder) = &self.output_dir {
            let file = error_file(folder, self.size(), rank);
            all.extend(file.to_str().map(|file| (ERROR_FILE.to_owned(), file.to_owned())));
        }
        all.extend(self.record.iter().flat_map(|record| record.variables(rank)));
        all.extend(self.exported.clone());
        all
    }
}

fn variables<const N: usize>(pairs: [(&str, String); N]) -> Variables {
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Variables that describe one machine or one login, and are not forwarded.
const STAY: &[&str] = &[
    "_",
    "DBUS_SESSION_BUS_ADDRESS",
    "DISPLAY",
    "HOME",
    "HOSTNAME",
    "LOGNAME",
    "MAIL",
    "OLDPWD",
    "PWD",
    "SHELL",
    "SHLVL",
    "TERM",
    "TMPDIR",
    "TTY",
    "USER",
    "WAYLAND_DISPLAY",
];

/// The part of the launcher's environment that a remote rank gets: all except what describes this
/// machine or login, and except settings and job variables, which each process gets anyway.
pub fn forwarded(environment: &std::collections::HashMap<String, String>) -> Variables {
    let stays = |name: &str| {
        STAY.contains(&name)
            || ["GRADWIRE_", "SSH_", "XDG_", "LC_"].iter().any(|prefix| name.starts_with(prefix))
    };
    let forwarded = environment.iter().filter(|(name, _)| !stays(name));
    forwarded.map(|(name, value)| (name.clone(), value.clone())).collect()
}

#[cfg(test)]
mod tests {
    use gradwire_settings::{Layers, Settings};
    use proptest::prelude::*;

    use super::*;
    use crate::launch::hosts::{parse_file, parse_list};

    fn plan(hosts: &str, np: Option<u32>) -> Plan {
        let nodes = Plan::nodes(&parse_list(hosts).unwrap(), np).unwrap();
        let flags = ["data.lanes=3", "worker.spin_us=7", "checks.finite=warn"];
        let layers = Layers { flags: flags.map(str::to_owned).to_vec(), ..Layers::default() };
        Plan::new(nodes, "train", Vec::<Text>::new(), &Settings::load(&layers).unwrap()).unwrap()
    }

    fn settings() -> Loaded {
        Settings::load(&Layers::default()).unwrap()
    }

    fn places(nodes: usize) -> Places {
        Places {
            addresses: (0..nodes).map(|i| IpAddr::from([10, 0, 0, 1 + i as u8])).collect(),
            master_port: 4321,
            daemon_metrics: (0..nodes).map(|i| format!("127.0.0.1:{i}")).collect(),
        }
    }

    #[test]
    fn hosts_are_filled_in_order() {
        let nodes = plan("a:2,b:4,c:2", Some(3)).nodes;
        assert_eq!(nodes.len(), 2);
        assert_eq!((nodes[1].host.as_str(), nodes[1].first_rank, nodes[1].ranks()), ("b", 2, 1));
        assert_eq!(plan("a:2,b:4", None).size(), 6);
        let here = Plan::nodes(&[], Some(4)).unwrap();
        assert_eq!((here[0].host.as_str(), here[0].ranks()), ("localhost", 4));
        let hosts = parse_list("a:2,b:4").unwrap();
        let error = Plan::nodes(&hosts, Some(7)).unwrap_err();
        assert_eq!(error.what, "-np 7 is more than the 6 slots of the given hosts (a:2,b:4)");
        assert_eq!(error.code, 2);
    }

    #[test]
    fn servers_come_last_and_are_always_used() {
        let hosts = parse_file("h", "a:2\ns role=server\nb:4\nc:2").unwrap();
        let nodes = Plan::nodes(&hosts, Some(3)).unwrap();
        let all: Vec<_> =
            nodes.iter().map(|node| (&*node.host, node.first_rank, node.ranks())).collect();
        assert_eq!(all, [("a", 0, 2), ("b", 2, 1), ("s", 3, 0)]);
        let plan = Plan::new(nodes, "p", Vec::<Text>::new(), &settings()).unwrap();
        let address = IpAddr::from([10, 0, 0, 1]);
        let (first, server) = (
            plan.daemon_variables(0, address, None),
            plan.daemon_variables(2, address, "10.0.0.1:7000".parse().ok()),
        );
        assert_eq!((&*first["GRADWIRE_NODES"], &*first["GRADWIRE_SERVERS"]), ("3", "1"));
        assert_eq!((&*server["GRADWIRE_SLOTS"], &*server["GRADWIRE_ORDER"]), ("0", "2"));
        let rank = plan.rank_variables(1, 2, &places(3));
        assert_eq!((&*rank["GRADWIRE_SIZE"], &*rank["GRADWIRE_CROSS_SIZE"]), ("3", "2"));
        // Ranks here, and a server elsewhere.
        let nodes = Plan::nodes(&hosts[1..2], Some(2)).unwrap();
        let all: Vec<_> = nodes.iter().map(|node| (&*node.host, node.ranks())).collect();
        assert_eq!(all, [("localhost", 2), ("s", 0)]);
    }

    #[test]
    fn a_rank_has_its_number_in_three_conventions() {
        let plan = plan("a:1,b:3,c:2", None);
        let rank = plan.rank_variables(2, 5, &places(3));
        for (name, value) in [
            ("GRADWIRE_RANK", "5"),
            ("GRADWIRE_SIZE", "6"),
            ("GRADWIRE_LOCAL_RANK", "1"),
            ("GRADWIRE_LOCAL_SIZE", "2"),
            ("GRADWIRE_CROSS_RANK", "1"),
            ("GRADWIRE_CROSS_SIZE", "2"),
            ("GRADWIRE_HOST", "c"),
            ("HOROVOD_RANK", "5"),
            ("HOROVOD_SIZE", "6"),
            ("HOROVOD_LOCAL_RANK", "1"),
            ("HOROVOD_LOCAL_SIZE", "2"),
            ("HOROVOD_CROSS_RANK", "1"),
            ("HOROVOD_CROSS_SIZE", "2"),
            ("HOROVOD_HOSTNAME", "c"),
            ("GRADWIRE_DAEMON_METRICS", "127.0.0.1:2"),
            ("RANK", "5"),
            ("WORLD_SIZE", "6"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("GROUP_RANK", "2"),
            ("NODE_RANK", "2"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("GROUP_WORLD_SIZE", "3"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "4321"),
            ("GRADWIRE_WORKER__SPIN_US", "7"),
            ("GRADWIRE_CHECKS__FINITE", "warn"),
        ] {
            assert_eq!(rank.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert_eq!(rank["GRADWIRE_SOCKET"], format!("@gradwire-{}-2", plan.job));
        assert!(!rank.contains_key("GRADWIRE_DATA__LANES"), "a rank has no data plane");
        let daemon = plan.daemon_variables(1, places(3).addresses[1], "10.0.0.1:7000".parse().ok());
        assert_eq!(daemon["GRADWIRE_DATA__LANES"], "3");
        assert_eq!(
            (daemon["GRADWIRE_SLOTS"].as_str(), daemon["GRADWIRE_ORDER"].as_str()),
            ("3", "1")
        );
        assert_eq!(daemon["GRADWIRE_SOCKET"], format!("@gradwire-{}-1", plan.job));
        assert!(gradwire_proto::JobId::new(&plan.job).is_ok());
    }

    #[test]
    fn only_ranks_get_the_users_variables() {
        let mut plan = plan("a:1", None);
        plan.exported = variables([("A", "1".to_owned()), ("MASTER_PORT", "9".to_owned())]);
        let rank = plan.rank_variables(0, 0, &places(1));
        assert_eq!((&*rank["A"], &*rank["MASTER_PORT"]), ("1", "9"));
        assert!(!plan.daemon_variables(0, places(1).addresses[0], None).contains_key("A"));
    }

    #[test]
    fn only_chosen_ranks_are_recorded() {
        let mut plan = plan("a:4", None);
        plan.record = Some(Record { folder: "/r".into(), ranks: vec![(0, 0), (2, 3)], bytes: 9 });
        let folder =
            |rank| plan.rank_variables(0, rank, &places(1)).get("GRADWIRE_RECORD").cloned();
        assert_eq!(
            [0, 1, 2].map(folder),
            [Some("/r/rank.0".into()), None, Some("/r/rank.2".into())]
        );
    }

    #[test]
    fn the_rack_of_a_host_overrides_the_setting() {
        let hosts = parse_file("h", "a rack=r1\nb\n").unwrap();
        let layers = Layers { flags: vec!["node.rack=r0".into()], ..Layers::default() };
        let (nodes, settings) =
            (Plan::nodes(&hosts, None).unwrap(), Settings::load(&layers).unwrap());
        let plan = Plan::new(nodes, "train", Vec::<Text>::new(), &settings).unwrap();
        let address = IpAddr::from([10, 0, 0, 1]);
        let racks = [0, 1].map(|node| plan.daemon_variables(node, address, None));
        assert_eq!(racks.map(|daemon| daemon["GRADWIRE_NODE__RACK"].clone()), ["r1", "r0"]);
    }

    #[test]
    fn variables_of_this_login_are_not_forwarded() {
        let here = ["PATH", "HOME", "SSH_AUTH_SOCK", "GRADWIRE_SECRET", "WANDB_API_KEY"]
            .map(|name| (name.to_owned(), "x".to_owned()));
        let names: Vec<_> = forwarded(&here.into_iter().collect()).into_keys().collect();
        assert_eq!(names, ["PATH", "WANDB_API_KEY"]);
    }

    proptest! {
        #[test]
        fn every_rank_has_one_node(slots in prop::collection::vec(1u32..9, 1..6), cut in 0u32..5) {
            let hosts: Vec<_> = slots.iter().enumerate()
                .map(|(i, n)| Host::new(format!("h{i}"), *n))
                .collect();
            let np = slots.iter().sum::<u32>().saturating_sub(cut).max(1);
            let nodes = Plan::nodes(&hosts, Some(np)).unwrap();
            let ranks: Vec<u32> =
                nodes.iter().flat_map(|n| n.first_rank..n.first_rank + n.ranks()).collect();
            prop_assert_eq!(ranks, (0..np).collect::<Vec<_>>());
            prop_assert!(nodes.iter().zip(&hosts).all(|(n, h)| (1..=h.slots).contains(&n.ranks())));
        }
    }
}
