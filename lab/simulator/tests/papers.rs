//! Published results: each is within its bounds.

use gradwire_simulator::{
    paper::{byteps, formulas, rat, ring, torus},
    table::Results,
};

fn all_hold(results: &Results) {
    let failures: Vec<_> = results.failures().collect();
    assert!(!results.checks.is_empty());
    assert!(failures.is_empty(), "{} of {}: {failures:#?}", failures.len(), results.checks.len());
}

#[test]
fn formulas_are_those_of_the_literature() {
    all_hold(&formulas::run());
}

/// A ring takes as long as its bytes, and each host has one sender at a time.
#[test]
fn a_ring_moves_less_than_a_master() {
    all_hold(&ring::run());
}

#[test]
fn a_torus_has_short_chains_and_a_rings_bytes() {
    all_hold(&torus::run());
}

#[test]
fn servers_take_their_share() {
    all_hold(&byteps::run(8));
    for (servers, time) in [(0, 1.75), (1, 1.60), (4, 1.273), (8, 1.00)] {
        assert!((byteps::expected(8, servers) / time - 1.0).abs() < 0.01);
    }
}

#[test]
fn oversubscription_slows_servers_as_predicted() {
    let mut results = Results::default();
    let extent = rat::Extent { oversubscriptions: vec![2, 4, 8], ..rat::Extent::default() };
    rat::oversubscription(&extent, &mut results);
    rat::timeouts(&rat::Extent { oversubscriptions: vec![4], ..extent }, &mut results);
    all_hold(&results);
    for (o, expected) in [(2.0, 1.60), (4.0, 3.10), (8.0, 6.10), (12.0, 9.09)] {
        assert!((rat::slow_down(o, 8.0 * o, 4.0) - expected).abs() < 0.01);
    }
}

/// The cells of the grid with bounds.
fn hosts_stop(cells: &[(u32, u32, u64)]) {
    let mut results = Results::default();
    let extent = rat::Extent { cells: cells.to_vec(), ..rat::Extent::default() };
    rat::faults(&extent, &mut results);
    all_hold(&results);
}

#[test]
fn hosts_that_stop_delay_a_ring_as_published() {
    hosts_stop(&[(8, 20, 10), (12, 20, 10)]);
}

#[test]
fn many_stopped_hosts_delay_a_ring_most() {
    hosts_stop(&[(24, 50, 20)]);
}
