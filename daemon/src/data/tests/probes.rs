//! Pieces that measure links.

use gradwire_collectives::algorithms::probe::Pattern;

use super::*;

/// The piece of `node`; the participants are `nodes` in this order.
fn probe(sequence: u64, pattern: Pattern, nodes: &[u32], node: u32) -> Piece {
    let own = nodes.iter().position(|other| *other == node).unwrap() as u32;
    let schedule = pattern.schedule(nodes.len() as u32, own);
    Piece {
        purpose: Purpose::Probe,
        sequence: Sequence(sequence),
        combine: Combine { dtype: DType::U8, op: ReduceOp::Sum },
        prescale: 1.0,
        finish: Finish::none(DType::U8),
        wire: Wire::Ranks,
        tensors: Vec::new(),
        segments: Vec::new(),
        bytes: schedule.blocks.iter().map(|block| block.count).sum(),
        plan: Arc::new(Plan::new(&schedule, 1)),
        nodes: nodes.iter().copied().map(NodeId).collect(),
        ordered: Instant::now(),
        moved: None,
        chunk: None,
    }
}

/// All patterns, from either end, on several connections and with chunks of any size.
#[test]
fn every_pattern_ends_on_all_its_nodes() {
    for (streams, chunk) in [(1, 4096), (3, 1000), (2, 1 << 20)] {
        let cluster = Cluster::new(4, 1, chunk, Duration::from_secs(4));
        cluster.connect(streams, None);
        let mut sequence = 0;
        for (pattern, groups) in [
            (Pattern::RoundTrips(1), [vec![0, 1], vec![3, 2]]),
            (Pattern::RoundTrips(100), [vec![2, 0], vec![1, 3]]),
            (Pattern::Messages(256), [vec![0, 3], vec![2, 1]]),
            (Pattern::Exchange(64), [vec![0, 1], vec![2, 3]]),
            (Pattern::Exchange(300_001), [vec![1, 0], vec![3, 2]]),
            (Pattern::Gather(100_000), [vec![2, 0, 3], vec![]]),
            (Pattern::Gather(64), [vec![3, 2, 1, 0], vec![]]),
        ] {
            sequence += 1;
            for node in groups.iter().flatten() {
                let group = groups.iter().find(|group| group.contains(node)).unwrap();
                let piece = probe(sequence, pattern, group, *node);
                cluster.lanes[*node as usize][0].send(Order::Start(piece));
            }
            for node in groups.iter().flatten() {
                let event = cluster.wait_for(*node as usize);
                let is_it = matches!(event, Event::Measured(Sequence(of), _) if of == sequence);
                assert!(is_it, "{pattern:?} on {node}: {event:?}");
            }
        }
        cluster.stop();
    }
}

#[test]
fn memory_is_measured_without_peers() {
    let cluster = Cluster::new(1, 1, 4096, Duration::from_secs(4));
    for (sequence, pattern) in [(1, Pattern::Reduce(1 << 20)), (2, Pattern::Copy(1 << 20))] {
        let sequence = Sequence(sequence);
        cluster.lanes[0][0].send(Order::Measure { sequence, pattern });
        let event = cluster.wait_for(0);
        let Event::Measured(of, time) = event else { panic!("{event:?}") };
        assert!(of == sequence && time > Duration::ZERO, "{event:?}");
    }
    cluster.stop();
}

/// A peer that does not answer is late for an operation, but not for a probe; and later pieces run.
#[test]
fn a_waiting_probe_neither_fails_nor_delays() {
    let limit = Duration::from_millis(200);
    let cluster = Cluster::new(3, 1, 4096, limit);
    cluster.connect(1, None);
    let start = |node: u32, piece| cluster.lanes[node as usize][0].send(Order::Start(piece));
    // Node 2 gets its order later.
    start(1, probe(1, Pattern::Exchange(100_000), &[1, 2], 1));
    std::thread::sleep(3 * limit);
    let job = Job::new("a", 2, 1, 5000, SUM);
    for node in 0..2 {
        start(node, piece(2, &[&job], node, 2, Algorithm::Ring, &Topology::flat(2)));
    }
    for node in 0..2 {
        assert!(matches!(cluster.wait_for(node), Event::Finished), "node {node}");
    }
    job.check();
    start(2, probe(1, Pattern::Exchange(100_000), &[1, 2], 2));
    for node in 1..3 {
        assert!(matches!(cluster.wait_for(node), Event::Measured(Sequence(1), _)), "node {node}");
    }
    cluster.stop();
}

/// A node that leaves while it is probed causes no failure.
#[test]
fn a_node_may_leave_during_a_probe() {
    let cluster = Cluster::new(2, 1, 4096, Duration::from_secs(4));
    cluster.connect(1, None);
    cluster.lanes[0][0].send(Order::Start(probe(1, Pattern::RoundTrips(9), &[0, 1], 0)));
    // It has sent its first message, which the other node does not expect.
    std::thread::sleep(Duration::from_millis(100));
    cluster.lanes[1].iter().for_each(stop);
    let event = cluster.events[0].recv_timeout(Duration::from_secs(1));
    assert!(!matches!(event, Ok(Event::Failed(_))), "{event:?}");
    cluster.stop();
}
