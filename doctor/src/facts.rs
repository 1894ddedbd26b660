//! What is known of hosts and pairs. Data only: what it means is decided in
//! [`crate::findings`].

use std::net::{IpAddr, SocketAddr};

use gradwire_settings::{HugePages, Settings};
use serde::{Deserialize, Serialize};

/// A limit of a process; `None` for no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// What counts now.
    pub soft: Option<u64>,
    /// Up to which the process may raise it.
    pub hard: Option<u64>,
}

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// The size of its packets.
    pub mtu: Option<u32>,
    /// Its rate in Mbit/s, if it tells.
    pub mbit: Option<u32>,
}

/// The memory of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// How much may still be taken.
    pub bytes: u64,
    /// By which limit.
    pub limit: String,
}

/// What the system offers of huge pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePageFacts {
    /// `shmem_enabled`: whether shared memory gets transparent huge pages.
    pub shared: Option<String>,
    /// If a job has to have them: whether it gets one, or why not.
    pub required: Option<Result<(), String>>,
    /// The pages of 2 MiB in the pool that are free.
    pub free: Option<u64>,
}

/// The largest buffers of a socket, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffers {
    /// `net.core.rmem_max` and `wmem_max`: the most that a program may ask for.
    pub asked: Option<[u64; 2]>,
    /// The last of `net.ipv4.tcp_rmem` and `tcp_wmem`: the most that the system gives by itself.
    pub given: Option<[u64; 2]>,
}

/// The graphics processors of a host.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Gpus {
    /// The models that NVIDIA's driver knows.
    pub models: Vec<String>,
    /// The driver's version.
    pub driver: Option<String>,
    /// How many of NVIDIA's there are in the machine, with a driver or without.
    pub built_in: u32,
}

/// PyTorch on a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Torch {
    /// Its version.
    Version(String),
    /// There is a Python without it.
    NotInstalled,
    /// There is no Python in PATH.
    NoPython,
    /// Python did not answer.
    Unknown(String),
}

/// What a host knows of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// The release of `gradwired`, as its program tells, or why it does not.
    pub gradwired: Result<String, String>,
    /// The kernel's release.
    pub kernel: String,
    /// Where it listens for the others, or why it can't.
    pub data: Result<SocketAddr, String>,
    /// Where it listens in the place of the coordinator; `None`: it is not the first host.
    pub coordinator: Option<Result<SocketAddr, String>>,
    /// Where it listens for heartbeats by UDP, at the port of the coordinator, or why it can't;
    /// `None`: it is not the first host, or has no place for the coordinator.
    pub heartbeats: Option<Result<SocketAddr, String>>,
    /// Whether a port is free for metrics, or why not.
    pub metrics: Result<(), String>,
    /// The interface with its address, if there is one.
    pub interface: Option<Interface>,
    /// Other cards that are up and have an address.
    pub others: Vec<Interface>,
    /// The descriptors of a process.
    pub open_files: Limit,
    /// The memory that a process may lock, in bytes.
    pub memlock: Limit,
    /// The memory.
    pub memory: Option<Memory>,
    /// Whether shared memory can be made and sealed as a job does it, or why not.
    pub memfd: Result<(), String>,
    /// Huge pages.
    pub huge_pages: HugePageFacts,
    /// Socket buffers.
    pub buffers: Buffers,
    /// The congestion control that connections have, or why the one that is set can't be had.
    pub congestion: Result<String, String>,
    /// How many cores a process here may use.
    pub cores: u32,
    /// The instructions for arithmetic.
    pub level: String,
    /// Whether the processor is one for which there are several.
    pub has_levels: bool,
    /// Graphics processors.
    pub gpus: Gpus,
    /// PyTorch.
    pub torch: Torch,
    /// The release of the Python package `gradwire`, if it is installed.
    pub package: Option<String>,
}

/// The clock of a host: what it showed in the middle of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// How far it is ahead of the launcher's, in microseconds.
    pub ahead_us: i64,
    /// How far that may be wrong.
    pub wrong_by_us: i64,
}

/// Why a host was not checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Whether its gradwire is of another release, and not the way to it broken.
    pub is_version: bool,
    /// The reason.
    pub what: String,
    /// What to do; may be empty.
    pub hint: String,
}

/// A host of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Its name, as the user gave it.
    pub name: String,
    /// How many ranks it runs; none for a server.
    pub ranks: u32,
    /// Whether it is this machine.
    pub local: bool,
    /// Its address for the others.
    pub address: Option<IpAddr>,
    /// Its clock.
    pub clock: Option<Clock>,
    /// What it knows of itself.
    pub facts: Result<HostFacts, Refused>,
    /// Why it stopped to answer later.
    pub lost: Option<String>,
}

/// What a host is dialled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// Tensor bytes.
    Data,
    /// The coordinator.
    Coordinator,
    /// Heartbeats to the coordinator, by UDP.
    Heartbeats,
}

/// One host has dialled another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dialled {
    /// The host that dials.
    pub from: usize,
    /// The host that listens.
    pub to: usize,
    /// For what.
    pub purpose: Purpose,
    /// At which address.
    pub address: SocketAddr,
    /// Why that failed.
    pub failed: Option<String>,
}

/// What the dialling host of a pair has measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// The middle one of the round trips, in microseconds.
    pub round_trip_us: u64,
    /// The size of packets on the path, as its system knows it.
    pub path_mtu: Option<u32>,
    /// Why a large message did not come back although small ones did.
    pub lost_large: Option<String>,
}

/// What was measured between two hosts.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    /// The host that dialled.
    pub from: usize,
    /// The host that answered.
    pub to: usize,
    /// The measurement, or why there is none.
    pub measured: Result<Measured, String>,
    /// How fast bytes arrived at `to` and at `from`, in Mbit/s, both at once.
    pub mbit: [Option<f64>; 2],
}

/// Everything.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// The launcher's release.
    pub version: String,
    /// The hosts, in the order of the job.
    pub hosts: Vec<Host>,
    /// Who has dialled whom.
    pub dialled: Vec<Dialled>,
    /// What was measured.
    pub pairs: Vec<Pair>,
}

/// The settings that matter here, as an agent needs them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// `data.listen`
    pub data_listen: Option<SocketAddr>,
    /// `coordinator.listen`
    pub coordinator_listen: Option<SocketAddr>,
    /// `metrics.listen`: the address, the first and the last port.
    pub metrics: (IpAddr, u16, u16),
    /// `data.congestion_control`
    pub congestion_control: String,
    /// `data.socket_buffer_bytes`
    pub socket_buffer_bytes: u64,
    /// The connections between two hosts: `data.lanes` times `data.streams`.
    pub streams: u32,
    /// `worker.huge_pages` is `require`.
    pub require_huge_pages: bool,
    /// `launch.gradwired`
    pub gradwired: String,
    /// PATH of the processes of a job; `None`: that of the agent.
    pub path: Option<String>,
}

impl Wanted {
    /// Takes them out of the settings.
    pub fn new(settings: &Settings, path: Option<String>) -> Self {
        let metrics = &settings.metrics.listen;
        Self {
            data_listen: settings.data.listen,
            coordinator_listen: settings.coordinator.listen,
            metrics: (metrics.ip, *metrics.ports.start(), *metrics.ports.end()),
            congestion_control: settings.data.congestion_control.clone(),
            socket_buffer_bytes: settings.data.socket_buffer_bytes,
            streams: settings.data.lanes * settings.data.streams,
            require_huge_pages: settings.worker.huge_pages == HugePages::Require,
            gradwired: settings.launch.gradwired.clone(),
            path,
        }
    }
}
