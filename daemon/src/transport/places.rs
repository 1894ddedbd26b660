//! Where the data planes of the nodes listen.
//!
//! A host may get other addresses while the job runs, for example by DHCP. Its daemon notices that
//! it has lost one, listens on the new one, and tells the coordinator when it joins again on
//! another stream. The coordinator tells the other nodes. Connections from and to the old address
//! are then broken and made again.
//!
//! The first node is found at one address, so it must keep that.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
};

use gradwire_net::interfaces::{self, OTHERS};
use gradwire_proto::{Endpoints, NodeId};
use parking_lot::Mutex;
use tokio::sync::watch;

/// How a host chooses the addresses of its data plane.
#[derive(Debug, Clone)]
pub(crate) struct Choice {
    /// The setting `data.interface`.
    interface: String,
    /// The variables of other programs that name interfaces.
    variables: HashMap<String, String>,
}

impl Choice {
    pub(crate) fn new(interface: &str, variables: &HashMap<String, String>) -> Self {
        let named = OTHERS.iter().filter_map(|name| variables.get_key_value(*name));
        let variables = named.map(|(name, text)| (name.clone(), text.clone())).collect();
        Self { interface: interface.to_owned(), variables }
    }

    /// The present addresses of this host, if it has lost one of `own`, and has as many now.
    pub(crate) fn again(&self, own: &Endpoints, coordinator: SocketAddr) -> Option<Vec<IpAddr>> {
        if own.all().iter().all(|at| interfaces::is_own(at.ip())) {
            return None;
        }
        let address = interfaces::toward(coordinator).ok()?;
        let found = interfaces::data_addresses(&self.interface, &self.variables, address).ok()?;
        Some(found.addresses).filter(|now| now.len() == own.all().len())
    }
}

/// The addresses of all nodes.
#[derive(Debug)]
pub(crate) struct Places {
    me: NodeId,
    all: Mutex<Vec<Endpoints>>,
    changes: watch::Sender<()>,
}

impl Places {
    pub(crate) fn new(me: NodeId, all: Vec<Endpoints>) -> Self {
        Self { me, all: Mutex::new(all), changes: watch::Sender::new(()) }
    }

    /// The addresses of this node.
    pub(crate) fn own(&self) -> Endpoints {
        self.all.lock()[self.me.index()].clone()
    }

    /// The two ends of connection `number` of a lane with a peer.
    pub(crate) fn pair(&self, peer: NodeId, number: u32) -> (IpAddr, SocketAddr) {
        let all = self.all.lock();
        all[self.me.index()].pair(&all[peer.index()], number)
    }

    /// A node has these addresses from now on. Returns whether they are others than before.
    pub(crate) fn set(&self, node: NodeId, addresses: Endpoints) -> bool {
        let mut all = self.all.lock();
        let Some(there) = all.get_mut(node.index()).filter(|there| **there != addresses) else {
            return false;
        };
        *there = addresses;
        drop(all);
        self.changes.send_replace(());
        true
    }

    /// Notifies of changes from now on.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lost_address_is_replaced() {
        let coordinator = "127.0.0.1:9".parse().unwrap();
        let again = |interface: &str, own: &str| {
            let choice = Choice::new(interface, &HashMap::new());
            choice.again(&own.parse().unwrap(), coordinator)
        };
        let here = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(again("", "127.0.0.1:1"), None);
        assert_eq!(again("", "192.0.2.1:1"), Some(vec![here]));
        assert_eq!(again("lo", "192.0.2.1:1"), Some(vec![here]));
        // Connections are paired by their numbers, so there must be as many.
        assert_eq!(again("", "127.0.0.1:1,192.0.2.1:1"), None);
        assert_eq!(again("none", "192.0.2.1:1"), None);
    }

    #[test]
    fn connections_follow_a_node() {
        let first = ["127.0.0.1:1", "127.0.0.2:1"].map(|text| text.parse().unwrap());
        let places = Places::new(NodeId(0), first.to_vec());
        let mut changes = places.changes();
        let there: Endpoints = "192.0.2.1:7".parse().unwrap();
        assert!(places.set(NodeId(1), there.clone()));
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        assert_eq!(places.pair(NodeId(1), 0), (IpAddr::from([127, 0, 0, 1]), there.first()));
        assert!(!places.set(NodeId(1), there.clone()) && !places.set(NodeId(2), there));
        assert!(!changes.has_changed().unwrap());
    }
}
