//! Measures simulated networks with known costs.

use gradwire_collectives::{CostModel, LinkCost};

use super::*;

const MICRO: f64 = 1e-6;

const MAY: May = May { find_racks: true, order: true };

fn took(time: Duration) -> Done {
    Done { time, retransmits: 0 }
}

/// A network with the times of the cost model.
struct Simulated {
    topology: Topology,
    cost: CostModel,
    lanes: u32,
    /// The seconds per byte of the uplink that the nodes of a rack share.
    uplink_per_byte: f64,
    /// How many bytes an idle line lets through at once.
    burst: f64,
    /// The delay of orders of large transfers, in seconds, on all nodes but the first two: they
    /// queue behind the data of these two.
    late: f64,
    /// Whether the nodes have no rack labels.
    is_unlabelled: bool,
    /// Slow links, each with a factor.
    slow: Vec<(u32, u32, f64)>,
    /// How many large transfers of a single lane take 20 times as long, because of other work.
    disturbed: usize,
}

impl Simulated {
    /// Nodes with labels and two lanes, without shared uplinks.
    fn new(topology: Topology, cost: CostModel) -> Self {
        Self {
            topology,
            cost,
            lanes: 2,
            uplink_per_byte: 0.0,
            burst: 0.0,
            late: 0.0,
            is_unlabelled: false,
            slow: Vec::new(),
            disturbed: 0,
        }
    }

    /// The seconds of a group, if `lanes` lanes run the probe and the line lets `tokens` bytes
    /// through at once.
    fn seconds(&self, probe: &Probe, group: &[NodeId], lanes: f64, tokens: f64) -> f64 {
        let Self { topology, cost, .. } = self;
        let crosses = |group: &[NodeId]| !topology.same_rack(group[0].0, group[1].0);
        let across = group.len() > 1 && crosses(group);
        let link = if across { cost.cross_rack } else { cost.in_rack };
        let hop = link.latency + 2.0 * cost.per_message;
        let crossing = probe.groups.iter().filter(|g| g.len() > 1 && crosses(g)).count() as f64;
        let racks = topology.members().len() as f64;
        match probe.pattern {
            Pattern::RoundTrips(count) => 2.0 * f64::from(count) * hop,
            Pattern::Messages(count) => hop + f64::from(count) * cost.per_message,
            Pattern::Exchange(bytes) => {
                let bytes = (bytes as f64 - tokens / lanes).max(0.0);
                let line = lanes * cost.in_rack.per_byte;
                // The crossing pairs are distributed over the racks.
                let pairs = (2.0 * crossing / racks).max(1.0);
                let uplink = if across { lanes * pairs * self.uplink_per_byte } else { 0.0 };
                let slow = self.slow.iter().filter(|(a, b, _)| group == [NodeId(*a), NodeId(*b)]);
                let slow: f64 = slow.map(|(.., factor)| factor).product();
                hop + slow * bytes * line.max(uplink).max(cost.lane_per_byte)
            }
            Pattern::Gather(bytes) => {
                let senders = group.len() as f64 - 1.0;
                let loss = 1.0 + cost.burst_loss * (1.0 - 1.0 / senders);
                let slowest = cost.in_rack.per_byte.max(cost.lane_per_byte);
                let all = bytes as f64 * senders;
                all * slowest * loss + cost.overflow(all, senders as u32)
            }
            Pattern::Reduce(bytes) => bytes as f64 * cost.reduce_per_byte,
            Pattern::Copy(bytes) => bytes as f64 * cost.publish_per_byte,
        }
    }

    /// Runs the probe and returns its result.
    fn measure(&self) -> Network {
        let may = May { find_racks: self.is_unlabelled, order: true };
        let known = if self.is_unlabelled {
            Topology::flat(self.topology.participants())
        } else {
            self.topology.clone()
        };
        let mut probing = Probing::new(known, self.lanes, may);
        let mut retransmits = 0;
        let mut disturbed = self.disturbed;
        let mut number = 0;
        let mut now = Duration::from_secs(5);
        // When the line of each node was last in use.
        let mut used: BTreeMap<NodeId, Duration> = BTreeMap::new();
        loop {
            let probes = probing.next(now, || {
                number += 1;
                Sequence(number)
            });
            if probes.is_empty() {
                return probing.finish(now).expect("without further probes it is over");
            }
            assert_eq!(probing.finish(now), None);
            let mut longest: f64 = 0.0;
            let mut done = Vec::new();
            for (lane, probe) in probes.iter().enumerate() {
                for group in &probe.groups {
                    let idle =
                        group.iter().map(|node| now - used.get(node).copied().unwrap_or_default());
                    let is_large = match probe.pattern {
                        Pattern::Exchange(bytes) => bytes >= 2 * fit::SMALL,
                        _ => false,
                    };
                    let waits = is_large && !group.contains(&NodeId(0));
                    let late = if waits { self.late } else { 0.0 };
                    let idle = idle.min().unwrap_or_default().as_secs_f64() + late;
                    let tokens = (idle / self.cost.in_rack.per_byte).min(self.burst);
                    let mut seconds = self.seconds(probe, group, probes.len() as f64, tokens);
                    if is_large && probes.len() == 1 && disturbed > 0 {
                        disturbed -= 1;
                        seconds *= 20.0;
                    }
                    longest = longest.max(late + seconds);
                    for (late, node) in group.iter().enumerate() {
                        // The other nodes got their orders earlier and waited for the first one.
                        // The answering node is done when it has sent its last answer.
                        let early = late as f64 * 30.0 * MICRO;
                        let time = match probe.pattern {
                            // The lanes share the line, in a different order on each node.
                            Pattern::Exchange(_) if (lane + late) % probes.len() != 0 => {
                                seconds / 2.0
                            }
                            Pattern::Exchange(_) if late == 0 => seconds - 30.0 * MICRO,
                            Pattern::RoundTrips(count) if late == 1 => {
                                seconds * (1.0 - 0.5 / f64::from(count)) + early
                            }
                            _ => seconds + early,
                        };
                        let time = Duration::from_secs_f64(time);
                        done.push((*node, probe.sequence, time));
                    }
                }
            }
            if matches!(probes[0].pattern, Pattern::Exchange(_) | Pattern::Gather(_)) {
                let end = now + Duration::from_secs_f64(longest);
                let nodes = probes.iter().flat_map(|probe| probe.groups.iter().flatten());
                used.extend(nodes.map(|node| (*node, end)));
            }
            now += Duration::from_secs_f64(longest + self.cost.operation);
            for (node, sequence, time) in done {
                probing.done(node, sequence, Done { time, retransmits }, now).unwrap();
            }
            let is_lossy = |probe: &Probe| match probe.pattern {
                Pattern::Gather(bytes) => {
                    let senders = probe.groups[0].len() as u32 - 1;
                    self.cost.overflow((bytes * u64::from(senders)) as f64, senders) > 0.0
                }
                _ => false,
            };
            retransmits += u64::from(probes.iter().any(is_lossy));
        }
    }
}

fn data_centre() -> CostModel {
    CostModel {
        in_rack: LinkCost { latency: 21.0 * MICRO, per_byte: 8.0 / 10e9 },
        cross_rack: LinkCost { latency: 55.0 * MICRO, per_byte: 8.0 / 2.5e9 },
        reduce_per_byte: 1.0 / 7e9,
        per_message: 1.5 * MICRO,
        lane_per_byte: 8.0 / 6e9,
        publish_per_byte: 1.0 / 5e9,
        operation: 180.0 * MICRO,
        burst_loss: 0.12,
        ..CostModel::default()
    }
}

fn close(measured: f64, real: f64, what: &str) {
    let ratio = measured / real;
    assert!((ratio - 1.0).abs() < 0.06, "{what}: {measured:e} instead of {real:e}");
}

fn compare(measured: &CostModel, real: &CostModel) {
    close(measured.in_rack.latency, real.in_rack.latency, "latency");
    close(measured.in_rack.per_byte, real.in_rack.per_byte, "rate");
    close(measured.reduce_per_byte, real.reduce_per_byte, "reduce");
    close(measured.publish_per_byte, real.publish_per_byte, "publish");
    close(measured.per_message, real.per_message, "message");
    close(measured.lane_per_byte, real.lane_per_byte, "lane");
}

#[test]
fn a_disturbed_measurement_is_repeated() {
    let network = |disturbed| {
        let new = Simulated::new(Topology::flat(2), data_centre());
        Simulated { disturbed, ..new }.measure()
    };
    // All large transfers of one lane between the only two nodes.
    let [calm, repeated, hopeless] = [0, 5, usize::MAX].map(network);
    let ratio = |network: &Network| network.links[0].rate / network.links[0].lane_rate;
    assert!((ratio(&repeated) / ratio(&calm) - 1.0).abs() < 0.25, "{}", ratio(&repeated));
    assert!(repeated.links[0].is_possible(2) && !hopeless.links[0].is_possible(2));
    assert!(repeated.took > calm.took && repeated.is_complete && hopeless.is_complete);
}

#[test]
fn simulated_costs_are_measured() {
    let labels = |nodes: u32, size: u32| -> Vec<String> {
        (0..nodes).map(|node| (node / size).to_string()).collect()
    };
    for (nodes, size) in [(2, 2), (3, 3), (8, 8), (8, 4), (4, 2), (16, 16), (32, 8)] {
        let topology = Topology::from_labels(&labels(nodes, size));
        let cost = data_centre();
        // Each node gets its share of the uplink if all of them cross.
        let uplink_per_byte = cost.cross_rack.per_byte / f64::from(size);
        let network = Simulated { uplink_per_byte, ..Simulated::new(topology, cost) };
        let measured = network.measure();
        assert!(measured.is_complete, "{nodes} nodes: {:?}", measured.took);
        assert!(measured.took < LIMIT, "{nodes} nodes: {:?}", measured.took);
        compare(&measured.cost, &cost);
        if nodes > 2 {
            close(1.0 + measured.cost.burst_loss, 1.0 + cost.burst_loss, "bursts");
        }
        if size < nodes {
            close(measured.cost.cross_rack.latency, cost.cross_rack.latency, "between racks");
            close(measured.cost.cross_rack.per_byte, cost.cross_rack.per_byte, "share");
        }
        if nodes <= 8 {
            assert_eq!(measured.links.len() as u32, nodes * (nodes - 1) / 2);
        }
    }
}

/// If racks differ in size, the model uses the share of each node of the smaller one.
#[test]
fn the_smaller_of_two_racks_sets_the_share() {
    let of_sizes = |sizes: &[u32]| {
        let of = |(rack, size): (u32, &u32)| vec![rack; *size as usize];
        Topology::from_racks((0..).zip(sizes).flat_map(of).collect())
    };
    // The last case has more pairs than MAX_GROUPS.
    for sizes in [[4, 1], [1, 4], [5, 3], [140, 134]] {
        let smaller = f64::from(sizes[0].min(sizes[1]));
        let factors: &[f64] = if sizes[0] > 100 { &[4.0] } else { &[1.0, 4.0] };
        for oversubscription in factors {
            let cost = data_centre();
            let uplink_per_byte = oversubscription * cost.in_rack.per_byte / smaller;
            let topology = of_sizes(&sizes);
            let network = Simulated { uplink_per_byte, ..Simulated::new(topology, cost) };
            let measured = network.measure().cost;
            let lanes = f64::from(network.lanes);
            let share = (uplink_per_byte * smaller).max(cost.lane_per_byte / lanes);
            close(measured.cross_rack.per_byte, share, &format!("{sizes:?} {oversubscription}"));
        }
    }
}

/// The size of a queue is found to within the steps of the probed sizes.
#[test]
fn overflowing_queues_are_found() {
    for (nodes, queue) in [(4, 400_000), (8, 900_000), (9, 1_500_000)] {
        let in_rack = LinkCost { latency: 30.0 * MICRO, per_byte: 8.0 / 1e9 };
        let cost =
            CostModel { in_rack, lane_per_byte: 0.0, queue, overflow: 0.03, ..data_centre() };
        let measured = Simulated::new(Topology::flat(nodes), cost).measure().cost;
        assert!((queue / 2..=queue).contains(&measured.queue), "{nodes}: {}", measured.queue);
        close(measured.overflow, cost.overflow, "overflow");
        let none = CostModel { queue: 0, ..cost };
        let measured = Simulated::new(Topology::flat(nodes), none).measure().cost;
        assert_eq!((measured.queue, measured.overflow), (0, 0.0));
    }
}

/// Racks without labels are found, even if their nodes do not have adjacent numbers.
#[test]
fn racks_are_found_by_their_links() {
    let cost = data_centre();
    for (racks, share) in [
        (vec![0, 0, 1, 1], 2.0),
        (vec![0, 0, 0, 0, 1, 1, 1, 1], 4.0),
        (vec![0, 1, 0, 1, 0, 1, 0, 1], 4.0),
        (vec![0, 1, 1, 2, 0, 1, 2, 2], 3.0),
        ((0..32).map(|node| node / 8).collect(), 8.0),
    ] {
        let topology = Topology::from_racks(racks.clone());
        let uplink_per_byte = cost.cross_rack.per_byte / share;
        let network =
            Simulated { uplink_per_byte, is_unlabelled: true, ..Simulated::new(topology, cost) };
        let measured = network.measure();
        let arranged = measured.arrangement.expect("racks differ clearly");
        assert_eq!(arranged.racks, racks, "{}", arranged.reason);
        assert!(arranged.reason.contains("no node has a rack label"), "{}", arranged.reason);
        close(measured.cost.cross_rack.latency, cost.cross_rack.latency, "between racks");
        let labelled = Simulated { is_unlabelled: false, ..network };
        assert_eq!(labelled.measure().arrangement, None, "labels take precedence");
    }
    // Slow nodes and links are not racks.
    for slow in [vec![], vec![(0, 1, 9.0)], vec![(0, 1, 5.0), (0, 2, 5.0), (0, 3, 5.0)]] {
        let topology = Topology::flat(4);
        let network = Simulated { slow, is_unlabelled: true, ..Simulated::new(topology, cost) };
        let racks = network.measure().arrangement.map(|arranged| arranged.racks);
        assert!(racks.unwrap_or_default().is_empty());
    }
}

/// A ring avoids slow links, also inside racks, unless it can't.
#[test]
fn rings_avoid_slow_links() {
    let cost = CostModel { lane_per_byte: 0.0, ..data_centre() };
    let slow = vec![(1, 2, 4.0), (4, 5, 3.0)];
    for topology in [Topology::flat(6), Topology::from_racks(vec![0, 0, 0, 1, 1, 1])] {
        let network = Simulated { slow: slow.clone(), ..Simulated::new(topology.clone(), cost) };
        let arranged = network.measure().arrangement.expect("slow links change the order");
        assert!(arranged.racks.is_empty() && arranged.reason.contains("a ring in the order"));
        let order = topology.clone().arranged(&[], &arranged.order).unwrap().order();
        let crosses = order
            .iter()
            .zip(order.iter().cycle().skip(1))
            .any(|(&a, &b)| slow.iter().any(|(from, to, _)| (a.min(b), a.max(b)) == (*from, *to)));
        assert!(!crosses, "{order:?}");
    }
    let everywhere = (1..6).map(|node| (0, node, 4.0)).collect();
    let network = Simulated { slow: everywhere, ..Simulated::new(Topology::flat(6), cost) };
    assert_eq!(network.measure().arrangement, None);
}

/// Transfers take a few milliseconds also on slow lines, unless a single packet takes longer.
#[test]
fn any_line_is_measured_within_the_limit() {
    for mbit in [10.0, 100.0, 1000.0, 100_000.0] {
        let per_byte = 8.0 / (mbit * 1e6);
        let in_rack = LinkCost { latency: 100.0 * MICRO, per_byte };
        let cost = CostModel { in_rack, lane_per_byte: 0.0, ..data_centre() };
        let measured = Simulated::new(Topology::flat(8), cost).measure();
        close(measured.cost.in_rack.per_byte, per_byte, "rate");
        assert_eq!(measured.cost.lane_per_byte, 0.0);
        // The last step may end after the limit.
        assert!(measured.took < 2 * LIMIT, "{mbit} Mbit/s: {:?}", measured.took);
    }
}

/// A burst that a line lets through does not count as its rate, even if it is more than a transfer.
#[test]
fn bursts_do_not_count_as_the_rate() {
    for mbit in [200.0, 1000.0, 10_000.0] {
        for (nodes, lanes) in [(2, 1), (2, 2), (4, 2), (8, 2)] {
            let per_byte = 8.0 / (mbit * 1e6);
            let in_rack = LinkCost { latency: 30.0 * MICRO, per_byte };
            let cost = CostModel { in_rack, lane_per_byte: 0.0, ..data_centre() };
            let burst = f64::max(256e3, 1e-3 / per_byte);
            let topology = Topology::flat(nodes);
            let network = Simulated { lanes, burst, ..Simulated::new(topology, cost) };
            let measured = network.measure();
            let ratio = measured.cost.in_rack.per_byte / per_byte;
            let what = format!("{nodes} nodes, {lanes} lanes, {mbit} Mbit/s: {ratio}");
            assert!((0.8..1.1).contains(&ratio), "{what}");
            assert!(measured.took < 2 * LIMIT, "{what}: {:?}", measured.took);
        }
    }
}

/// While an order waits behind the data of another node, a line accumulates tokens for a burst.
#[test]
fn late_orders_do_not_make_a_line_fast() {
    for mbit in [200.0, 1000.0] {
        for (nodes, lanes) in [(4, 2), (6, 1), (8, 2)] {
            let per_byte = 8.0 / (mbit * 1e6);
            let in_rack = LinkCost { latency: 30.0 * MICRO, per_byte };
            let cost = CostModel { in_rack, lane_per_byte: 0.0, ..data_centre() };
            let network = Simulated {
                lanes,
                burst: 256e3,
                late: 200e3 * per_byte,
                ..Simulated::new(Topology::flat(nodes), cost)
            };
            let measured = network.measure();
            let ratio = measured.cost.in_rack.per_byte / per_byte;
            let what = format!("{nodes} nodes, {lanes} lanes, {mbit} Mbit/s: {ratio}");
            // Pairs without late orders end no later than the others.
            assert!((0.9..1.6).contains(&ratio), "{what}");
        }
    }
}

/// Round trips of any length fit in the time limit.
#[test]
fn far_nodes_are_measured_within_the_limit() {
    for milliseconds in [0.5, 5.0, 20.0] {
        let in_rack = LinkCost { latency: milliseconds * 1e-3, per_byte: 8.0 / 1e9 };
        for nodes in [2, 3] {
            let cost = CostModel { in_rack, lane_per_byte: 0.0, ..data_centre() };
            let topology = Topology::flat(nodes);
            let measured = Simulated::new(topology, cost).measure();
            close(measured.cost.in_rack.latency, in_rack.latency, "latency");
            assert!(measured.took < 2 * LIMIT, "{milliseconds} ms: {:?}", measured.took);
        }
    }
}

fn numbers() -> impl FnMut() -> Sequence {
    let mut number = 0;
    move || {
        number += 1;
        Sequence(number)
    }
}

/// A node that never answers delays the job only by the limit. Late answers are not a violation.
#[test]
fn the_probe_ends_at_the_limit() {
    let mut probing = Probing::new(Topology::flat(2), 1, MAY);
    let second = Duration::from_secs(1);
    let probes = probing.next(second, numbers());
    assert_eq!(probes.len(), 1);
    assert_eq!(probing.deadline(), Some(second + STEP_LIMIT));
    let just_before = second + LIMIT - Duration::from_nanos(1);
    assert_eq!(probing.finish(just_before), None);
    assert!(!probing.is_over());
    let network = probing.finish(second + LIMIT).unwrap();
    assert!(!network.is_complete && network.links.is_empty() && probing.is_over());
    assert_eq!(network.cost.in_rack, CostModel::default().in_rack);
    assert_eq!((probing.finish(second + LIMIT), probing.deadline()), (None, None));
    assert!(probing.next(3 * second, numbers()).is_empty());
    let late = |node, sequence| (NodeId(node), sequence, second, 4 * second);
    for (node, sequence, time, now) in [0, 1].map(|node| late(node, probes[0].sequence)) {
        probing.done(node, sequence, took(time), now).unwrap();
    }
}

/// A pair that never reports delays one step. All other pairs are measured.
#[test]
fn a_silent_link_is_left_out() {
    let mut probing = Probing::new(Topology::flat(4), 1, MAY);
    let (mut now, mut number) = (Duration::ZERO, numbers());
    let silent = [NodeId(1), NodeId(2)];
    let mut waited = 0;
    let network = loop {
        for probe in probing.next(now, &mut number) {
            for group in &probe.groups {
                if group[..] == silent {
                    continue;
                }
                for node in group {
                    let time = Duration::from_micros(100);
                    probing.done(*node, probe.sequence, took(time), now + time).unwrap();
                }
            }
        }
        if let Some(network) = probing.finish(now) {
            break network;
        }
        let deadline = probing.deadline().unwrap();
        assert!(deadline > now, "it continues by itself");
        if probing.flying.is_some() {
            waited += 1;
            now = deadline;
        }
    };
    assert_eq!((waited, network.took, network.is_complete), (1, STEP_LIMIT, false));
    let measured: Vec<_> = network.links.iter().map(|link| [link.from, link.to]).collect();
    assert!(measured.len() == 5 && !measured.contains(&silent), "{measured:?}");
    let cost = network.cost;
    assert!(cost.in_rack.per_byte < CostModel::default().in_rack.per_byte, "{cost:?}");
}

/// A slow line that lets a burst through looks fast. The probe must leave little in its queue, or
/// operations wait behind it for seconds.
#[test]
fn a_slow_line_that_looks_fast_is_not_filled() {
    const BURST: f64 = 256e3;
    for (nodes, mbit) in [(2, 1.0), (3, 2.0), (4, 1.0), (4, 2.0), (8, 2.0), (12, 2.0)] {
        let mut probing = Probing::new(Topology::flat(nodes), 2, MAY);
        let rate = mbit * 1e6 / 8.0;
        let (mut now, mut number) = (Duration::ZERO, numbers());
        // For each node: when its line is free again, and how much it may send at once.
        let mut lines = vec![(0.0, BURST); nodes as usize];
        let mut reports: Vec<(Duration, NodeId, Sequence, Duration)> = Vec::new();
        loop {
            for probe in probing.next(now, &mut number) {
                for group in &probe.groups {
                    let sent = |at: usize| match probe.pattern {
                        Pattern::Exchange(bytes) => bytes as f64,
                        Pattern::Gather(bytes) if at > 0 => bytes as f64,
                        Pattern::Messages(count) if at == 0 => f64::from(count) * 100.0,
                        _ => 0.0,
                    };
                    let begin = now.as_secs_f64();
                    let mut end = begin + 200e-6;
                    for (at, node) in group.iter().enumerate() {
                        let (free, tokens) = &mut lines[node.0 as usize];
                        let saved = (*tokens + (begin - *free).max(0.0) * rate).min(BURST);
                        let waiting = (sent(at) - saved).max(0.0);
                        *tokens = (saved - sent(at)).max(0.0);
                        *free = begin.max(*free) + waiting / rate;
                        end = end.max(*free);
                    }
                    let took = Duration::from_secs_f64(end - begin);
                    reports
                        .extend(group.iter().map(|node| (now + took, *node, probe.sequence, took)));
                }
            }
            if probing.finish(now).is_some() {
                break;
            }
            reports.sort_by_key(|(at, ..)| std::cmp::Reverse(*at));
            let due = probing.deadline().unwrap();
            match reports.pop_if(|(at, ..)| *at <= due) {
                Some((at, node, sequence, time)) => {
                    now = at;
                    probing.done(node, sequence, took(time), now).unwrap();
                }
                None => now = due,
            }
        }
        let busy = lines.iter().map(|(free, _)| free - now.as_secs_f64()).fold(0.0, f64::max);
        // Less than data.connect_timeout_ms, because a connection may be set up behind it.
        assert!(busy < 2.5, "{nodes} nodes, {mbit} Mbit/s: {busy} s after {now:?}");
    }
}

/// TRUST: a node may report anything.
#[test]
fn unexpected_reports_are_violations() {
    let mut probing = Probing::new(Topology::flat(2), 1, MAY);
    let probes = probing.next(Duration::ZERO, numbers());
    let first = probes[0].sequence;
    let mut report = |node, sequence| {
        probing.done(NodeId(node), sequence, took(Duration::MAX), Duration::ZERO).is_ok()
    };
    assert!(!report(2, first), "a node that takes no part");
    assert!(!report(0, Sequence(99)), "an unknown probe");
    assert!(report(0, first));
    assert!(!report(0, first), "twice");
}
