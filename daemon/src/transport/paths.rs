//! The system's measurements of this host's line and of the paths to the peers: round trips,
//! packets sent, and retransmissions.
//!
//! A scrape reads them from the sockets; they are read once more when a socket is closed, so
//! nothing is lost with a connection. Lanes have no cost from this. A scrape holds a socket while
//! it reads it, so it never reads a descriptor that has been closed and reused (TRUST); at worst
//! the scrape closes the socket instead of its lane, some microseconds later. A late event of such
//! a socket may reach the connection that replaces it, which then checks its socket once in vain.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};

use gradwire_proto::NodeId;
use gradwire_telemetry::{Collect, catalog::host_label};
use mio::net::TcpStream;
use parking_lot::Mutex;

use super::line::Line;
use crate::metrics::{self, PathMetrics};

/// The packets of a connection that have already been counted, as the system counts them.
#[derive(Debug, Default)]
struct Counted {
    packets: u32,
    retransmits: u32,
}

/// The socket of a data connection. The last drop closes it.
#[derive(Debug)]
pub(crate) struct DataSocket {
    pub(crate) socket: TcpStream,
    path: PathMetrics,
    counted: Mutex<Counted>,
}

impl DataSocket {
    /// Counts the packets since the last call. Returns the round trip, if it is known.
    fn look(&self) -> Option<Duration> {
        let now = gradwire_net::path(&self.socket).ok()?;
        let mut counted = self.counted.lock();
        // The system's counts wrap around.
        let since = |now: u32, before: &mut u32| now.wrapping_sub(std::mem::replace(before, now));
        let packets = since(now.packets, &mut counted.packets);
        self.path.sent(packets, since(now.retransmits, &mut counted.retransmits));
        Some(now.round_trip).filter(|round_trip| !round_trip.is_zero())
    }
}

impl Drop for DataSocket {
    fn drop(&mut self) {
        self.look();
    }
}

#[derive(Debug)]
pub(crate) struct Paths {
    hosts: Arc<[String]>,
    line: Line,
    sockets: Mutex<Vec<Weak<DataSocket>>>,
}

impl Paths {
    /// No connections yet. `hosts` are those of all nodes, and `line` is this host's.
    pub(crate) fn new(hosts: Arc<[String]>, line: Line) -> Self {
        Self { hosts, line, sockets: Mutex::default() }
    }

    /// Adds the socket of a new connection with a peer.
    pub(crate) fn watch(&self, peer: NodeId, socket: TcpStream) -> Arc<DataSocket> {
        let path = PathMetrics::new(host_label(peer.index(), &self.hosts[peer.index()]));
        let socket = Arc::new(DataSocket { socket, path, counted: Mutex::default() });
        let mut sockets = self.sockets.lock();
        sockets.retain(|socket| socket.strong_count() > 0);
        sockets.push(Arc::downgrade(&socket));
        socket
    }

    /// The retransmitted packets of all existing connections.
    pub(crate) fn retransmits(&self) -> u64 {
        let sockets: Vec<Weak<DataSocket>> = self.sockets.lock().clone();
        let sockets = sockets.iter().filter_map(Weak::upgrade);
        let paths = sockets.filter_map(|socket| gradwire_net::path(&socket.socket).ok());
        paths.map(|path| u64::from(path.retransmits)).sum()
    }

    /// The rate of this host's line in bytes per second, if known.
    pub(crate) fn line_rate(&self) -> Option<u64> {
        self.line.rate()
    }
}

impl Collect for Paths {
    fn collect(&self) {
        // Cloned, so that a lane that makes a connection does not wait for the system calls.
        let sockets: Vec<Weak<DataSocket>> = self.sockets.lock().clone();
        let mut slowest: BTreeMap<String, (Duration, PathMetrics)> = BTreeMap::new();
        for socket in sockets.iter().filter_map(Weak::upgrade) {
            let Some(round_trip) = socket.look() else { continue };
            let (longest, _) = slowest
                .entry(socket.path.peer().to_owned())
                .or_insert_with(|| (round_trip, socket.path.clone()));
            *longest = round_trip.max(*longest);
        }
        for (round_trip, path) in slowest.into_values() {
            path.takes(round_trip);
        }
        if let Some(rate) = self.line.rate() {
            metrics::line_rate(rate);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        net::{TcpListener, TcpStream as Plain},
        thread,
    };

    use super::*;

    /// The other end of a connection, and this one.
    fn pair(paths: &Paths) -> (Plain, Arc<DataSocket>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = Plain::connect(listener.local_addr().unwrap()).unwrap();
        let here = listener.accept().unwrap().0;
        here.set_nonblocking(true).unwrap();
        (there, paths.watch(NodeId(1), TcpStream::from_std(here)))
    }

    /// CLEAN: a scrape keeps no socket, and does not read sockets that were closed meanwhile.
    #[test]
    fn scrapes_survive_closing_connections() {
        let paths = Arc::new(Paths::new(["a".to_owned(), "b".to_owned()].into(), Line::Unknown));
        let scraping = paths.clone();
        let scrapes = thread::spawn(move || (0..2000).for_each(|_| scraping.collect()));
        let mut gone = Vec::new();
        while !scrapes.is_finished() {
            let (there, here) = pair(&paths);
            (&here.socket).write_all(b"data").unwrap();
            gone.push((there, Arc::downgrade(&here)));
            if gone.len() > 16 {
                gone.clear();
            }
        }
        scrapes.join().unwrap();
        assert!(gone.iter().all(|(_, socket)| socket.upgrade().is_none()));
        let (_there, here) = pair(&paths);
        assert_eq!(paths.sockets.lock().len(), 1, "only those that exist");
        (&here.socket).write_all(b"data").unwrap();
        paths.collect();
        assert!(here.counted.lock().packets > 0);
    }
}
