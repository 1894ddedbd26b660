//! Starts an agent on each host, asks all of them step by step, and gathers their answers. A host
//! that does not answer in time is reported, and the others go on without it.
//!
//! - `link`: the link to an agent

mod link;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

use gradwire_launcher::{
    error::CommandError,
    launch::{
        places,
        plan::{Node, Variables},
    },
    reach::Way,
};
use gradwire_proto::Secret;
use gradwire_settings::Settings;
use tokio::{task::JoinSet, time::sleep_until};

use self::link::{AGENT, Link, millis};
use crate::{
    facts::{Dialled, Facts, Host, Measured, Pair, Purpose, Refused, Wanted},
    limits::{CONNECT, MAX_STREAMS, ROUND, START},
    messages::{Order, Peer, Report},
    rounds::rounds,
};

/// Asks all hosts and returns their facts. `environment` is that of a job's processes on other
/// hosts. With `offers`, all hosts try all interfaces of all others.
///
/// # Errors
/// If the gradwire program can't be found.
pub async fn run(
    nodes: &[Node],
    settings: &Settings,
    environment: &Variables,
    offers: bool,
) -> Result<Facts, CommandError> {
    let names: Vec<_> = nodes.iter().map(|node| node.host.clone()).collect();
    let local = places::are_local(&names).await;
    let remote = names.iter().zip(&local).find(|(_, local)| !**local).map(|(name, _)| name.clone());
    let mut check = Check {
        settings,
        wanted: Wanted { offers, ..Wanted::new(settings, environment) },
        interfaces: nodes.iter().map(|node| node.interface.clone()).collect(),
        secret: Secret::generate(),
        links: Vec::new(),
        hosts: Vec::new(),
        dialled: Vec::new(),
        pairs: Vec::new(),
    };
    let mut started = Vec::new();
    for (number, (node, local)) in nodes.iter().zip(local).enumerate() {
        let way = Way::new(&node.host, local, &[AGENT], settings)?;
        started.push(Link::open(number, way));
        check.hosts.push(Host {
            name: node.host.clone(),
            ranks: node.ranks(),
            local,
            address: None,
            clock: None,
            facts: Err(Refused::new("", "")),
            lost: None,
        });
    }
    check.ask_hosts(started, remote).await;
    check.dial().await;
    for pairs in rounds(nodes.len()) {
        check.measure(pairs).await;
    }
    Ok(check.end().await)
}

struct Check<'a> {
    settings: &'a Settings,
    wanted: Wanted,
    /// By host: what its hostfile says instead of `data.interface`.
    interfaces: Vec<Option<String>>,
    secret: Secret,
    /// By host; `None` for hosts that can't be asked.
    links: Vec<Option<Link>>,
    hosts: Vec<Host>,
    dialled: Vec<Dialled>,
    pairs: Vec<Pair>,
}

impl Check<'_> {
    fn connect_limit(&self) -> Duration {
        CONNECT.min(self.settings.data.connect_timeout)
    }

    /// Asks all hosts at once: the greeting, the clock, and the facts.
    async fn ask_hosts(&mut self, started: Vec<Result<Link, Refused>>, remote: Option<String>) {
        let limit = START.min(self.settings.start.timeout);
        let mut tasks = JoinSet::new();
        self.links.resize_with(started.len(), || None);
        for (number, link) in started.into_iter().enumerate() {
            let mut link = match link {
                Ok(link) => link,
                Err(refused) => {
                    self.hosts[number].facts = Err(refused);
                    continue;
                }
            };
            let mut wanted = self.wanted.clone();
            wanted.path = wanted.path.filter(|_| !link.way.local);
            let own = self.interfaces[number].clone();
            wanted.data_interface = own.unwrap_or(wanted.data_interface);
            let secret = self.secret.to_hex();
            let remote = remote.clone();
            tasks.spawn(async move {
                let begun = link.start(remote.as_deref(), limit).await;
                let host = u32::try_from(number).unwrap_or(u32::MAX);
                let known = match begun {
                    Ok((address, clock)) => {
                        let order =
                            Order::Listen { host, address, secret, wanted: Box::new(wanted) };
                        let facts = link.facts(order).await.ok_or_else(|| {
                            let why = link.lost.clone().unwrap_or_default();
                            Refused::new(
                                format!("host {} reports no facts: {why}", link.way.host),
                                "",
                            )
                        });
                        Ok((address, clock, facts))
                    }
                    Err(refused) => Err(refused),
                };
                (link, known)
            });
        }
        while let Some(Ok((link, known))) = tasks.join_next().await {
            let number = link.number;
            let host = &mut self.hosts[number];
            host.facts = match known {
                Ok((address, clock, facts)) => {
                    (host.address, host.clock) = (Some(address), clock);
                    facts
                }
                Err(refused) => Err(refused),
            };
            self.links[number] = Some(link).filter(|_| host.facts.is_ok());
        }
    }

    /// The addresses of a host for a purpose; none if it does not listen.
    fn peers(&self, host: usize, purpose: Purpose) -> Vec<Peer> {
        let Ok(facts) = &self.hosts[host].facts else { return Vec::new() };
        let only = |listens: &Option<Result<SocketAddr, String>>| match listens {
            Some(Ok(address)) => vec![*address],
            _ => Vec::new(),
        };
        let addresses = match purpose {
            Purpose::Data => facts.data.clone().unwrap_or_default(),
            Purpose::Offer => facts.offers.iter().map(|offer| offer.address).collect(),
            Purpose::Coordinator => only(&facts.coordinator),
            Purpose::Heartbeats => only(&facts.heartbeats),
        };
        let host = u32::try_from(host).unwrap_or(u32::MAX);
        addresses.into_iter().map(|address| Peer { host, purpose, address }).collect()
    }

    /// Dials the pairs of all rounds in both directions, the coordinator, and what all others
    /// offer; all at once.
    async fn dial(&mut self) {
        let mut partners: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        for (a, b) in rounds(self.hosts.len()).into_iter().flatten() {
            partners.entry(a).or_default().insert(b);
            partners.entry(b).or_default().insert(a);
        }
        let limit = self.connect_limit();
        let mut tasks = JoinSet::new();
        for (from, all) in partners {
            let data = all.iter().flat_map(|to| self.peers(*to, Purpose::Data));
            let first = [Purpose::Coordinator, Purpose::Heartbeats];
            let first = first.into_iter().filter(|_| from > 0);
            let first = first.flat_map(|purpose| self.peers(0, purpose));
            let others = (0..self.hosts.len()).filter(|to| *to != from);
            let offers = others.flat_map(|to| self.peers(to, Purpose::Offer));
            let peers: Vec<_> = data.chain(first).chain(offers).collect();
            let Some(mut link) = self.links[from].take() else { continue };
            tasks.spawn(async move {
                let dialled = link.dial(peers, limit).await;
                (link, dialled)
            });
        }
        while let Some(Ok((link, all))) = tasks.join_next().await {
            let from = link.number;
            let dialled = |(Peer { host, purpose, address }, failed)| Dialled {
                from,
                to: host as usize,
                purpose,
                address,
                failed,
            };
            self.dialled.extend(all.into_iter().map(dialled));
            self.links[from] = Some(link);
        }
    }

    fn reaches(&self, from: usize, to: usize) -> bool {
        let found = |d: &&Dialled| (d.from, d.to, d.purpose) == (from, to, Purpose::Data);
        let mut all = self.dialled.iter().filter(found).peekable();
        all.peek().is_some() && all.all(|dialled| dialled.failed.is_none())
    }

    /// Measures the pairs of one round at once. A pair is measured from a side that can connect. A
    /// pair without connections has been reported.
    async fn measure(&mut self, pairs: Vec<(usize, usize)>) {
        let streams = self.wanted.streams;
        let limit = self.connect_limit();
        let mut tasks = JoinSet::new();
        for (a, b) in pairs {
            let sides = [(a, b), (b, a)];
            let side = sides.into_iter().find(|(from, to)| self.reaches(*from, *to));
            let Some((from, to)) = side else { continue };
            let mut peers = self.peers(to, Purpose::Data).into_iter();
            let Some(peer) = peers.next() else { continue };
            let others = peers.map(|peer| peer.address).collect();
            // A lost host is reported, and must not delay others.
            let is_there = |link: &Option<Link>| link.as_ref().is_some_and(|l| l.lost.is_none());
            if !is_there(&self.links[from]) || !is_there(&self.links[to]) {
                continue;
            }
            let links = (self.links[from].take(), self.links[to].take());
            let (Some(mut dialler), Some(mut acceptor)) = links else { continue };
            let order = Order::Measure { peer, others, streams, limit_ms: millis(limit) };
            tasks.spawn(async move {
                let pair = measure(&mut dialler, &mut acceptor, order).await;
                (dialler, acceptor, pair)
            });
        }
        while let Some(Ok((dialler, acceptor, pair))) = tasks.join_next().await {
            self.pairs.push(pair);
            for link in [dialler, acceptor] {
                let number = link.number;
                self.links[number] = Some(link);
            }
        }
    }

    /// Ends all agents.
    async fn end(mut self) -> Facts {
        let mut tasks = JoinSet::new();
        for mut link in self.links.into_iter().flatten() {
            tasks.spawn(async move {
                link.check_is_there().await;
                let known = (link.number, link.lost.clone());
                link.close().await;
                known
            });
        }
        while let Some(Ok((number, lost))) = tasks.join_next().await {
            self.hosts[number].lost = lost;
        }
        self.dialled.sort_by_key(|dialled| (dialled.from, dialled.to, dialled.purpose));
        self.pairs.sort_by_key(|pair| (pair.from.min(pair.to), pair.from.max(pair.to)));
        Facts {
            version: gradwire_proto::VERSION.to_owned(),
            hosts: self.hosts,
            dialled: self.dialled,
            pairs: self.pairs,
        }
    }
}

/// Gathers the reports of two agents on their measurement, until it is complete or the time is
/// over.
async fn measure(dialler: &mut Link, acceptor: &mut Link, order: Order) -> Pair {
    let (from, to) = (dialler.number, acceptor.number);
    let mut result: Option<(Result<Measured, String>, u32)> = None;
    let mut arrived: [Vec<(u64, u64)>; 2] = Default::default();
    dialler.give(&order).await;
    let deadline = Instant::now() + ROUND;
    let is_complete = |result: &Option<(_, u32)>, arrived: &[Vec<_>; 2]| match result {
        Some((_, streams)) => arrived.iter().all(|all| all.len() >= *streams as usize),
        None => false,
    };
    while !is_complete(&result, &arrived) && dialler.lost.is_none() && acceptor.lost.is_none() {
        let (side, report) = tokio::select! {
            report = acceptor.next() => (0, report),
            report = dialler.next() => (1, report),
            () = sleep_until(deadline.into()) => break,
        };
        let Some(report) = report else { break };
        // A late report of an earlier pair has the number of another host.
        let other = if side == 0 { from } else { to };
        match report {
            Report::Measured { host, result: new, streams } if host as usize == other => {
                result = Some((new, streams));
            }
            // BOUND: an agent may send too many reports.
            Report::Received { host, bytes, us }
                if host as usize == other && arrived[side].len() < MAX_STREAMS as usize =>
            {
                arrived[side].push((bytes, us));
            }
            _ => {}
        }
    }
    if !is_complete(&result, &arrived) || matches!(result, Some((Err(_), _))) {
        // If one of them has frozen, it is lost, and does not delay later rounds.
        tokio::join!(dialler.check_is_there(), acceptor.check_is_there());
        if result.is_none() && acceptor.lost.is_none() {
            dialler.silent(ROUND);
        }
    }
    let silent = || Err("no answer in time".to_owned());
    let mbit = arrived.map(|connections| {
        let rates = connections.iter().filter(|(_, us)| *us > 0);
        let rates: Vec<f64> = rates.map(|(bytes, us)| *bytes as f64 * 8.0 / *us as f64).collect();
        (!rates.is_empty()).then(|| rates.iter().sum())
    });
    Pair { from, to, measured: result.map_or_else(silent, |(result, _)| result), mbit }
}
