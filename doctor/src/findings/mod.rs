//! Decides what the facts mean for a job with these settings, and what to do about it. Pure.
//!
//! - [`finding`]: the result of a check
//! - [`host`]: one host
//! - [`between`]: the network between two hosts
//! - [`alike`]: properties that all hosts should share

pub mod alike;
pub mod between;
pub mod finding;
pub mod host;
#[cfg(test)]
pub(crate) mod tests;

use gradwire_settings::Settings;

pub use self::finding::{Check, Finding, Status};
use crate::facts::Facts;

/// All findings, in the order of the checks and then of the hosts.
pub fn all(facts: &Facts, settings: &Settings) -> Vec<Finding> {
    let mut all = Vec::new();
    let needs = host::Needs::new(facts, settings);
    for one in &facts.hosts {
        all.extend(host::findings(one, &facts.version, &needs, settings));
    }
    all.extend(between::findings(facts, settings));
    all.extend(alike::findings(facts));
    // A stable sort: the hosts of one check keep their order.
    all.sort_by_key(|finding| finding.check);
    all
}
