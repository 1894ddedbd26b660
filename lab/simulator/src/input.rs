//! The description of a cluster, a job and faults, as TOML.
//!
//! [`written`] writes such a file for a measured cluster, as `gradwire probe --out` does.

mod cost;
mod faults;
mod file;
pub mod written;

use std::collections::{BTreeMap, BTreeSet};

use gradwire_collectives::{CostModel, Kind, Links, Spec, Topology};
use toml::Spanned;

pub use self::file::InputError;
use self::file::{
    ANY, File, JobPart, MEGABITS, MICRO, MILLI, MOST, NetworkPart, POSITIVE, Reader, TcpPart,
};
use crate::{
    config::{Control, Processor, Tcp, Transport},
    engine::Setup,
    network::{Ecmp, Host, Network, Pair, TierLinks},
};

/// The largest accepted file (BOUND).
pub const MAX_BYTES: usize = 4 << 20;

/// The most hosts (BOUND).
pub const MAX_HOSTS: usize = 4096;

/// The most pieces (BOUND).
const MAX_PIECES: f64 = 65_536.0;

/// The usual rate of bursts.
const BURST_MBIT: f64 = 25_000.0;

/// A link counts as slower than its hosts' lines from this ratio on; smaller differences are noise.
const MUCH_SLOWER: f64 = 2.0;

/// What to simulate.
#[derive(Debug, Clone)]
pub struct Input {
    /// The network, and how daemons behave.
    pub setup: Setup,
    /// The time of ranks and the coordinator.
    pub control: Control,
    /// The costs by which the coordinator chooses.
    pub cost: CostModel,
    /// The collective.
    pub kind: Kind,
    /// Bytes of a piece.
    pub bytes: u64,
    /// The number of pieces.
    pub pieces: u32,
    /// The largest piece that the coordinator cuts, in bytes.
    pub piece_bytes: u64,
    /// The algorithms, one run for each.
    pub specs: Vec<Spec>,
    /// The number of servers: the last hosts.
    pub servers: u32,
}

/// Reads an input.
///
/// # Errors
/// [`InputError`] with the line, the key and the accepted values.
pub fn parse(text: &str) -> Result<Input, InputError> {
    let reader = Reader(text);
    if text.len() > MAX_BYTES {
        let what = format!("the file has {} bytes; the limit is {MAX_BYTES}", text.len());
        return Err(InputError { line: 1, what });
    }
    let file: File = toml::from_str(text).map_err(|error| reader.refused(&error))?;
    let Hosts { hosts, labels, lines, topology } = hosts(&reader, &file)?;
    let servers = topology.servers();
    let topology = ordered(&reader, &file, topology)?;
    let mut network = network(&reader, &file, hosts, topology)?;
    let frame = reader.number(&file.network.message_ns, "network.message_ns", ANY, 0.0)? * 1e-9;
    let measured = pairs(&reader, &file, frame, &mut network)?;
    let NetworkPart { reduce_mb_per_s, lane_rate_mbit, .. } = &file.network;
    let per_byte = |value: f64| if value > 0.0 { 1.0 / value } else { 0.0 };
    let reduce = reader.number(reduce_mb_per_s, "network.reduce_mb_per_s", POSITIVE, MOST)?;
    let reduce = if reduce_mb_per_s.is_some() { per_byte(reduce * 1e6) } else { 0.0 };
    let lane = reader.number(lane_rate_mbit, "network.lane_rate_mbit", ANY, 0.0)?;
    let lane = per_byte(lane * MEGABITS) / 2.0;
    let publish = &file.network.publish_mb_per_s;
    let publish = reader.number(publish, "network.publish_mb_per_s", ANY, 0.0)?;
    let operation = reader.number(&file.network.operation_us, "network.operation_us", ANY, 0.0)?;
    let job = &file.job;
    let usual = Transport::default();
    let chunk = (4096.0, f64::from(4u32 << 20));
    let chunk = reader.whole(&job.chunk_bytes, "job.chunk_bytes", chunk, usual.chunk as f64)?;
    let socket = reader.whole(&job.socket_bytes, "job.socket_bytes", ANY, usual.socket as f64)?;
    let lanes = reader.whole(&job.lanes, "job.lanes", (1.0, 16.0), f64::from(usual.lanes))?;
    let streams =
        reader.whole(&job.streams, "job.streams", (1.0, 16.0), f64::from(usual.streams))?;
    let transport = Transport {
        chunk: chunk as u64,
        lanes: lanes as u32,
        streams: streams as u32,
        socket: socket as u64,
        header: usual.header,
    };
    let cost = cost::cost(&reader, &file, &network.topology, &network.tiers, &transport)?;
    let (usual, uplink) = (1.0 / cost.in_rack.per_byte, 1.0 / cost.cross_rack.per_byte);
    let links = Links::known(lines, usual, uplink, &measured);
    network.topology = network.topology.with_links(links);
    let setup = Setup {
        transport,
        processor: Processor {
            send: lane,
            receive: lane,
            reduce,
            local: reduce,
            publish: per_byte(publish * 1e6),
            frame,
        },
        tcp: file.tcp.as_ref().map(|part| tcp(&reader, part)).transpose()?,
        faults: faults::faults(&reader, &file, &network, &labels)?,
        limit: reader.number(&job.limit_s, "job.limit_s", POSITIVE, 3600.0)?,
        ..Setup::new(network)
    };
    let half = operation * MICRO / 2.0;
    let credit = reader.whole(&job.credit_pieces, "job.credit_pieces", (1.0, 1024.0), 8.0)?;
    // An announcement takes as long as an order.
    let call = reader.number(&job.call_us, "job.call_us", ANY, 2.0 * half / MICRO)? * MICRO;
    let call = (call - half).max(0.0);
    let control = Control { call, order: half, done: half, credit: credit as u32 };
    let bytes = reader.whole(&job.bytes, "job.bytes", (4.0, 1e12), f64::from(64u32 << 20))?;
    if let Some(given) = job.bytes.as_ref().filter(|_| bytes % 4.0 != 0.0) {
        let what = format!("job.bytes is {bytes}: it must be a multiple of 4, an element's bytes");
        return Err(reader.error(given.span(), what));
    }
    let pieces = reader.whole(&job.pieces, "job.pieces", (1.0, MAX_PIECES), 1.0)?;
    let participants = setup.network.hosts.len() as u32;
    let kind = kind(&reader, job)?;
    let specs = specs(&reader, job, participants - servers)?;
    let piece_bytes = (65_536.0, f64::from(64u32 << 20));
    let usual = f64::from(4u32 << 20);
    let piece_bytes = reader.whole(&job.piece_bytes, "job.piece_bytes", piece_bytes, usual)? as u64;
    let (bytes, pieces) = (bytes as u64, pieces as u32);
    Ok(Input { setup, control, cost, kind, bytes, pieces, piece_bytes, specs, servers })
}

/// The hosts, the label of each, the declared rate of each line in Mbit/s (0: none), and their
/// places.
struct Hosts {
    hosts: Vec<Host>,
    labels: Vec<String>,
    lines: Vec<u32>,
    topology: Topology,
}

fn hosts(reader: &Reader<'_>, file: &File) -> Result<Hosts, InputError> {
    let rate = &file.network.rate_mbit;
    let rate = reader.number(rate, "network.rate_mbit", POSITIVE, 25_000.0)?;
    let (mut hosts, mut labels, mut servers) = (Vec::new(), Vec::new(), 0);
    // The line rates by which daemons divide the work.
    let mut lines = Vec::new();
    let mut names = BTreeSet::new();
    for part in &file.hosts {
        let count = reader.whole(&part.count, "host.count", (1.0, MAX_HOSTS as f64), 1.0)?;
        let line = reader.number(&part.line_mbit, "host.line_mbit", ANY, 0.0)?;
        let known_line = line as u32;
        let line = if line > 0.0 { line } else { rate } * MEGABITS;
        let slowness = reader.number(&part.slowness, "host.slowness", (1e-3, 1e6), 1.0)?;
        if part.name.get_ref().is_empty() {
            let what = "host.name is empty: it must have at least one character".to_owned();
            return Err(reader.error(part.name.span(), what));
        }
        if !part.server && servers > 0 {
            let what = "hosts with server = true must come after all others".to_owned();
            return Err(reader.error(part.name.span(), what));
        }
        if hosts.len() + count as usize > MAX_HOSTS {
            let what = format!("there are more than {MAX_HOSTS} hosts");
            return Err(reader.error(part.name.span(), what));
        }
        for number in 0..count as u32 {
            let name = match &part.count {
                Some(_) => format!("{}{number}", part.name.get_ref()),
                None => part.name.get_ref().clone(),
            };
            if !names.insert(name.clone()) {
                let what = format!("there are two hosts {name:?}");
                return Err(reader.error(part.name.span(), what));
            }
            let rack = part.rack.as_ref().map_or("", |rack| rack.get_ref());
            labels.push(rack.to_owned());
            lines.push(known_line);
            servers += u32::from(part.server);
            hosts.push(Host { name, egress: line, ingress: line, slowness });
        }
    }
    if servers as usize == hosts.len() {
        let what = "there must be a [[host]] section with a name, and at least one host \
                    that is not a server";
        return Err(InputError { line: 1, what: what.to_owned() });
    }
    let topology = Topology::from_labels(&labels).with_servers(servers).with_lines(&lines);
    Ok(Hosts { hosts, labels, lines, topology })
}

/// The hosts in the file's order.
fn ordered(reader: &Reader<'_>, file: &File, topology: Topology) -> Result<Topology, InputError> {
    let Some(order) = &file.order else { return Ok(topology) };
    let last = topology.participants() - 1;
    topology.arranged(&[], order.get_ref()).ok_or_else(|| {
        let what = format!("order must contain each number from 0 to {last} once, or be left out");
        reader.error(order.span(), what)
    })
}

fn network(
    reader: &Reader<'_>,
    file: &File,
    hosts: Vec<Host>,
    topology: Topology,
) -> Result<Network, InputError> {
    let part = &file.network;
    let latency = reader.number(&part.latency_us, "network.latency_us", ANY, 40.0)? * MICRO;
    let connection = (POSITIVE.0, MOST);
    let connection =
        reader.number(&part.connection_mbit, "network.connection_mbit", connection, MOST)?;
    let ecmp = match part.ecmp.as_ref().map(|text| (text.get_ref().as_str(), text.span())) {
        None | Some(("ideal", _)) => Ecmp::Ideal,
        Some(("hash", _)) => Ecmp::Hash,
        Some((other, span)) => {
            let what = format!("network.ecmp is {other:?}: it must be \"ideal\" or \"hash\"");
            return Err(reader.error(span, what));
        }
    };
    let mut tiers = Vec::new();
    for part in &file.tiers {
        let links = reader.whole(&part.links, "tier.links", (0.0, 1024.0), 1.0)?;
        let rate = Some(part.rate_mbit.clone());
        let rate = reader.number(&rate, "tier.rate_mbit", POSITIVE, 0.0)? * MEGABITS;
        let more = reader.number(&part.latency_us, "tier.latency_us", ANY, 0.0)? * MICRO;
        if links == 0.0 {
            let what = "tier.links is 0, so its groups have no route to each other: it must be \
                        at least 1";
            return Err(reader.error(part.rate_mbit.span(), what.to_owned()));
        }
        tiers.push(TierLinks { links: links as u32, rate, is_share: false, latency: more });
    }
    let racks = topology.groups(1).len();
    if tiers.len() > topology.tiers().len() || (racks == 1 && !tiers.is_empty()) {
        let span = file.tiers.last().map_or(0..0, |part| part.rate_mbit.span());
        let (given, there) = (tiers.len(), if racks == 1 { 0 } else { topology.tiers().len() });
        let sections = match given {
            1 => "is 1 [[tier]] section".to_owned(),
            _ => format!("are {given} [[tier]] sections"),
        };
        let levels = if there == 1 { "1 level".to_owned() } else { format!("{there} levels") };
        let what = format!("there {sections}, but the racks of the hosts have {levels}");
        return Err(reader.error(span, what));
    }
    let share = &part.rack_rate_mbit;
    let share_latency =
        reader.number(&part.rack_latency_us, "network.rack_latency_us", ANY, 0.0)?;
    if share.is_some() && tiers.is_empty() && racks > 1 {
        let rate = reader.number(share, "network.rack_rate_mbit", POSITIVE, 0.0)? * MEGABITS;
        let more = (share_latency * MICRO - latency).max(0.0);
        tiers.push(TierLinks { links: 1, rate, is_share: true, latency: more });
    } else {
        reader.number(share, "network.rack_rate_mbit", POSITIVE, 0.0)?;
    }
    let connection = connection * MEGABITS;
    let burst = reader.number(&part.burst_bytes, "network.burst_bytes", ANY, 0.0)?;
    let burst_rate = reader.number(&part.burst_mbit, "network.burst_mbit", POSITIVE, BURST_MBIT)?;
    Ok(Network {
        hosts,
        topology,
        latency,
        connection,
        tiers,
        ecmp,
        pairs: BTreeMap::new(),
        burst,
        burst_rate: burst_rate * MEGABITS,
    })
}

/// Adds what was measured between two hosts; it holds in both directions. `frame` of a message's
/// latency is processor time, which is counted there.
///
/// Where link rates were measured, a line is as fast as the median of its links within the rack,
/// because the rate of its interface says less. A link has its own cap only if it is much slower
/// than the lines of both hosts. The speed of a data thread belongs to the processor, and links
/// between racks share the uplinks.
///
/// Returns the measured bytes per second, by which daemons divide the work.
fn pairs(
    reader: &Reader<'_>,
    file: &File,
    frame: f64,
    network: &mut Network,
) -> Result<BTreeMap<(u32, u32), f64>, InputError> {
    let places: BTreeMap<&str, u32> =
        network.hosts.iter().map(|host| host.name.as_str()).zip(0..).collect();
    let mut pairs = BTreeMap::new();
    let mut known = BTreeMap::new();
    let mut measured: Vec<Vec<f64>> = vec![Vec::new(); network.hosts.len()];
    let mut slow: Vec<(u32, u32, f64)> = Vec::new();
    for part in &file.links {
        let place = |name: &Spanned<String>| {
            places.get(name.get_ref().as_str()).copied().ok_or_else(|| {
                let what = format!("link: unknown host {:?}", name.get_ref());
                reader.error(name.span(), what)
            })
        };
        let (from, to) = (place(&part.from)?, place(&part.to)?);
        if from == to {
            let what = format!(
                "link.to is {:?}, the same as link.from: it must be another host",
                part.to.get_ref()
            );
            return Err(reader.error(part.to.span(), what));
        }
        let usual = network.latency / MICRO;
        let latency = reader.number(&part.latency_us, "link.latency_us", ANY, usual)? * MICRO;
        let cap = reader.number(&part.lane_rate_mbit, "link.lane_rate_mbit", POSITIVE, MOST)?;
        let rate = reader.number(&part.rate_mbit, "link.rate_mbit", POSITIVE, 0.0)? * MEGABITS;
        // As the coordinator does: the rate of one data thread or of all, whichever is larger.
        let lane = part.lane_rate_mbit.as_ref().map_or(0.0, |_| cap * MEGABITS);
        if rate.max(lane) > 0.0 {
            known.insert((from, to), rate.max(lane));
        }
        if rate > 0.0 {
            slow.push((from, to, rate));
            if network.topology.same_rack(from, to) {
                measured[from as usize].push(rate);
                measured[to as usize].push(rate);
            }
        }
        let latency = if part.latency_us.is_some() { (latency - frame).max(0.0) } else { latency };
        let cap = cap * MEGABITS;
        let pair = Pair { latency, cap };
        pairs.insert((from, to), pair);
        pairs.entry((to, from)).or_insert(pair);
    }
    drop(places);
    let has_rates = !slow.is_empty();
    for (host, mut rates) in network.hosts.iter_mut().zip(measured) {
        rates.sort_by(f64::total_cmp);
        let rate = rates.get(rates.len() / 2).copied().unwrap_or(f64::INFINITY);
        host.egress = host.egress.min(rate);
        host.ingress = host.ingress.min(rate);
    }
    let line = |host: u32| network.hosts[host as usize].egress;
    slow.retain(|&(from, to, rate)| {
        network.topology.same_rack(from, to) && rate * MUCH_SLOWER < line(from).min(line(to))
    });
    for (ends, pair) in &mut pairs {
        let is_slow = |&(a, b, _): &(u32, u32, f64)| *ends == (a, b) || *ends == (b, a);
        if has_rates && !slow.iter().any(is_slow) {
            pair.cap = f64::INFINITY;
        }
    }
    network.pairs = pairs;
    Ok(known)
}

fn tcp(reader: &Reader<'_>, part: &TcpPart) -> Result<Tcp, InputError> {
    let usual = Tcp::default();
    let bytes = (1.0, MOST);
    let window =
        reader.whole(&part.window_bytes, "tcp.window_bytes", bytes, usual.window as f64)?;
    let buffer =
        reader.whole(&part.buffer_bytes, "tcp.buffer_bytes", bytes, usual.buffer as f64)?;
    let timeout = usual.timeout / MILLI;
    let timeout = reader.number(&part.timeout_ms, "tcp.timeout_ms", POSITIVE, timeout)? * MILLI;
    let trip = usual.round_trip / MICRO;
    let trip = reader.number(&part.round_trip_us, "tcp.round_trip_us", POSITIVE, trip)? * MICRO;
    Ok(Tcp { window: window as u64, buffer: buffer as u64, timeout, round_trip: trip })
}

fn kind(reader: &Reader<'_>, job: &JobPart) -> Result<Kind, InputError> {
    let Some(text) = &job.collective else { return Ok(Kind::Allreduce) };
    Kind::named(text.get_ref(), 0).ok_or_else(|| {
        let all = "allreduce, broadcast, reduce, allgather, gather, scatter, \
                   reducescatter or alltoall";
        let what = format!("job.collective is {:?}: it must be {all}", text.get_ref());
        reader.error(text.span(), what)
    })
}

fn specs(reader: &Reader<'_>, job: &JobPart, hosts: u32) -> Result<Vec<Spec>, InputError> {
    let mut specs = Vec::new();
    for text in job.specs.iter().flatten() {
        let wrong = |error: String| reader.error(text.span(), format!("job.specs: {error}"));
        let spec = Spec::parse(text.get_ref()).map_err(|error| wrong(error.to_string()))?;
        spec.fits(hosts).map_err(|error| wrong(error.to_string()))?;
        specs.push(spec);
    }
    Ok(specs)
}
