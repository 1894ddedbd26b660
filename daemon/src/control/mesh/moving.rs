//! Hosts that get other addresses while the job runs ([`Places`]).
//!
//! [`Places`]: super::Places

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use gradwire_proto::{Endpoints, NodeId};
use tokio::net::TcpListener;

use super::Mesh;
use crate::data::order::Order;

impl Mesh {
    /// The addresses of this node.
    pub(crate) fn own_addresses(&self) -> Endpoints {
        self.places.own()
    }

    /// Whether this host has lost an address and has got another one.
    pub(crate) fn has_moved(&self) -> bool {
        self.addresses_now().is_some()
    }

    /// The addresses of this node as they are now, if this host has lost one.
    pub(crate) fn addresses_now(&self) -> Option<Vec<IpAddr>> {
        let choice = self.config.data_choice.as_ref()?;
        choice.again(&self.places.own(), self.config.coordinator)
    }

    /// Listens on the addresses that this host has got instead of others.
    ///
    /// # Errors
    /// The system's error if that is impossible. Then nothing has changed.
    pub(crate) fn listen_again(&self, now: &[IpAddr]) -> io::Result<Vec<TcpListener>> {
        // A listener on all addresses is also on new ones.
        let is_everywhere = self.config.data_listen.iter().any(|at| at.ip().is_unspecified());
        let (mut listeners, mut addresses) = (Vec::new(), Vec::new());
        for (before, &ip) in self.places.own().all().iter().zip(now) {
            let at = SocketAddr::new(ip, before.port());
            if before.ip() == ip || is_everywhere {
                addresses.push(at);
                continue;
            }
            let listener = std::net::TcpListener::bind(at)
                .or_else(|_| std::net::TcpListener::bind(SocketAddr::new(ip, 0)))?;
            listener.set_nonblocking(true)?;
            addresses.push(listener.local_addr()?);
            listeners.push(TcpListener::from_std(listener)?);
        }
        let addresses = Endpoints::new(addresses).map_err(io::Error::other)?;
        self.moved(self.identity.node, addresses);
        Ok(listeners)
    }

    /// A node has these addresses from now on.
    pub(crate) fn moved(&self, node: NodeId, addresses: Endpoints) {
        let ips: Arc<[IpAddr]> = addresses.all().iter().map(SocketAddr::ip).collect();
        let host = self.world.nodes.get(node.index()).map_or("", |node| &node.host);
        let at = addresses.to_string();
        if self.places.set(node, addresses) {
            tracing::warn!(host, at, "a host has got another address");
            self.lanes.iter().for_each(|lane| lane.send(Order::Moved(node, ips.clone())));
        }
    }
}
