//! Facts about hosts and pairs. Data only: [`crate::findings`] decides what they mean.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
};

use gradwire_launcher::launch::plan::Variables;
use gradwire_net::interfaces::OTHERS;
use gradwire_settings::{HugePages, Settings};
use serde::{Deserialize, Serialize};

/// A limit of a process; `None` for no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// The limit now.
    pub soft: Option<u64>,
    /// The process may raise its limit up to this.
    pub hard: Option<u64>,
}

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub struct Interface {
    pub name: String,
    pub mtu: Option<u32>,
    pub mbit: Option<u32>,
}

/// An address at which a host could get its data, and how a hostfile names its interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub struct Offer {
    pub address: SocketAddr,
    /// A value of `data.interface` that selects it.
    pub interface: String,
    pub mbit: Option<u32>,
}

/// The memory of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// How much is free.
    pub bytes: u64,
    /// The limit that leaves the least.
    pub limit: String,
}

/// The huge pages that the system offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePageFacts {
    /// `shmem_enabled`: whether shared memory gets transparent huge pages.
    pub shared: Option<String>,
    /// If a job requires them: whether it gets one, or why not.
    pub required: Option<Result<(), String>>,
    /// The free pages of 2 MiB in the pool.
    pub free: Option<u64>,
}

/// The largest buffers of a socket, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffers {
    /// `net.core.rmem_max` and `wmem_max`: the largest that a program may set.
    pub asked: Option<[u64; 2]>,
    /// The last value of `net.ipv4.tcp_rmem` and `tcp_wmem`: the largest that the system chooses.
    pub given: Option<[u64; 2]>,
}

/// The GPUs of a host.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub struct Gpus {
    /// The models that NVIDIA's driver knows.
    pub models: Vec<String>,
    pub driver: Option<String>,
    /// How many NVIDIA GPUs are in the machine, with or without a driver.
    pub built_in: u32,
}

/// PyTorch on a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Torch {
    /// Its version.
    Version(String),
    /// Python has no PyTorch.
    NotInstalled,
    /// PATH has no Python.
    NoPython,
    /// Python did not answer.
    Unknown(String),
}

/// The facts of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub struct HostFacts {
    /// The release that `gradwired` prints, or why it is unknown.
    pub gradwired: Result<String, String>,
    /// Where it listens for other hosts, on each interface that it uses, or why it can't.
    pub data: Result<Vec<SocketAddr>, String>,
    /// Where else other hosts may try to reach it, if that was asked for.
    pub offers: Vec<Offer>,
    /// Where it listens instead of the coordinator; `None`: it is not the first host.
    pub coordinator: Option<Result<SocketAddr, String>>,
    /// Where it listens for heartbeats by UDP, on the port of the coordinator, or why it can't;
    /// `None`: it is not the first host, or can't listen instead of the coordinator.
    pub heartbeats: Option<Result<SocketAddr, String>>,
    /// Whether a port is free for metrics, or why not.
    pub metrics: Result<(), String>,
    /// The interface with its address, if there is one.
    pub interface: Option<Interface>,
    /// Other network cards that are up and have an address.
    pub others: Vec<Interface>,
    pub open_files: Limit,
    /// The memory that a process may lock, in bytes.
    pub memlock: Limit,
    pub memory: Option<Memory>,
    /// Whether shared memory can be made and sealed like in a job, or why not.
    pub memfd: Result<(), String>,
    pub huge_pages: HugePageFacts,
    pub buffers: Buffers,
    /// The congestion control of connections, or why the chosen one is not available.
    pub congestion: Result<String, String>,
    pub cores: u32,
    /// The instruction set for reductions.
    pub level: String,
    /// Whether the processor's architecture has several such instruction sets.
    pub has_levels: bool,
    pub gpus: Gpus,
    pub torch: Torch,
    /// The release of the Python package `gradwire`, if it is installed.
    pub package: Option<String>,
}

/// The clock of a host, compared with the launcher's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// How far it is ahead of the launcher's, in microseconds.
    pub ahead_us: i64,
    /// The largest error of that, in microseconds.
    pub wrong_by_us: i64,
}

/// Why a host was not checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Whether its gradwire is another release, rather than out of reach.
    pub is_version: bool,
    /// The reason.
    pub what: String,
    /// What to do; may be empty.
    pub hint: String,
}

impl Refused {
    /// A host that can't be asked.
    pub fn new(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { is_version: false, what: what.into(), hint: hint.into() }
    }
}

/// A host of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub struct Host {
    /// Its name, as the user gave it.
    pub name: String,
    /// How many ranks it runs; none for a server.
    pub ranks: u32,
    /// Whether it is this machine.
    pub local: bool,
    /// Its address for other hosts.
    pub address: Option<IpAddr>,
    pub clock: Option<Clock>,
    pub facts: Result<HostFacts, Refused>,
    /// Why it stopped answering later.
    pub lost: Option<String>,
}

/// The purpose of dialling a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Tensor bytes.
    Data,
    /// Tensor bytes, on an interface that was offered.
    Offer,
    /// The coordinator.
    Coordinator,
    /// Heartbeats to the coordinator, by UDP.
    Heartbeats,
}

/// The result of dialling one host from another.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub struct Dialled {
    pub from: usize,
    pub to: usize,
    pub purpose: Purpose,
    pub address: SocketAddr,
    /// Why it failed.
    pub failed: Option<String>,
}

/// Measured by the dialling host of a pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// The median of the round trips, in microseconds.
    pub round_trip_us: u64,
    /// The largest packet on the path, as far as its system knows.
    pub path_mtu: Option<u32>,
    /// Why a large message did not come back, although small ones did.
    pub lost_large: Option<String>,
}

/// The measurement between two hosts.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub struct Pair {
    pub from: usize,
    pub to: usize,
    /// The measurement, or why there is none.
    pub measured: Result<Measured, String>,
    /// The rates at which bytes arrived at `to` and at `from` at the same time, in Mbit/s.
    pub mbit: [Option<f64>; 2],
}

/// All facts of a check.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub struct Facts {
    /// The launcher's release.
    pub version: String,
    /// The hosts, in the order of the job.
    pub hosts: Vec<Host>,
    pub dialled: Vec<Dialled>,
    pub pairs: Vec<Pair>,
}

impl Facts {
    /// The interface of a host, if it is known.
    pub fn interface(&self, host: usize) -> Option<&Interface> {
        self.hosts[host].facts.as_ref().ok()?.interface.as_ref()
    }
}

/// The settings that an agent needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// `data.listen`
    pub data_listen: Option<SocketAddr>,
    /// `data.interface`
    pub data_interface: String,
    /// The variables of others that name interfaces, as the processes of a job get them.
    pub interface_variables: HashMap<String, String>,
    /// `coordinator.listen`
    pub coordinator_listen: Option<SocketAddr>,
    /// `metrics.listen`: the address, the first and the last port.
    pub metrics: (IpAddr, u16, u16),
    /// `data.congestion_control`
    pub congestion_control: String,
    /// The connections between two hosts: `data.lanes` times `data.streams`.
    pub streams: u32,
    /// `worker.huge_pages` is `require`.
    pub require_huge_pages: bool,
    /// Whether it offers all of its interfaces.
    pub offers: bool,
    /// `launch.gradwired`
    pub gradwired: String,
    /// PATH of the processes of a job; `None`: PATH of the agent.
    pub path: Option<String>,
}

impl Wanted {
    /// Takes them out of the settings, and out of the environment that the processes of a job get.
    pub fn new(settings: &Settings, environment: &Variables) -> Self {
        let of_interfaces =
            |name: &&str| environment.get(*name).map(|text| ((*name).to_owned(), text.clone()));
        let metrics = &settings.metrics.listen;
        Self {
            data_listen: settings.data.listen,
            data_interface: settings.data.interface.clone(),
            interface_variables: OTHERS.iter().filter_map(of_interfaces).collect(),
            coordinator_listen: settings.coordinator.listen,
            metrics: (metrics.ip, *metrics.ports.start(), *metrics.ports.end()),
            congestion_control: settings.data.congestion_control.clone(),
            streams: settings.data.lanes * settings.data.streams,
            require_huge_pages: settings.worker.huge_pages == HugePages::Require,
            offers: false,
            gradwired: settings.launch.gradwired.clone(),
            path: environment.get("PATH").cloned(),
        }
    }
}
