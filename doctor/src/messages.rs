//! The messages between launcher and agent: lines of JSON, like in `gradwire_services::launch`.
//!
//! ```text
//! launcher ── Begin ──► agent            (standard input; closing it ends the agent)
//!          ◄── Hello ──
//!          ── Clock… ──►  ◄── Clock… ──
//!          ── Listen ──►  ◄── Facts ──
//!          ── Dial ──►    ◄── Dialled… ──
//!          ── Measure ──► ◄── Measured, Received… ──
//! ```
//!
//! An agent that another one dials reports only `Received`. The secret of the run is sent only in
//! these messages, never on a command line, where every user of a machine can read it (TRUST).

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::facts::{HostFacts, Measured, Purpose, Wanted};

/// From the launcher to an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub enum Order {
    /// The first order. Answered by Hello. Later releases keep the present fields of this message
    /// and its answer, so that different releases recognise each other.
    Begin { version: String },
    /// Asks for the time. Answered by Clock.
    Clock,
    /// Report the facts of the host, and listen. Answered by Facts.
    /// `address` is the one by which others reach it; `secret` has 64 hexadecimal digits.
    Listen { host: u32, address: IpAddr, secret: String, wanted: Box<Wanted> },
    /// Dial these peers, all at once. Each is answered by Dialled.
    Dial { peers: Vec<Peer>, limit_ms: u64 },
    /// Measure with one peer. Answered by Measured; both agents answer with a Received for each
    /// connection. The connections for the rate take turns among `peer` and `others`, its further
    /// addresses.
    Measure { peer: Peer, others: Vec<SocketAddr>, streams: u32, limit_ms: u64 },
}

/// A host to dial.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub struct Peer {
    pub host: u32,
    pub purpose: Purpose,
    pub address: SocketAddr,
}

/// From an agent to the launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub enum Report {
    /// The agent runs.
    /// `address` is the one by which ssh reached this host.
    Hello { version: String, address: Option<IpAddr> },
    /// The time here, in microseconds since 1970.
    Clock { unix_us: i64 },
    /// The facts of the host.
    Facts { facts: Box<HostFacts> },
    /// A host was dialled; `failed` has the reason.
    Dialled { peer: Peer, failed: Option<String> },
    /// The measurement with a host has ended, except for bytes that still arrive: both sides report
    /// each of the `streams` connections.
    Measured { host: u32, result: Result<Measured, String>, streams: u32 },
    /// The bytes that arrived from a host on one connection, and the time from the first to the
    /// last.
    Received { host: u32, bytes: u64, us: u64 },
}

#[cfg(test)]
mod tests {
    use gradwire_services::launch::{from_line, to_line};

    use super::*;

    #[test]
    fn messages_survive_the_line() {
        let address: SocketAddr = "[::1]:7".parse().unwrap();
        let peer = Peer { host: 3, purpose: Purpose::Coordinator, address };
        let others = vec!["10.0.0.1:8".parse().unwrap()];
        let order = Order::Measure { peer: peer.clone(), others, streams: 4, limit_ms: 9 };
        assert_eq!(from_line::<Order>(&to_line(&order)).unwrap(), order);
        let report = Report::Dialled { peer, failed: Some("timed out\n".to_owned()) };
        assert_eq!(from_line::<Report>(&to_line(&report)).unwrap(), report);
        let result = Ok(Measured { round_trip_us: 5, path_mtu: None, lost_large: None });
        let report = Report::Measured { host: 1, result, streams: 2 };
        assert_eq!(from_line::<Report>(&to_line(&report)).unwrap(), report);
    }

    /// Releases recognise each other by these lines: they can't change.
    #[test]
    fn the_first_messages_stay_as_they_are() {
        let begin = to_line(&Order::Begin { version: "1".to_owned() });
        assert_eq!(begin, "{\"order\":\"begin\",\"version\":\"1\"}\n");
        let hello = r#"{"report":"hello","version":"9","address":null,"further":1}"#;
        let expected = Report::Hello { version: "9".to_owned(), address: None };
        assert_eq!(from_line::<Report>(hello).unwrap(), expected);
    }
}
