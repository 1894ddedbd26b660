//! Heartbeats that arrive as datagrams, on the UDP port with the same number as the TCP port of the
//! streams (see [`gradwire_proto::beat`]). The answer to each is the heartbeat of the coordinator.
//!
//! If a node sends no datagrams, or if the port is taken, only its stream shows that it is alive.

use std::{collections::HashMap, io, net::SocketAddr, time::Duration};

use gradwire_proto::{
    Epoch, JobId, NodeId, Secret,
    beat::{BEAT_BYTES, Beat, Side},
};
use tokio::{net::UdpSocket, sync::mpsc};

use crate::{inbox::Inbound, model::Event};

/// Receives and answers the heartbeats of one job's nodes.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    socket: UdpSocket,
    job: JobId,
    secret: Secret,
    epoch: Epoch,
    inbox: mpsc::Sender<Inbound>,
    /// The number of the latest heartbeat from each node. There is at most one entry for each node
    /// of the job, because only nodes know the secret (BOUND).
    latest: HashMap<NodeId, u64>,
}

impl Heartbeats {
    /// Binds `address`, the address of the streams.
    ///
    /// # Errors
    /// The address can't be bound.
    pub(crate) async fn bind(
        address: SocketAddr,
        job: JobId,
        secret: Secret,
        epoch: Epoch,
        inbox: mpsc::Sender<Inbound>,
    ) -> io::Result<Self> {
        let socket = UdpSocket::bind(address).await?;
        Ok(Self { socket, job, secret, epoch, inbox, latest: HashMap::new() })
    }

    /// Serves until it is dropped.
    pub(crate) async fn serve(mut self) {
        // One byte more: a longer datagram is not a heartbeat.
        let mut bytes = [0; BEAT_BYTES + 1];
        loop {
            let Ok((length, from)) = self.socket.recv_from(&mut bytes).await else {
                // Most errors concern one earlier datagram. But with a lasting error, this must not
                // spin.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let beat =
                Beat::decode(&bytes[..length], Side::Node, self.epoch, &self.job, &self.secret);
            let Some(beat) = beat.filter(|beat| self.is_new(*beat)) else { continue };
            // If the inbox is full, other messages show that the node is alive.
            let _ =
                self.inbox.try_send(Inbound::Event(Event::DatagramReceived { node: beat.node }));
            let answer = Beat { side: Side::Coordinator, ..beat }.encode(&self.job, &self.secret);
            let _ = self.socket.try_send_to(&answer, from);
        }
    }

    fn is_new(&mut self, beat: Beat) -> bool {
        let is_new = self.latest.get(&beat.node).is_none_or(|latest| beat.count > *latest);
        if is_new {
            self.latest.insert(beat.node, beat.count);
        }
        is_new
    }
}
