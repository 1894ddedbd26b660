use std::net::{IpAddr, SocketAddr};

use gradwire_settings::{Layers, Settings};
use strum::IntoEnumIterator;

use super::*;
use crate::facts::{
    Buffers, Clock, Dialled, Gpus, Host, HostFacts, HugePageFacts, Interface, Limit, Measured,
    Memory, Pair, Purpose, Refused, Torch,
};

fn address(host: usize) -> SocketAddr {
    SocketAddr::new(IpAddr::from([10, 0, 0, host as u8 + 1]), 7)
}

fn interface(name: &str, mbit: u32) -> Interface {
    Interface { name: name.to_owned(), mtu: Some(9000), mbit: Some(mbit) }
}

fn host(number: usize) -> Host {
    let limit = Limit { soft: Some(4096), hard: Some(1 << 20) };
    let facts = HostFacts {
        gradwired: Ok("1.0".to_owned()),
        data: Ok(vec![address(number)]),
        offers: Vec::new(),
        coordinator: (number == 0).then(|| Ok(address(0))),
        heartbeats: (number == 0).then(|| Ok(address(0))),
        metrics: Ok(()),
        interface: Some(interface("eth0", 25_000)),
        others: vec![interface("eth1", 1000)],
        open_files: limit,
        memlock: Limit { soft: None, hard: None },
        memory: Some(Memory { bytes: 64 << 30, limit: "MemAvailable".to_owned() }),
        memfd: Ok(()),
        huge_pages: HugePageFacts { shared: Some("advise".to_owned()), required: None, free: None },
        buffers: Buffers { asked: Some([4 << 20; 2]), given: Some([6 << 20, 4 << 20]) },
        congestion: Ok("cubic".to_owned()),
        cores: 16,
        level: "avx2".to_owned(),
        has_levels: true,
        gpus: Gpus { models: vec!["H100".to_owned(); 8], driver: None, built_in: 8 },
        torch: Torch::Version("2.9".to_owned()),
        package: Some("1.0".to_owned()),
    };
    Host {
        name: format!("n{number}"),
        ranks: 8,
        local: false,
        address: Some(address(number).ip()),
        clock: Some(Clock { ahead_us: 1000 * number as i64, wrong_by_us: 100 }),
        facts: Ok(facts),
        lost: None,
    }
}

/// Three hosts as they should be.
pub(crate) fn healthy() -> Facts {
    let hosts: Vec<_> = (0..3).map(host).collect();
    let all = (0..3).flat_map(|from| (0..3).map(move |to| (from, to)));
    let dialled = all.filter(|(from, to)| from != to).map(|(from, to)| Dialled {
        from,
        to,
        purpose: Purpose::Data,
        address: address(to),
        failed: None,
    });
    let pair = |(from, to)| {
        let measured = Measured { round_trip_us: 50, path_mtu: Some(9000), lost_large: None };
        Pair { from, to, measured: Ok(measured), mbit: [Some(20_000.0), Some(21_000.0)] }
    };
    Facts {
        version: "1.0".to_owned(),
        hosts,
        dialled: dialled.collect(),
        pairs: [(0, 1), (0, 2), (1, 2)].map(pair).into(),
    }
}

fn settings(flags: &[&str]) -> Settings {
    let flags = flags.iter().map(ToString::to_string).collect();
    Settings::load(&Layers { flags, ..Layers::default() }).unwrap().settings
}

fn facts_of(facts: &mut Facts, host: usize) -> &mut HostFacts {
    facts.hosts[host].facts.as_mut().unwrap()
}

/// The problems: status, check, place, and what was found.
fn problems(facts: &Facts, flags: &[&str]) -> Vec<String> {
    let all = all(facts, &settings(flags));
    let bad = all.into_iter().filter(|finding| finding.status != Status::Pass);
    bad.map(|finding| {
        assert!(!finding.remedy.is_empty(), "{finding:?}");
        let place = [finding.host, finding.peer].into_iter().flatten().collect::<Vec<_>>();
        format!("{} {} {}: {}", finding.status, finding.check, place.join("-"), finding.found)
    })
    .collect()
}

#[test]
fn healthy_hosts_pass_every_check() {
    let facts = healthy();
    let all = all(&facts, &settings(&[]));
    for check in Check::iter() {
        assert!(all.iter().any(|finding| finding.check == check), "{check} is never found");
    }
    assert_eq!(problems(&facts, &[]), Vec::<String>::new());
    assert!(all.is_sorted_by_key(|finding| finding.check));
}

#[test]
fn each_wrong_fact_of_a_host_is_a_problem() {
    type Wrong = fn(&mut HostFacts);
    let cases: &[(Wrong, &str)] = &[
        (
            |f| f.gradwired = Ok("0.9".to_owned()),
            "fail versions n1: gradwired is 0.9, but gradwire is 1.0",
        ),
        (|f| f.gradwired = Err("no gradwired".to_owned()), "fail versions n1: no gradwired"),
        (
            |f| f.package = Some("0.9".to_owned()),
            "warn versions n1: the Python package is 0.9, but gradwire is 1.0",
        ),
        (|f| f.data = Err("taken".to_owned()), "fail ports n1: taken"),
        (|f| f.coordinator = Some(Err("taken".to_owned())), "fail ports n1: coordinator: taken"),
        (|f| f.heartbeats = Some(Err("taken".to_owned())), "warn ports n1: coordinator: taken"),
        (|f| f.metrics = Err("none free".to_owned()), "warn ports n1: metrics: none free"),
        (|f| f.interface = None, "warn address n1: 10.0.0.2 is not an address of this host"),
        (|f| f.others[0].mbit = Some(100_000), "warn address n1: 10.0.0.2 on eth0, 25000 Mbit/s"),
        (
            |f| f.open_files.hard = Some(100),
            "fail open_files n1: 4096 (up to 100), a daemon needs 136",
        ),
        (
            |f| f.open_files.soft = Some(256),
            "warn open_files n1: 256 (up to 1048576), a daemon needs 136",
        ),
        (|f| f.memlock.soft = Some(64 << 10), "warn memlock n1: 64 KiB"),
        (
            |f| f.memory.as_mut().unwrap().bytes = 500 << 20,
            "fail memory n1: 500 MiB free (MemAvailable), a job starts with 552 MiB",
        ),
        (
            |f| f.memory.as_mut().unwrap().bytes = 2 << 30,
            "warn memory n1: 2048 MiB free (MemAvailable), a job starts with 552 MiB",
        ),
        (|f| f.memfd = Err("refused".to_owned()), "fail memfd n1: refused"),
        (
            |f| f.huge_pages.shared = Some("never".to_owned()),
            "warn huge_pages n1: none for shared memory (shmem_enabled is never)",
        ),
        (
            |f| f.buffers.given = Some([6 << 20, 128 << 10]),
            "warn socket_buffers n1: up to 6144 KiB to receive and 128 KiB to send",
        ),
        (
            |f| f.congestion = Err("refused".to_owned()),
            "fail congestion_control n1: '' is not available: refused",
        ),
        (
            |f| f.congestion = Ok("bbr".to_owned()),
            "warn congestion_control : hosts differ: bbr on n1; cubic on n0, n2",
        ),
        (|f| f.cores = 4, "warn cores n1: cores: 4, ranks: 8"),
        (
            |f| f.level = "avx512".to_owned(),
            "warn cpu_level : hosts differ: avx2 on n0, n2; avx512 on n1",
        ),
        (
            |f| f.gpus.models.truncate(4),
            "warn gpus : hosts differ: 4 × H100 on n1; 8 × H100 on n0, n2",
        ),
        (
            |f| f.torch = Torch::Version("2.8".to_owned()),
            "warn torch : hosts differ: 2.8 on n1; 2.9 on n0, n2",
        ),
    ];
    for (wrong, expected) in cases {
        let mut facts = healthy();
        wrong(facts_of(&mut facts, 1));
        assert_eq!(problems(&facts, &[]), [*expected]);
    }
}

#[test]
fn the_fastest_of_several_interfaces_is_named() {
    let mut facts = healthy();
    facts_of(&mut facts, 1).others =
        [40_000, 100_000, 50_000].map(|mbit| interface(&format!("eth{mbit}"), mbit)).into();
    let all = all(&facts, &settings(&[]));
    let bad = all.iter().find(|finding| finding.status == Status::Warn).unwrap();
    assert!(bad.remedy.starts_with("eth100000 is faster, 100000 Mbit/s"), "{bad:?}");
}

#[test]
fn each_check_is_documented() {
    let text = include_str!("../../../docs/doctor.md");
    for check in Check::iter() {
        assert!(text.contains(&format!("\n### {check}\n")), "{check} is not in docs/doctor.md");
    }
}

/// A missing or unknown fact is not a problem if all hosts are alike.
#[test]
fn missing_facts_are_not_problems() {
    let mut facts = healthy();
    for host in 0..3 {
        let facts = facts_of(&mut facts, host);
        facts.gpus = Gpus::default();
        facts.torch = Torch::NoPython;
        facts.package = None;
        facts.memory = None;
        facts.buffers = Buffers { asked: None, given: None };
        facts.huge_pages.shared = None;
        facts.interface = Some(Interface { name: "lo".to_owned(), mtu: None, mbit: None });
        (facts.level, facts.has_levels) = ("baseline".to_owned(), false);
    }
    assert_eq!(problems(&facts, &[]), Vec::<String>::new());
    facts_of(&mut facts, 1).torch = Torch::Unknown("no answer".to_owned());
    assert_eq!(problems(&facts, &[]), Vec::<String>::new(), "it may be the same one");
}

/// A server shares no memory with ranks and runs no model, but it reduces and sends.
#[test]
fn a_server_lacks_nothing_that_only_ranks_need() {
    let mut facts = healthy();
    facts.hosts[2].ranks = 0;
    let server = facts_of(&mut facts, 2);
    server.package = Some("0.9".to_owned());
    server.open_files.soft = Some(256);
    server.memlock.soft = Some(64 << 10);
    server.memfd = Err("refused".to_owned());
    server.huge_pages.shared = Some("never".to_owned());
    server.gpus = Gpus { models: Vec::new(), driver: None, built_in: 8 };
    server.torch = Torch::NoPython;
    assert_eq!(problems(&facts, &[]), Vec::<String>::new());
    let server = facts_of(&mut facts, 2);
    server.level = "avx512".to_owned();
    server.open_files.hard = Some(63);
    server.data = Err("taken".to_owned());
    let expected = [
        "fail ports n2: taken",
        "fail open_files n2: 256 (up to 63), a daemon needs 72",
        "warn cpu_level : hosts differ: avx2 on n0, n1; avx512 on n2",
    ];
    assert_eq!(problems(&facts, &[]), expected);
}

#[test]
fn settings_decide_what_is_needed() {
    let mut facts = healthy();
    for host in 0..3 {
        facts_of(&mut facts, host).huge_pages.shared = Some("never".to_owned());
    }
    assert_eq!(problems(&facts, &["worker.huge_pages=never"]), Vec::<String>::new());
    let found = problems(&healthy(), &["data.socket_buffer_bytes=8MiB"]);
    assert_eq!(found.len(), 3, "{found:?}");
    let found = problems(&healthy(), &["data.lanes=16", "data.streams=16"]);
    assert_eq!(found, Vec::<String>::new(), "1152 descriptors fit into the hard limit");
    facts_of(&mut facts, 0).metrics = Err("taken".to_owned());
    let flags = ["worker.huge_pages=never", "metrics.listen=127.0.0.1:7"];
    assert_eq!(problems(&facts, &flags), ["fail ports n0: metrics: taken"]);
}

#[test]
fn an_unreached_or_lost_host_is_one_problem() {
    let mut facts = healthy();
    let refused = |is_version| Err(Refused { is_version, ..Refused::new("it is so", "") });
    facts.hosts[2].facts = refused(false);
    facts.hosts[2].clock = None;
    facts.dialled.retain(|dialled| dialled.to != 2 && dialled.from != 2);
    facts.pairs.truncate(1);
    assert_eq!(problems(&facts, &[]), ["fail reachability n2: it is so"]);
    facts.hosts[2].facts = refused(true);
    assert_eq!(problems(&facts, &[]), ["fail versions n2: it is so"]);
    let mut facts = healthy();
    facts.hosts[0].lost = Some("no answer".to_owned());
    assert_eq!(problems(&facts, &[]), ["fail reachability n0: it was lost: no answer"]);
}

#[test]
fn each_problem_between_two_hosts_names_both() {
    fn measured(facts: &mut Facts) -> &mut Measured {
        facts.pairs[2].measured.as_mut().unwrap()
    }
    type Wrong = fn(&mut Facts);
    let cases: &[(Wrong, &str)] = &[
        (
            |f| f.dialled[0].failed = Some("no answer".to_owned()),
            "fail ports n0-n1: data at 10.0.0.2:7 can't be reached: no answer",
        ),
        (
            |f| {
                f.dialled[0].purpose = Purpose::Heartbeats;
                f.dialled[0].failed = Some("no answer".to_owned());
            },
            "warn ports n0-n1: coordinator by UDP at 10.0.0.2:7 can't be reached: no answer",
        ),
        (|f| measured(f).round_trip_us = 20_000, "warn latency n1-n2: round trip 20000 µs"),
        (|f| measured(f).round_trip_us = 1500, "warn latency n1-n2: round trip 1500 µs"),
        (
            |f| f.pairs[2].measured = Err("it broke".to_owned()),
            "fail latency n1-n2: it can't be measured: it broke",
        ),
        (
            |f| measured(f).path_mtu = Some(1500),
            "warn path_mtu n1-n2: 1500, interfaces 9000 and 9000",
        ),
        (
            |f| measured(f).lost_large = Some("no answer".to_owned()),
            "fail path_mtu n1-n2: small messages pass, a large one does not: no answer",
        ),
        (
            |f| f.pairs[2].mbit[1] = Some(1000.0),
            "warn bandwidth n1-n2: 20000 Mbit/s, and 1000 back at once",
        ),
        (|f| f.pairs[2].mbit[1] = None, "warn bandwidth n1-n2: no data arrived"),
        (
            |f| f.hosts[2].clock = Some(Clock { ahead_us: -700_000, wrong_by_us: 50 }),
            "warn clock n2: -700.0 ms from n0, ±0.1",
        ),
    ];
    for (wrong, expected) in cases {
        let mut facts = healthy();
        wrong(&mut facts);
        let found = problems(&facts, &[]);
        let expected: Vec<&str> = vec![expected];
        assert_eq!(found, expected);
    }
    let mut facts = healthy();
    facts_of(&mut facts, 2).interface.as_mut().unwrap().mtu = Some(1500);
    for pair in &mut facts.pairs {
        pair.measured.as_mut().unwrap().path_mtu = Some(1500);
    }
    // The other two hosts have 9000, so their path is a problem, too.
    let found = problems(&facts, &[]);
    assert_eq!(found[1], "warn path_mtu n0-n2: 1500, interfaces 9000 and 1500", "{found:?}");
}

#[test]
fn a_rate_is_compared_with_the_setting() {
    let facts = healthy();
    assert_eq!(problems(&facts, &["network.rate_mbit=24000"]), Vec::<String>::new());
    let found = problems(&facts, &["network.rate_mbit=40000"]);
    assert_eq!(found.len(), 3, "{found:?}");
    // A clock that was slow to answer may be right.
    let mut facts = healthy();
    facts.hosts[1].clock = Some(Clock { ahead_us: 700_000, wrong_by_us: 300_000 });
    assert_eq!(problems(&facts, &[]), Vec::<String>::new());
}
