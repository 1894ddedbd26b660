//! Which hosts are this machine, and by which address other hosts reach a host.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use tokio::{net::lookup_host, task::JoinSet};

use crate::agent::host::source_towards;

/// The name that ssh connects to: without `user@`.
fn bare(host: &str) -> &str {
    host.rsplit_once('@').map_or(host, |(_, name)| name)
}

/// The address of a host that is named by its address, or by `localhost`.
pub fn literal(host: &str) -> Option<IpAddr> {
    if host.eq_ignore_ascii_case("localhost") {
        return Some(Ipv4Addr::LOCALHOST.into());
    }
    host.split('%').next()?.parse().ok()
}

/// Whether an address belongs to this machine: only its own addresses can be bound.
pub fn is_ours(address: IpAddr) -> bool {
    address.is_loopback() || UdpSocket::bind((address, 0)).is_ok()
}

/// The address of a name, if it has one.
pub async fn resolve(host: &str) -> Option<IpAddr> {
    match literal(host) {
        Some(address) => Some(address),
        None => lookup_host((host, 0)).await.ok()?.next().map(|at| at.ip()),
    }
}

/// Whether a host is this machine: a loopback address, its name, or one of its addresses.
pub async fn is_local(host: &str) -> bool {
    // Another user's login is reached through ssh even here.
    if host.contains('@') {
        return false;
    }
    if rustix::system::uname().nodename().to_bytes() == host.as_bytes() {
        return true;
    }
    resolve(host).await.is_some_and(is_ours)
}

/// Which of these hosts are this machine; all names are looked up in parallel.
pub async fn are_local(hosts: &[String]) -> Vec<bool> {
    let mut looks = JoinSet::new();
    for (i, host) in hosts.iter().cloned().enumerate() {
        looks.spawn(async move { (i, is_local(&host).await) });
    }
    let mut local = vec![false; hosts.len()];
    while let Some(Ok((i, is_local))) = looks.join_next().await {
        local[i] = is_local;
    }
    local
}

/// The address of a host that is this machine. Other hosts (`remote` is one of them) can't use a
/// loopback address, which is their own.
pub async fn local_address(host: &str, remote: Option<&str>) -> IpAddr {
    let address = resolve(host).await.unwrap_or(Ipv4Addr::LOCALHOST.into());
    let Some(remote) = remote.filter(|_| address.is_loopback()) else { return address };
    // A name that only ssh knows has no address here; any outside address gives the default route.
    let outside = resolve(bare(remote)).await.unwrap_or(Ipv4Addr::new(192, 0, 2, 1).into());
    source_towards(outside).unwrap_or(address)
}

/// The address of another host: as given, as ssh found it, or by resolving its name.
pub async fn remote_address(host: &str, by_ssh: Option<IpAddr>) -> Option<IpAddr> {
    match literal(bare(host)).or(by_ssh) {
        Some(address) => Some(address),
        None => resolve(bare(host)).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn this_machine_is_known_by_its_names() {
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        for host in ["localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "::1", name.as_str()] {
            assert!(is_local(host).await, "{host}");
        }
        for host in ["192.0.2.1", "root@localhost", "2001:db8::1"] {
            assert!(!is_local(host).await, "{host}");
        }
    }

    #[tokio::test]
    async fn other_hosts_can_use_the_address() {
        assert_eq!(local_address("localhost", None).await, Ipv4Addr::LOCALHOST);
        assert_eq!(local_address("127.0.0.2", None).await, Ipv4Addr::new(127, 0, 0, 2));
        let ssh = Some(IpAddr::from([10, 1, 1, 1]));
        assert_eq!(remote_address("alias", ssh).await, ssh);
        assert_eq!(remote_address("me@10.2.2.2", ssh).await, Some(IpAddr::from([10, 2, 2, 2])));
    }
}
