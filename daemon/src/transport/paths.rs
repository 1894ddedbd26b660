//! What the system knows of the line of this host and of the paths to the peers: how long a round
//! trip takes, how many packets were sent, and how many of them again.
//!
//! A scrape reads it from the sockets, and once more whoever closes one, so nothing is lost with a
//! connection. Lanes pay nothing for it. A scrape holds a socket while it reads it. So it never
//! reads a descriptor that has been closed and belongs to something else (TRUST); at worst it
//! closes the socket instead of its lane, some microseconds later. An event that such a socket
//! still causes may reach the connection that replaces it, which then looks once in vain.

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

/// The packets of a connection that have been counted, as the system counts them.
#[derive(Debug, Default)]
struct Counted {
    packets: u32,
    retransmits: u32,
}

/// The socket of a data connection. The last one who drops it closes it.
#[derive(Debug)]
pub(crate) struct DataSocket {
    pub(crate) socket: TcpStream,
    path: PathMetrics,
    counted: Mutex<Counted>,
}

impl DataSocket {
    /// Counts the packets since the last call. Returns the round trip, if there has been one.
    fn look(&self) -> Option<Duration> {
        let now = gradwire_net::path(&self.socket).ok()?;
        let mut counted = self.counted.lock();
        // The counts of the system wrap.
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

/// The paths to all peers of this node.
#[derive(Debug)]
pub(crate) struct Paths {
    hosts: Arc<[String]>,
    line: Line,
    /// The sockets that exist.
    sockets: Mutex<Vec<Weak<DataSocket>>>,
}

impl Paths {
    /// Without connections. The hosts are those of all nodes, and the line is this host's.
    pub(crate) fn new(hosts: Arc<[String]>, line: Line) -> Self {
        Self { hosts, line, sockets: Mutex::default() }
    }

    /// The socket of a new connection with a peer, which scrapes see from now on.
    pub(crate) fn watch(&self, peer: NodeId, socket: TcpStream) -> Arc<DataSocket> {
        let path = PathMetrics::new(host_label(peer.index(), &self.hosts[peer.index()]));
        let socket = Arc::new(DataSocket { socket, path, counted: Mutex::default() });
        let mut sockets = self.sockets.lock();
        sockets.retain(|socket| socket.strong_count() > 0);
        sockets.push(Arc::downgrade(&socket));
        socket
    }
}

impl Paths {
    /// The packets that all connections which exist have sent again.
    pub(crate) fn retransmits(&self) -> u64 {
        let sockets: Vec<Weak<DataSocket>> = self.sockets.lock().clone();
        let sockets = sockets.iter().filter_map(Weak::upgrade);
        let paths = sockets.filter_map(|socket| gradwire_net::path(&socket.socket).ok());
        paths.map(|path| u64::from(path.retransmits)).sum()
    }

    /// Bytes per second of the line of this host, if that is known.
    pub(crate) fn line_rate(&self) -> Option<u64> {
        self.line.rate()
    }
}

impl Collect for Paths {
    fn collect(&self) {
        // A lane that makes a connection does not wait for the system calls.
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

    /// CLEAN: a scrape keeps no socket, and what is closed meanwhile is not read.
    #[test]
    fn connections_may_come_and_go_while_they_are_read() {
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
