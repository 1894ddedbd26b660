//! The data connections of a daemon: Hellos and frames with the real checks, and the real record of
//! what was sent ([`Sent`]), with which a connection continues after a break.

use std::collections::VecDeque;

use gradwire_daemon::transport::{
    frame::{Frame, FrameError, HEADER_BYTES, Header, Totals},
    handshake::{Attempt, ConnectionId, HELLO_BYTES, Identity, check_hello, hello},
    sent::{Chunk, Due, Payload, Sent},
};
use gradwire_proto::{Epoch, Failure, FailureKind, NodeId};

use crate::{
    agents::address,
    daemon::{Daemon, DaemonIn},
    plants::Plant,
    world::{Conn, Pid, Time, What, World, ms},
};

/// How long a broken connection may be missing (`recovery.return_timeout_ms`).
pub(crate) const RETURN: Time = Time::from_secs(10);

/// All connections that follow each other to one peer.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) sent: Sent,
    /// Chunks that are not given to the connection yet.
    pub(crate) waiting: VecDeque<Chunk>,
    /// What was received of the next frame, and of all frames.
    incoming: Vec<u8>,
    read: u64,
    conn: Option<u64>,
    /// Whether frames may be sent.
    is_open: bool,
    attempt: u32,
    /// The time since which the connection is missing.
    down: Option<Time>,
}

impl Line {
    pub(crate) fn new() -> Self {
        Self {
            sent: Sent::new(true),
            waiting: VecDeque::new(),
            incoming: Vec::new(),
            read: 0,
            conn: None,
            is_open: false,
            attempt: 0,
            down: None,
        }
    }

    /// Asks the system what the peer's system has acknowledged.
    pub(crate) fn look(&mut self, world: &World, pid: Pid) {
        if let Some(conn) = self.conn.filter(|_| self.is_open).and_then(|one| world.conns.get(&one))
        {
            let side = conn.side(pid);
            self.sent.has_arrived(conn.base[side] + conn.there[side]);
        }
    }

    fn opens(&mut self, world: &mut World, pid: Pid, conn: u64) {
        if let Some(one) = world.conns.get_mut(&conn) {
            let side = one.side(pid);
            one.base[side] = self.sent.written();
        }
        (self.conn, self.is_open, self.down) = (Some(conn), true, None);
    }
}

impl Daemon {
    fn identity(&self, world: &World) -> Identity {
        Identity {
            job: world.job.clone(),
            secret: world.secret.clone(),
            epoch: Epoch(self.epoch),
            node: self.node,
            nodes: self.formed().map_or(1, |formed| formed.nodes.len() as u32),
            lanes: 1,
        }
    }

    /// Dials all nodes that follow this one.
    pub(crate) fn dial_peers(&mut self, world: &mut World) {
        let nodes = self.formed().map_or(0, |formed| formed.nodes.len() as u32);
        for peer in self.node.0 + 1..nodes {
            self.lines.entry(peer).or_insert_with(Line::new).down = Some(world.now);
            self.dial(world, peer);
        }
    }

    fn dial(&mut self, world: &mut World, peer: u32) {
        let me = self.identity(world);
        let Some(formed) = self.formed() else { return };
        let there = formed.nodes[peer as usize].data_address.clone();
        let host = (0..world.hosts.len()).find(|at| there == format!("{}:5000", address(*at)));
        let to = host.and_then(|at| world.hosts[at].data).filter(|pid| world.is_alive(*pid));
        let Some(line) = self.lines.get_mut(&peer) else { return };
        line.attempt += 1;
        let attempt = line.attempt;
        world.after(ms(1000), What::Daemon(self.pid, DaemonIn::Redial { peer, attempt }));
        let Some(to) = to else { return };
        let conn = world.conns.len() as u64;
        let ends = [self.pid, to];
        world.conns.insert(conn, Conn { ends, is_broken: false, base: [0; 2], there: [0; 2] });
        (line.conn, line.is_open) = (Some(conn), false);
        let totals = Totals { written: line.sent.written(), read: line.read };
        let id = ConnectionId { peer: NodeId(peer), number: 0 };
        let bytes = hello(&me, id, Attempt { number: attempt, totals }, &[7; 32]);
        let message = DaemonIn::Hello { conn, from: self.pid, bytes: bytes.to_vec() };
        world.tell_daemon(self.pid, to, message);
    }

    /// An attempt was not answered, or its connection has broken since.
    pub(crate) fn redial(&mut self, world: &mut World, peer: u32, attempt: u32) {
        let Some(line) = self.lines.get(&peer) else { return };
        if line.attempt != attempt || line.is_open {
            return;
        }
        if let Some(conn) = line.conn {
            world.break_conn(conn);
        }
        self.dial(world, peer);
    }

    pub(crate) fn hello(&mut self, world: &mut World, conn: u64, from: Pid, bytes: &[u8]) {
        if world.conns.get(&conn).is_none_or(|conn| conn.is_broken) {
            return;
        }
        let bytes: &[u8; HELLO_BYTES] = bytes.try_into().expect("a whole Hello");
        let me = self.identity(world);
        let (id, attempt) = match check_hello(&me, bytes) {
            Ok(accepted) if self.formed().is_some() => accepted,
            // It gets a place of its own.
            Err(_) if world.has(Plant::StaleFrame) && self.formed().is_some() => {
                let peer = NodeId(200 + u32::from(bytes[20]));
                (
                    ConnectionId { peer, number: 0 },
                    Attempt { number: u32::MAX, ..Attempt::default() },
                )
            }
            _ => return world.break_conn(conn),
        };
        // The low half of the dialler's epoch.
        let theirs = u32::from_le_bytes([12, 13, 14, 15].map(|at| bytes[at]));
        world.check.frame(self.epoch, theirs);
        world.note(|| format!("daemon {} accepts connection {conn} of {from}", self.pid));
        let line = self.lines.entry(id.peer.0).or_insert_with(Line::new);
        if attempt.number < line.attempt {
            return world.break_conn(conn);
        }
        line.attempt = attempt.number;
        // What has arrived on the earlier one was read: messages keep their order.
        if let Some(old) = line.conn.replace(conn) {
            line.look(world, self.pid);
            world.break_conn(old);
        }
        let theirs = attempt.totals;
        if theirs.written < line.read || line.sent.resume(theirs.read).is_err() {
            self.line_lost(world, id.peer.0, "bytes are missing");
            return;
        }
        let read = line.read;
        if world.has(Plant::ResentFrame) {
            line.incoming.clear();
        }
        line.opens(world, self.pid, conn);
        let read = (theirs.written > 0).then_some(read);
        world.tell_daemon(self.pid, from, DaemonIn::Granted { conn, read });
        self.pump_all(world);
    }

    pub(crate) fn granted(&mut self, world: &mut World, conn: u64, read: Option<u64>) {
        let own = self.lines.iter_mut().find(|(_, line)| line.conn == Some(conn));
        let Some((&peer, line)) = own.filter(|(_, line)| !line.is_open) else { return };
        if let Some(read) = read
            && line.sent.resume(read).is_err()
        {
            self.line_lost(world, peer, "bytes are missing");
            return;
        }
        line.opens(world, self.pid, conn);
        self.pump_all(world);
    }

    fn line_lost(&mut self, world: &mut World, peer: u32, why: &str) {
        let what = format!("the connection to node {peer} is lost: {why}");
        self.report(world, Failure::new(FailureKind::ConnectionLost, what));
    }

    /// A connection has broken.
    pub(crate) fn reset(&mut self, world: &mut World, conn: u64) {
        let own = self.lines.iter_mut().find(|(_, line)| line.conn == Some(conn));
        let Some((&peer, line)) = own else { return };
        line.look(world, self.pid);
        (line.conn, line.is_open) = (None, false);
        line.down.get_or_insert(world.now);
        if self.node.0 < peer {
            let attempt = line.attempt;
            let delay = world.dice.time(1, 50);
            world.after(delay, What::Daemon(self.pid, DaemonIn::Redial { peer, attempt }));
        }
    }

    /// Connections that are needed and do not return are a failure (WAIT).
    pub(crate) fn check_lines(&mut self, world: &mut World) {
        let is_needed = !self.pieces.is_empty();
        let now = world.now;
        let mut lost = None;
        for (peer, line) in &mut self.lines {
            match line.down {
                Some(_) if !is_needed => line.down = Some(now),
                Some(since) if now > since + RETURN => lost = Some(*peer),
                _ => {}
            }
        }
        if let Some(peer) = lost {
            self.line_lost(world, peer, "it has not returned");
        }
    }

    /// Sends what is ready on all connections, and continues the pieces that waited for that.
    pub(crate) fn pump_all(&mut self, world: &mut World) {
        let mut moved = Vec::new();
        for peer in self.lines.keys().copied().collect::<Vec<_>>() {
            self.pump(world, peer, &mut moved);
        }
        moved.sort_unstable();
        moved.dedup();
        for number in moved {
            self.advance(world, number);
        }
    }

    fn pump(&mut self, world: &mut World, peer: u32, moved: &mut Vec<u64>) {
        loop {
            let Some(line) = self.lines.get_mut(&peer) else { return };
            let Some(conn) = line.conn.filter(|_| line.is_open) else { return };
            if world.conns.get(&conn).is_none_or(|conn| conn.is_broken) {
                return;
            }
            if line.sent.is_free() {
                let Some(chunk) = line.waiting.pop_front() else { return };
                line.sent.carry(chunk.header.encode(), Some(chunk));
            }
            let Some(line) = self.lines.get(&peer) else { return };
            let Some(Due { header, payload }) = line.sent.due() else { return };
            let mut bytes = header.to_vec();
            match payload {
                Payload::None => {}
                Payload::Piece(chunk, from) => bytes.extend(self.payload(chunk, from)),
                Payload::Kept(kept) => bytes.extend(kept),
            }
            // Sometimes the system takes only a part of it.
            if bytes.len() > 1 && world.dice.one_in(4) {
                bytes.truncate(1 + world.dice.below(bytes.len() as u64 - 1) as usize);
            }
            let count = bytes.len() as u64;
            world.write(self.pid, conn, bytes);
            let Some(line) = self.lines.get_mut(&peer) else { return };
            if let Some(news) = line.sent.wrote(count)
                && news.is_whole
                && let Some(piece) = self.pieces.get_mut(&news.chunk.header.sequence)
            {
                piece.sent(&news.chunk);
                moved.push(news.chunk.header.sequence);
            }
        }
    }

    pub(crate) fn bytes(&mut self, world: &mut World, conn: u64, bytes: &[u8]) {
        let own = self.lines.iter_mut().find(|(_, line)| line.conn == Some(conn));
        let Some((&peer, line)) = own else { return };
        line.read += bytes.len() as u64;
        line.incoming.extend(bytes);
        let mut moved = Vec::new();
        while let Some(begin) = line.incoming.first_chunk::<HEADER_BYTES>() {
            let header = match Frame::decode(begin, self.epoch as u32) {
                Ok(Frame::Data(header)) => header,
                Err(FrameError::Epoch { received, .. }) if world.has(Plant::StaleFrame) => {
                    world.check.frame(self.epoch, received);
                    return;
                }
                Ok(Frame::Notice(_)) | Err(_) => {
                    world.check.nonsense(self.epoch);
                    return;
                }
            };
            let Header { sequence, message, offset, length, epoch } = header;
            world.check.frame(self.epoch, epoch);
            let end = HEADER_BYTES + length as usize;
            if line.incoming.len() < end {
                break;
            }
            let place = self.early.entry((sequence, peer, message)).or_default();
            if place.len() as u64 != offset {
                world.check.nonsense(self.epoch);
                return;
            }
            place.extend(&line.incoming[HEADER_BYTES..end]);
            line.incoming.drain(..end);
            moved.push(sequence);
        }
        for number in moved {
            self.advance(world, number);
        }
    }
}
