//! Chooses the interface of each host that all other hosts reach. Pure.

use std::cmp::Reverse;

use crate::facts::{Facts, Offer, Purpose};

/// A host without an interface that all others reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreached {
    /// Its position among the hosts.
    pub host: usize,
    /// The hosts that reach it by no interface. If there are none: all other hosts, which have no
    /// such interface in common.
    pub from: Vec<usize>,
}

/// The interfaces by which each host is reached by all others, in the order of the hosts: a value
/// of `data.interface`, or `None` for a host that offers nothing but its loopback. The fastest
/// counts, or else the one by which the launcher reaches the host, or else the first.
///
/// # Errors
/// The hosts for which there is none.
pub fn interfaces(facts: &Facts) -> Result<Vec<Option<&Offer>>, Vec<Unreached>> {
    let (mut chosen, mut unreached) = (Vec::new(), Vec::new());
    for host in 0..facts.hosts.len() {
        match interface(facts, host) {
            Ok(offer) => chosen.push(offer),
            Err(from) => unreached.push(Unreached { host, from }),
        }
    }
    if unreached.is_empty() { Ok(chosen) } else { Err(unreached) }
}

fn interface(facts: &Facts, host: usize) -> Result<Option<&Offer>, Vec<usize>> {
    let others: Vec<usize> = (0..facts.hosts.len()).filter(|from| *from != host).collect();
    let Ok(known) = &facts.hosts[host].facts else { return Err(others) };
    let reaches = |from: usize, offer: &Offer| {
        facts.dialled.iter().any(|dialled| {
            (dialled.from, dialled.to, dialled.purpose) == (from, host, Purpose::Offer)
                && dialled.address == offer.address
                && dialled.failed.is_none()
        })
    };
    // A job on one host uses its loopback, and no other host has to reach that.
    let own = facts.hosts[host].address;
    if others.is_empty() || own.is_some_and(|own| own.is_loopback()) {
        return Ok(None);
    }
    // If several hosts have the same address, such as that of a bridge for containers, none of them
    // reaches another one by it.
    let is_shared = |offer: &Offer| {
        let hosts = others.iter().filter_map(|other| facts.hosts[*other].facts.as_ref().ok());
        let mut all = hosts.flat_map(|other| &other.offers);
        all.any(|other| other.address.ip() == offer.address.ip())
    };
    let reached = known.offers.iter().enumerate().filter(|(_, offer)| !is_shared(offer));
    let reached = reached.filter(|(_, offer)| others.iter().all(|from| reaches(*from, offer)));
    let best = reached.min_by_key(|(place, offer)| {
        let is_own = own == Some(offer.address.ip());
        (Reverse(offer.mbit), !is_own, *place)
    });
    if let Some((_, offer)) = best {
        return Ok(Some(offer));
    }
    let by_none = |from: &usize| !known.offers.iter().any(|offer| reaches(*from, offer));
    let from: Vec<_> = others.iter().copied().filter(by_none).collect();
    Err(if from.is_empty() { others } else { from })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        facts::{Dialled, Host},
        findings::tests::healthy,
    };

    /// An interface, its rate, and the host that does not reach it.
    type Offered<'a> = (&'a str, Option<u32>, Option<usize>);

    /// Three hosts that offer these interfaces.
    fn facts(offers: [&[Offered<'_>]; 3]) -> Facts {
        let mut facts = healthy();
        for (to, offers) in offers.into_iter().enumerate() {
            for (net, (interface, mbit, unreached)) in (1..).zip(offers) {
                let address = format!("10.{net}.0.{to}:7").parse().unwrap();
                let offer = Offer { address, interface: (*interface).to_owned(), mbit: *mbit };
                facts.hosts[to].facts.as_mut().unwrap().offers.push(offer);
                for from in (0..3).filter(|from| *from != to) {
                    let failed = (*unreached == Some(from)).then(|| "refused".to_owned());
                    let purpose = Purpose::Offer;
                    facts.dialled.push(Dialled { from, to, purpose, address, failed });
                }
            }
        }
        facts
    }

    fn chosen(facts: &Facts) -> Vec<&str> {
        let all = interfaces(facts).unwrap();
        all.into_iter().map(|offer| offer.map_or("-", |offer| offer.interface.as_str())).collect()
    }

    #[test]
    fn the_fastest_that_all_reach_is_chosen() {
        let fast = ("fast", Some(100_000), None);
        let slow = ("slow", Some(1000), None);
        let virtual_one = ("virtual", None, None);
        let far = ("far", Some(200_000), Some(1));
        let mut facts = facts([&[slow, fast], &[virtual_one, slow], &[far, virtual_one]]);
        assert_eq!(chosen(&facts), ["fast", "slow", "virtual"]);
        facts.hosts[0].address = Some("127.0.0.1".parse().unwrap());
        assert_eq!(chosen(&facts), ["-", "slow", "virtual"]);
    }

    #[test]
    fn of_equals_the_launchers_counts() {
        let (a, b) = (("a", None, None), ("b", None, None));
        let mut facts = facts([&[a, b], &[a, b], &[a, b]]);
        let own = |host: &mut Host, text: &str| host.address = Some(text.parse().unwrap());
        own(&mut facts.hosts[1], "10.2.0.1");
        assert_eq!(chosen(&facts), ["a", "b", "a"]);
    }

    #[test]
    fn an_address_of_several_hosts_is_not_chosen() {
        let (bridge, a) = (("bridge", Some(10_000), None), ("a", None, None));
        let mut facts = facts([&[bridge, a], &[bridge, a], &[a, a]]);
        for host in &mut facts.hosts[..2] {
            let shared = "172.17.0.1:9".parse().unwrap();
            host.facts.as_mut().unwrap().offers[0].address = shared;
        }
        for dialled in facts.dialled.iter_mut().filter(|dialled| dialled.to < 2) {
            if dialled.address.ip().to_string().starts_with("10.1.") {
                dialled.address = "172.17.0.1:9".parse().unwrap();
            }
        }
        assert_eq!(chosen(&facts), ["a", "a", "a"]);
    }

    #[test]
    fn hosts_that_can_not_be_reached_are_named() {
        let to_all = ("a", None, None);
        let two = [("a", None, Some(1)), ("b", None, Some(1))];
        let split = [("a", None, Some(0)), ("b", None, Some(1))];
        let all = facts([&two, &[to_all], &split]);
        let expected =
            [Unreached { host: 0, from: vec![1] }, Unreached { host: 2, from: vec![0, 1] }];
        assert_eq!(interfaces(&all).unwrap_err(), expected);
    }
}
