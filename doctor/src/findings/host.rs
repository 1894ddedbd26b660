//! The facts of one host, compared with the needs of a job with these settings.

use std::net::SocketAddr;

use gradwire_settings::{HugePages, Settings};

use super::finding::{Check, Finding, Status};
use crate::facts::{Facts, Host, HostFacts, Limit, Memory};

/// Descriptors of a daemon in addition to those for peers and ranks. Its tests run with 256 in all.
const OWN_FILES: u64 = 64;

/// Descriptors of a daemon for each rank: its socket, its control page and its memory.
const FILES_PER_RANK: u64 = 8;

/// The usual soft limit of open files: the daemon raises its own limit, but ranks don't.
const USUAL_FILES: u64 = 1024;

/// The memory that systemd lets a process lock. Gradwire locks none, but RDMA and pinned memory in
/// the ranks do.
const USUAL_MEMLOCK: u64 = 8 << 20;

/// The buffers of the connections to a peer, at both ends (`data.socket_buffer_bytes=0`).
const PEER_BUFFERS: u64 = 4 << 20;

/// A host should have this many times the memory with which a job starts: the arenas grow with the
/// gradients of the model.
const PLENTY: u64 = 4;

/// The largest socket buffer that a link of 25 Gbit/s with a round trip of 1 ms fills.
const USUAL_BUFFER: u64 = 3 << 20;

/// The remedy if the cause is unknown.
const LOST: &str = "check the host: is it overloaded or suspended, or was the agent killed there?";

/// The needs of a job on each host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Connections with all peers.
    connections: u64,
    peers: u64,
}

impl Needs {
    /// Counts them.
    pub fn new(facts: &Facts, settings: &Settings) -> Self {
        let peers = facts.hosts.len().saturating_sub(1) as u64;
        let streams = u64::from(settings.data.lanes) * u64::from(settings.data.streams);
        Self { connections: peers * streams, peers }
    }
}

/// The findings for one host.
pub fn findings(host: &Host, version: &str, needs: &Needs, settings: &Settings) -> Vec<Finding> {
    let mut all = Vec::new();
    match &host.facts {
        Ok(facts) => {
            all.push(reached(host));
            all.push(versions(facts, version, host.ranks));
            all.push(listens(facts, settings));
            all.push(address(host, facts));
            all.push(open_files(facts.open_files, u64::from(host.ranks), needs));
            all.push(memory(facts.memory.as_ref(), u64::from(host.ranks), needs, settings));
            all.push(buffers(facts, settings));
            all.push(congestion(facts, settings));
            all.push(level(facts));
            // A server shares no memory with ranks, and runs no model.
            if host.ranks > 0 {
                all.push(memlock(facts.memlock));
                all.push(memfd(facts));
                all.push(huge_pages(facts, settings));
                all.push(cores(facts.cores, host.ranks));
                all.push(gpus(facts));
            }
        }
        Err(refused) => {
            let check = if refused.is_version { Check::Versions } else { Check::Reachability };
            let hint = if refused.hint.is_empty() { LOST } else { &refused.hint };
            all.push(Finding::pass(check, &refused.what).bad(Status::Fail, hint));
        }
    }
    all.into_iter().map(|finding| finding.on(&host.name)).collect()
}

fn reached(host: &Host) -> Finding {
    match &host.lost {
        Some(why) => Finding::pass(Check::Reachability, format!("it was lost: {why}"))
            .bad(Status::Fail, LOST),
        None if host.local => Finding::pass(Check::Reachability, "this machine"),
        None => Finding::pass(Check::Reachability, "over ssh"),
    }
}

fn versions(facts: &HostFacts, version: &str, ranks: u32) -> Finding {
    const REMEDY: &str = "install the same release of all parts on every host";
    match &facts.gradwired {
        Err(why) => Finding::pass(Check::Versions, why).bad(
            Status::Fail,
            "install gradwired beside gradwire, or set launch.gradwired to its path",
        ),
        Ok(daemon) if daemon != version => Finding::pass(
            Check::Versions,
            format!("gradwired is {daemon}, but gradwire is {version}"),
        )
        .bad(Status::Fail, REMEDY),
        Ok(_) => match &facts.package {
            // The ranks may use another Python than the first one in PATH.
            Some(package) if ranks > 0 && package != version => {
                let found = format!("the Python package is {package}, but gradwire is {version}");
                Finding::pass(Check::Versions, found).bad(Status::Warn, REMEDY)
            }
            _ => Finding::pass(Check::Versions, format!("gradwire {version}")),
        },
    }
}

/// Whether the host can listen where a job would.
fn listens(facts: &HostFacts, settings: &Settings) -> Finding {
    let check = Check::Ports;
    if let Err(why) = &facts.data {
        let remedy = match settings.data.listen {
            None if !settings.data.interface.is_empty() => {
                "set data.interface to an interface or network of every host"
            }
            _ => "free the port, or set data.listen to another address",
        };
        return Finding::pass(check, why).bad(Status::Fail, remedy);
    }
    if let Some(Err(why)) = &facts.coordinator {
        return Finding::pass(check, format!("coordinator: {why}"))
            .bad(Status::Fail, "free the port, or set coordinator.listen to another address");
    }
    if let Some(Err(why)) = &facts.heartbeats {
        return Finding::pass(check, format!("coordinator: {why}")).bad(
            Status::Warn,
            "free the port for UDP, or set coordinator.listen to another address: without \
             heartbeats by UDP a job survives only short outages",
        );
    }
    match &facts.metrics {
        Err(why) => {
            // With the default setting a daemon uses any other port; otherwise it does not start.
            let is_default = settings.metrics.listen == Settings::default().metrics.listen;
            let status = if is_default { Status::Warn } else { Status::Fail };
            Finding::pass(check, format!("metrics: {why}"))
                .bad(status, "set metrics.listen to another address or range")
        }
        Ok(()) => Finding::pass(check, "it can listen"),
    }
}

fn address(host: &Host, facts: &HostFacts) -> Finding {
    let check = Check::Address;
    let of_data = facts.data.as_ref().ok().and_then(|all| all.first()).map(SocketAddr::ip);
    let Some(address) = of_data.or(host.address) else { return Finding::pass(check, "unknown") };
    let Some(own) = &facts.interface else {
        // With address translation, a host does not have the address by which others reach it.
        return Finding::pass(check, format!("{address} is not an address of this host"))
            .bad(Status::Warn, "use an address that the host has, or set data.listen to one");
    };
    let rate = |mbit: Option<u32>| mbit.map_or(String::new(), |mbit| format!(", {mbit} Mbit/s"));
    let found = format!("{address} on {}{}", own.name, rate(own.mbit));
    let faster = facts.others.iter().filter(|other| other.mbit > own.mbit);
    let fastest = own.mbit.and_then(|_| faster.max_by_key(|other| other.mbit));
    match fastest {
        Some(other) => Finding::pass(check, found).bad(
            Status::Warn,
            format!(
                "{} is faster{}: set data.interface to it, or to its network",
                other.name,
                rate(other.mbit)
            ),
        ),
        None => Finding::pass(check, found),
    }
}

fn number(limit: Option<u64>) -> String {
    limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string())
}

fn open_files(limit: Limit, ranks: u64, needs: &Needs) -> Finding {
    // A broken connection and its replacement may exist at the same time.
    let need = OWN_FILES + 2 * needs.connections + FILES_PER_RANK * ranks;
    let found =
        format!("{} (up to {}), a daemon needs {need}", number(limit.soft), number(limit.hard));
    let below = |limit: Option<u64>, least| limit.is_some_and(|limit| limit < least);
    Finding::pass(Check::OpenFiles, found)
        .bad_if(
            below(limit.hard, need),
            Status::Fail,
            format!("raise the hard limit of open files to {need} (ulimit -Hn, limits.conf)"),
        )
        .bad_if(
            ranks > 0 && below(limit.soft, USUAL_FILES),
            Status::Warn,
            format!("raise the limit of open files to {USUAL_FILES} (ulimit -n) for the ranks"),
        )
}

fn memlock(limit: Limit) -> Finding {
    let found = match limit.soft {
        Some(bytes) => format!("{} KiB", bytes >> 10),
        None => "unlimited".to_owned(),
    };
    Finding::pass(Check::Memlock, found).bad_if(
        limit.soft.is_some_and(|bytes| bytes < USUAL_MEMLOCK),
        Status::Warn,
        "raise the limit of locked memory (ulimit -l) if ranks use RDMA or pin memory",
    )
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

fn memory(memory: Option<&Memory>, ranks: u64, needs: &Needs, settings: &Settings) -> Finding {
    let check = Check::Memory;
    let Some(Memory { bytes, limit }) = memory else { return Finding::pass(check, "unknown") };
    let pieces = u64::from(settings.negotiation.credit_pieces) * settings.negotiation.piece_bytes;
    let arenas = ranks * settings.worker.arena_segment_bytes;
    let need = arenas + pieces + needs.peers * PEER_BUFFERS;
    let found = format!("{} free ({limit}), a job starts with {}", mib(*bytes), mib(need));
    let short = *bytes < need;
    Finding::pass(check, found)
        .value((bytes >> 20) as f64, "MiB")
        .bad_if(
            short,
            Status::Fail,
            "free memory, start fewer ranks there, or set a smaller worker.arena_segment_bytes",
        )
        .bad_if(
            !short && *bytes < PLENTY * need,
            Status::Warn,
            "it may be too little: shared memory grows with the gradients of the model",
        )
}

fn memfd(facts: &HostFacts) -> Finding {
    match &facts.memfd {
        Ok(()) => Finding::pass(Check::Memfd, "shared memory can be made, sealed and filled"),
        Err(why) => Finding::pass(Check::Memfd, why).bad(
            Status::Fail,
            "ranks and daemon share memory by memfd: check ulimit -f -v, the limits of the \
             container, and seccomp",
        ),
    }
}

fn huge_pages(facts: &HostFacts, settings: &Settings) -> Finding {
    let check = Check::HugePages;
    let facts = &facts.huge_pages;
    match settings.worker.huge_pages {
        HugePages::Never => Finding::pass(check, "not used (worker.huge_pages=never)"),
        HugePages::Require => match &facts.required {
            Some(Err(why)) => Finding::pass(check, why).bad(
                Status::Fail,
                "reserve pages (vm.nr_hugepages), or set worker.huge_pages=advise",
            ),
            _ => {
                let free = facts.free.unwrap_or(0);
                Finding::pass(check, format!("free pages of 2 MiB: {free}"))
            }
        },
        HugePages::Advise => match facts.shared.as_deref() {
            Some(mode @ ("never" | "deny")) => {
                Finding::pass(check, format!("none for shared memory (shmem_enabled is {mode})"))
                    .bad(
                        Status::Warn,
                        "write advise into /sys/kernel/mm/transparent_hugepage/shmem_enabled, or \
                         set worker.huge_pages=never",
                    )
            }
            Some(mode) => Finding::pass(check, format!("shmem_enabled is {mode}")),
            None => Finding::pass(check, "this system has none for shared memory"),
        },
    }
}

fn buffers(facts: &HostFacts, settings: &Settings) -> Finding {
    let check = Check::SocketBuffers;
    let wanted = settings.data.socket_buffer_bytes;
    // Without a setting, the system chooses the size.
    let (granted, need, names) = if wanted > 0 {
        (facts.buffers.asked, wanted, "net.core.rmem_max and net.core.wmem_max")
    } else {
        (facts.buffers.given, USUAL_BUFFER, "the last of net.ipv4.tcp_rmem and net.ipv4.tcp_wmem")
    };
    let Some([receive, send]) = granted else { return Finding::pass(check, "unknown") };
    let found = format!("up to {} KiB to receive and {} KiB to send", receive >> 10, send >> 10);
    Finding::pass(check, found).bad_if(
        receive.min(send) < need,
        Status::Warn,
        format!("raise {names} to {need}: less slows down long and fast paths"),
    )
}

fn congestion(facts: &HostFacts, settings: &Settings) -> Finding {
    let check = Check::CongestionControl;
    let name = &settings.data.congestion_control;
    match &facts.congestion {
        Ok(name) => Finding::pass(check, name),
        Err(why) => Finding::pass(check, format!("'{name}' is not available: {why}")).bad(
            Status::Fail,
            format!("load it (modprobe tcp_{name}) and allow it, or clear data.congestion_control"),
        ),
    }
}

fn cores(cores: u32, ranks: u32) -> Finding {
    Finding::pass(Check::Cores, format!("cores: {cores}, ranks: {ranks}"))
        .value(f64::from(cores) / f64::from(ranks), "cores per rank")
        .bad_if(
            cores < ranks,
            Status::Warn,
            "start fewer ranks there, or give them more cores: they wait for each other",
        )
}

fn level(facts: &HostFacts) -> Finding {
    // The levels of `gradwire-kernels` without 256-bit vectors.
    let is_slow = facts.has_levels && ["scalar", "baseline"].contains(&facts.level.as_str());
    Finding::pass(Check::CpuLevel, &facts.level).bad_if(
        is_slow,
        Status::Warn,
        "reductions are slow without AVX2: is the processor emulated or masked?",
    )
}

fn gpus(facts: &HostFacts) -> Finding {
    let gpus = &facts.gpus;
    let check = Check::Gpus;
    if gpus.built_in > 0 && gpus.models.is_empty() {
        let found = format!("{} in the machine, without a driver", gpus.built_in);
        return Finding::pass(check, found)
            .bad(Status::Warn, "install NVIDIA's driver, or give the container its devices");
    }
    match (gpus.models.first(), &gpus.driver) {
        (None, _) => Finding::pass(check, "none"),
        (Some(model), driver) => {
            let driver = driver.as_deref().unwrap_or("unknown");
            Finding::pass(check, format!("{} × {model}, driver {driver}", gpus.models.len()))
        }
    }
}
