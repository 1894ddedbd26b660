//! The messages between launcher and agent: lines of JSON, like in `gradwire_proto::launch`.
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
pub enum Order {
    /// The first order. Answered by Hello. Later releases keep the present fields of this message
    /// and its answer, so that different releases recognise each other.
    Begin {
        /// The launcher's release.
        version: String,
    },
    /// Asks for the time. Answered by Clock.
    Clock,
    /// Report the facts of the host, and listen. Answered by Facts.
    Listen {
        /// The number of the host.
        host: u32,
        /// The address by which others reach it.
        address: IpAddr,
        /// The secret that agents prove to know: 64 hexadecimal digits.
        secret: String,
        /// Settings.
        wanted: Wanted,
    },
    /// Dial these peers, all at once. Each is answered by Dialled.
    Dial {
        /// The peers.
        peers: Vec<Peer>,
        /// The time limit for each.
        limit_ms: u64,
    },
    /// Measure with one peer. Answered by Measured; both agents answer with a Received for each
    /// connection.
    Measure {
        /// The peer.
        peer: Peer,
        /// The number of connections.
        streams: u32,
        /// The time limit for a connection.
        limit_ms: u64,
    },
}

/// A host to dial.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Its number.
    pub host: u32,
    /// The purpose.
    pub purpose: Purpose,
    /// Where it listens.
    pub address: SocketAddr,
}

/// From an agent to the launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "report", rename_all = "snake_case")]
pub enum Report {
    /// The agent runs.
    Hello {
        /// Its release.
        version: String,
        /// The address by which ssh reached this host.
        address: Option<IpAddr>,
    },
    /// The time here.
    Clock {
        /// Microseconds since 1970.
        unix_us: i64,
    },
    /// The facts of the host.
    Facts {
        /// All of them.
        facts: Box<HostFacts>,
    },
    /// A host was dialled.
    Dialled {
        /// The peer.
        peer: Peer,
        /// Why it failed.
        failed: Option<String>,
    },
    /// A measurement has ended, except for bytes that still arrive.
    Measured {
        /// The other host.
        host: u32,
        /// The result, or why there is none.
        result: Result<Measured, String>,
        /// How many connections carry bytes. Both sides report each of them.
        streams: u32,
    },
    /// The bytes that arrived on one connection.
    Received {
        /// The sender.
        host: u32,
        /// The number of bytes.
        bytes: u64,
        /// How long they took, from the first to the last, in microseconds.
        us: u64,
    },
}

#[cfg(test)]
mod tests {
    use gradwire_proto::launch::{from_line, to_line};

    use super::*;

    #[test]
    fn messages_survive_the_line() {
        let address: SocketAddr = "[::1]:7".parse().unwrap();
        let peer = Peer { host: 3, purpose: Purpose::Coordinator, address };
        let order = Order::Measure { peer: peer.clone(), streams: 4, limit_ms: 9 };
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
