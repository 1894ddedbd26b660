//! The facts of this host, read from the system. A fact that can't be read is missing, which is not
//! a failure.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, SocketAddr, TcpListener},
    path::Path,
};

use gradwire_kernels::level;
use gradwire_shm::segment::{HugePages, Segment, available};
use nix::{ifaddrs::getifaddrs, net::if_::InterfaceFlags};
use rustix::process::{Resource, getrlimit};
use socket2::{Domain, Protocol, Socket, Type};

use super::programs;
use crate::facts::{Buffers, Gpus, HostFacts, HugePageFacts, Interface, Limit, Memory, Wanted};

/// NVIDIA's vendor id for PCI devices, and the class of displays.
const NVIDIA: &str = "0x10de";
const DISPLAY: &str = "0x03";

/// The size of the shared memory that is made as a test, in bytes.
const TRIAL: u64 = 1 << 20;

/// All facts except where the agent listens.
pub async fn all(address: IpAddr, wanted: &Wanted) -> HostFacts {
    let (gradwired, (torch, package)) =
        tokio::join!(programs::gradwired(wanted), programs::packages(wanted));
    let (interface, others) = interfaces(address);
    HostFacts {
        gradwired,
        data: Err("the agent does not listen".to_owned()),
        offers: Vec::new(),
        coordinator: None,
        heartbeats: None,
        metrics: metrics(wanted.metrics),
        interface,
        others,
        open_files: limit(Resource::Nofile),
        memlock: limit(Resource::Memlock),
        memory: available().map(|left| Memory { bytes: left.bytes, limit: left.limit }),
        memfd: memfd(HugePages::Never),
        huge_pages: huge_pages(wanted.require_huge_pages),
        buffers: buffers(),
        congestion: congestion(address, &wanted.congestion_control).map_err(|e| e.to_string()),
        cores: std::thread::available_parallelism()
            .map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX)),
        level: level().name().to_owned(),
        has_levels: cfg!(target_arch = "x86_64"),
        gpus: gpus(),
        torch,
        package,
    }
}

fn text(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn number<T: std::str::FromStr>(path: &str) -> Option<T> {
    text(path)?.parse().ok()
}

fn limit(resource: Resource) -> Limit {
    let limit = getrlimit(resource);
    Limit { soft: limit.current, hard: limit.maximum }
}

fn metrics((ip, first, last): (IpAddr, u16, u16)) -> Result<(), String> {
    let mut why = "the range is empty".to_owned();
    for port in first..=last {
        match TcpListener::bind(SocketAddr::new(ip, port)) {
            Ok(_) => return Ok(()),
            Err(error) => why = error.to_string(),
        }
    }
    Err(format!("no port of {ip}:{first}-{last} is free: {why}"))
}

/// The rate of a network card in Mbit/s, if it is known.
pub(super) fn rate(name: &str) -> Option<u32> {
    interface(name).mbit.filter(|_| is_card(name))
}

fn interface(name: &str) -> Interface {
    let folder = format!("/sys/class/net/{name}");
    Interface {
        name: name.to_owned(),
        mtu: number(&format!("{folder}/mtu")),
        // Interfaces without a rate have -1, or can't be read.
        mbit: number::<i64>(&format!("{folder}/speed"))
            .and_then(|mbit| u32::try_from(mbit).ok())
            .filter(|mbit| *mbit > 0),
    }
}

/// Whether an interface leads out of the machine: a network card, or a bond of several. The rates
/// of virtual interfaces mean nothing.
fn is_card(name: &str) -> bool {
    let folder = Path::new("/sys/class/net").join(name);
    folder.join("device").exists() || folder.join("bonding").exists()
}

/// The interface with this address, and others that are up.
fn interfaces(address: IpAddr) -> (Option<Interface>, Vec<Interface>) {
    let Ok(all) = getifaddrs() else { return (None, Vec::new()) };
    // There is an entry for each address of an interface.
    let mut named: BTreeMap<String, bool> = BTreeMap::new();
    for entry in all {
        let Some(at) = entry.address else { continue };
        let ip = match (at.as_sockaddr_in(), at.as_sockaddr_in6()) {
            (Some(v4), _) => IpAddr::from(v4.ip()),
            (_, Some(v6)) => IpAddr::from(v6.ip()),
            _ => continue,
        };
        // All of 127.0.0.0/8 belongs to the loopback interface, which lists one of its addresses.
        let is_it = ip == address || ip.is_loopback() && address.is_loopback();
        let up = entry.flags.contains(InterfaceFlags::IFF_RUNNING);
        if is_it || up && is_card(&entry.interface_name) {
            *named.entry(entry.interface_name).or_default() |= is_it;
        }
    }
    let own = named.iter().find(|(_, is_it)| **is_it).map(|(name, _)| interface(name));
    let others = named.iter().filter(|(_, is_it)| !**is_it).map(|(name, _)| interface(name));
    (own, others.collect())
}

/// Makes shared memory like a rank, and opens it like a daemon.
fn memfd(huge: HugePages) -> Result<(), String> {
    let made = Segment::create("gradwire-doctor", TRIAL, huge);
    let (segment, fd) = made.map_err(|error| error.to_string())?;
    let opened = Segment::open(fd, segment.bytes()).map_err(|error| error.to_string())?;
    drop((segment, opened));
    Ok(())
}

fn huge_pages(required: bool) -> HugePageFacts {
    let shared = text("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    // The chosen mode is in brackets.
    let shared = shared.and_then(|all| {
        let chosen = all.split_once('[')?.1.split_once(']')?.0;
        Some(chosen.to_owned())
    });
    HugePageFacts {
        shared,
        required: required.then(|| memfd(HugePages::Require)),
        free: number("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"),
    }
}

fn buffers() -> Buffers {
    let core = |name| number(&format!("/proc/sys/net/core/{name}"));
    let last = |name| {
        let all = text(&format!("/proc/sys/net/ipv4/{name}"))?;
        all.split_whitespace().last()?.parse().ok()
    };
    Buffers {
        asked: core("rmem_max").zip(core("wmem_max")).map(|(r, w)| [r, w]),
        given: last("tcp_rmem").zip(last("tcp_wmem")).map(|(r, w)| [r, w]),
    }
}

/// The congestion control of a new connection.
fn congestion(address: IpAddr, setting: &str) -> std::io::Result<String> {
    let domain = Domain::for_address(SocketAddr::new(address, 0));
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    if !setting.is_empty() {
        socket.set_tcp_congestion(setting.as_bytes())?;
    }
    let name = socket.tcp_congestion()?;
    Ok(String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned())
}

fn gpus() -> Gpus {
    let folders = |path| fs::read_dir(path).into_iter().flatten().flatten();
    let models = folders("/proc/driver/nvidia/gpus").filter_map(|entry| {
        let about = fs::read_to_string(entry.path().join("information")).ok()?;
        let model = about.lines().find_map(|line| line.strip_prefix("Model:"))?;
        Some(model.trim().to_owned())
    });
    let built_in = folders("/sys/bus/pci/devices").filter(|entry| {
        let says = |file, start| {
            let content = fs::read_to_string(entry.path().join(file)).unwrap_or_default();
            content.starts_with(start)
        };
        says("vendor", NVIDIA) && says("class", DISPLAY)
    });
    let driver = text("/sys/module/nvidia/version");
    Gpus {
        models: models.collect(),
        driver,
        built_in: u32::try_from(built_in.count()).unwrap_or(0),
    }
}
