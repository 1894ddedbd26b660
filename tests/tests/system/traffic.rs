//! Metrics of the traffic between daemons: bytes, packets, losses, round trips and the rate of the
//! line. Tests that lose packets need root, `ip` and `tc`.

use gradwire_tests::launched::{Job, Launch, network::Pair};

use super::metrics::{Series, series, variable};

/// The value of a series for one peer; 0 if it does not exist.
fn of_peer(series: &Series, metric: &str, peer: &str) -> f64 {
    let key = format!("gradwire_daemon_network_{metric}{{peer_host=\"{peer}\"}}");
    series.get(&key).copied().unwrap_or_default()
}

/// The addresses of the daemons' metrics, by node. There are two ranks on each.
fn daemons(job: &Job) -> [String; 2] {
    [0, 2].map(|rank| variable(job, rank, "GRADWIRE_DAEMON_METRICS"))
}

#[test]
fn nodes_receive_all_sent_bytes() {
    let hosts = ["127.0.0.1", "127.0.0.2"];
    let launch = Launch::new().two_by_two().set("network.rate_mbit=1000").words(&["--verbose"]);
    let steps = ["attach", "loop:20:10000", "until:end", "leave"];
    let mut job = launch.rank(&steps).start();
    job.until_said("looped", 4);
    let daemons = daemons(&job);
    let both = job.wait_for("the same bytes at both ends", || {
        let both = daemons.each_ref().map(|address| series(address));
        let same = [(0, 1), (1, 0)].into_iter().all(|(from, to)| {
            let sent = of_peer(&both[from], "sent_bytes_total", hosts[to]);
            let received = of_peer(&both[to], "received_bytes_total", hosts[from]);
            // Each node sends the other at least as many bytes as the tensor has.
            sent == received && sent >= 20.0 * 40_000.0
        });
        same.then_some(both)
    });
    for (node, peer) in [(0, hosts[1]), (1, hosts[0])] {
        let series = &both[node];
        let sent = of_peer(series, "sent_bytes_total", peer);
        let packets = of_peer(series, "packets_total", peer);
        // No packet carries more than 64 KiB, and few packets carry no data.
        assert!(packets >= sent / 65_536.0, "{packets} packets for {sent} bytes");
        let retransmits = of_peer(series, "retransmits_total", peer);
        assert!((0.0..packets).contains(&retransmits), "{retransmits} of {packets}");
        let round_trip = of_peer(series, "round_trip_seconds", peer);
        assert!(round_trip > 0.0 && round_trip < 10.0, "{round_trip} s");
        assert_eq!(series["gradwire_daemon_line_rate_bytes"], 125e6);
    }
    job.allow("end");
    job.finish().assert_code(0);
}

#[test]
fn lost_packets_are_counted_as_retransmits() {
    let Some(pair) = Pair::new() else { return };
    let steps =
        ["attach", "loop:2:1000", "until:go", "loop:30:100000", "say:done", "until:end", "leave"];
    // Packets are lost after the connections have been made.
    let mut job = pair.launch().words(&["--verbose"]).rank(&steps).start();
    job.until_said("looped", 4);
    let daemons = daemons(&job);
    let read = || [0, 1].map(|host| pair.within(host, || series(&daemons[host])));
    let retransmits = |all: &[Series; 2]| -> f64 {
        let of = |host: usize| of_peer(&all[host], "retransmits_total", Pair::HOSTS[1 - host]);
        of(0) + of(1)
    };
    let before = read();
    for (host, series) in before.iter().enumerate() {
        // The rate of a virtual cable, if it has one.
        let shown = series.get("gradwire_daemon_line_rate_bytes").copied();
        assert_eq!(shown, pair.speed(host).map(|mbit| mbit * 125_000.0), "{series:?}");
    }
    // One packet in twenty. A packet has up to 64 KiB, so there are hundreds of them.
    let loses = pair.lose(13).is_some();
    job.allow("go");
    job.until_said("said", 4);
    if loses {
        let after = read();
        let more = retransmits(&after) - retransmits(&before);
        assert!(more > 0.0, "{before:?} {after:?}");
        pair.mend();
    }
    job.allow("end");
    job.finish().assert_code(0);
}
