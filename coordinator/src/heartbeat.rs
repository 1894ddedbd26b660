//! Heartbeats that arrive as datagrams, at the port with the same number as that of the streams
//! (see [`gradwire_proto::beat`]). Each is answered; the answer is the heartbeat of the
//! coordinator.
//!
//! A node that sends no datagrams shows life only on its stream. The same holds for all nodes if
//! the port is taken.

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
    /// How many heartbeats each node had sent before the latest one that was received. There is at
    /// most one entry for each node of the job, because only they know the secret (BOUND).
    latest: HashMap<NodeId, u64>,
}

impl Heartbeats {
    /// Listens at `address`, which also serves the streams.
    ///
    /// # Errors
    /// If the address can't be listened on.
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
                // Most errors are about one earlier datagram. After an error that lasts, this must
                // not spin.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let beat =
                Beat::decode(&bytes[..length], Side::Node, self.epoch, &self.job, &self.secret);
            let Some(beat) = beat.filter(|beat| self.is_new(*beat)) else { continue };
            // An engine without room is busy with other signs of life.
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
