//! Which network of this host carries the data: the setting `data.interface`, or what its user has
//! set for NCCL or Gloo.
//!
//! The setting is a list of names (`eth1`), patterns (`ib*`) and networks (`10.1.0.0/16`), of which
//! the first that fits counts; after `^` it is a list of what is not used. An entry such as
//! `eth1+eth2` names interfaces that are used together. `NCCL_SOCKET_IFNAME` has prefixes instead
//! (NVIDIA's documentation of NCCL, "Environment Variables").

use std::{
    collections::HashMap,
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket},
};

use nix::ifaddrs::{InterfaceAddress, getifaddrs};

const NCCL: &str = "NCCL_SOCKET_IFNAME";

/// Variables of others with the names of interfaces; the first that is set counts.
pub const OTHERS: [&str; 2] = [NCCL, "GLOO_SOCKET_IFNAME"];

/// An interface with one of its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name, such as `eth0`.
    pub name: String,
    /// One of its addresses.
    pub address: IpAddr,
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.address)
    }
}

/// Why no address of this host fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceError(pub String);

impl fmt::Display for InterfaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InterfaceError {}

/// How many interfaces of a host may be used together.
pub const MAX_TOGETHER: usize = 8;

/// The addresses of a host for its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataAddresses {
    /// At least one and at most [`MAX_TOGETHER`], in the order of the setting.
    pub addresses: Vec<IpAddr>,
    /// The variable of another library that names no interface of this host, and its value. It is
    /// ignored: that library may not run here.
    pub ignored: Option<(&'static str, String)>,
}

impl From<Vec<IpAddr>> for DataAddresses {
    fn from(addresses: Vec<IpAddr>) -> Self {
        Self { addresses, ignored: None }
    }
}

/// An entry of a list.
#[derive(Debug, PartialEq, Eq)]
enum Entry {
    Name(String),
    Prefix(String),
    /// An address, and how many of its bits count.
    Network(IpAddr, u32),
}

impl Entry {
    fn parse(text: &str) -> Result<Self, String> {
        if let Some((address, bits)) = text.split_once('/') {
            let network = || {
                let address: IpAddr = address.parse().ok()?;
                let most = if address.is_ipv4() { 32 } else { 128 };
                let bits = bits.parse().ok().filter(|bits| *bits <= most)?;
                Some(Self::Network(address, bits))
            };
            let expected = || format!("'{text}' is not a network such as 10.1.0.0/16");
            return network().ok_or_else(expected);
        }
        Ok(match text.strip_suffix('*') {
            Some(prefix) => Self::Prefix(prefix.to_owned()),
            None => Self::Name(text.to_owned()),
        })
    }

    fn fits(&self, interface: &Interface) -> bool {
        match self {
            Self::Name(name) => interface.name == *name,
            Self::Prefix(prefix) => interface.name.starts_with(prefix),
            Self::Network(network, bits) => match (interface.address, network) {
                (IpAddr::V4(own), IpAddr::V4(net)) => {
                    let differ = own.to_bits() ^ net.to_bits();
                    differ.leading_zeros() >= *bits
                }
                (IpAddr::V6(own), IpAddr::V6(net)) => {
                    let differ = own.to_bits() ^ net.to_bits();
                    differ.leading_zeros() >= *bits
                }
                _ => false,
            },
        }
    }
}

/// What is used, or what is not.
#[derive(Debug, PartialEq, Eq)]
enum Choice {
    /// One interface that fits any of these entries.
    OneOf(Vec<Entry>),
    /// One interface that fits none of these entries.
    NoneOf(Vec<Entry>),
    /// The interfaces of the first group in which every entry fits an interface.
    Groups(Vec<Vec<Entry>>),
}

impl Choice {
    fn parse(text: &str) -> Result<Self, String> {
        let (is_excluding, list) = match text.trim().strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let named = list.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        let named: Vec<_> = named.collect();
        if named.is_empty() {
            return Err("no interface is named".to_owned());
        }
        let is_together = named.iter().any(|entry| entry.contains('+'));
        if is_together && is_excluding {
            return Err("^ and + can't be combined".to_owned());
        }
        if is_together {
            let groups: Result<_, _> = named.into_iter().map(group).collect();
            return groups.map(Self::Groups);
        }
        let entries = named.into_iter().map(Entry::parse).collect::<Result<_, _>>()?;
        Ok(if is_excluding { Self::NoneOf(entries) } else { Self::OneOf(entries) })
    }

    /// Reads NCCL's list of prefixes, or of names after `=`.
    fn of_nccl(text: &str) -> Result<Self, String> {
        let (not, list) = match text.trim().strip_prefix('^') {
            Some(rest) => ("^", rest),
            None => ("", text.trim()),
        };
        if let Some(names) = list.strip_prefix('=') {
            return Self::parse(&format!("{not}{names}"));
        }
        let names = list.split(',').filter(|name| !name.trim().is_empty());
        let prefixes: Vec<_> = names.map(|name| format!("{}*", name.trim())).collect();
        Self::parse(&format!("{not}{}", prefixes.join(",")))
    }

    /// The addresses that the host uses; `None` if no interface fits.
    fn addresses(&self, all: &[Interface], own: IpAddr) -> Option<Vec<IpAddr>> {
        match self {
            Self::OneOf(entries) => {
                let each = entries.iter();
                let fitting = each.flat_map(|entry| all.iter().filter(|one| entry.fits(one)));
                best(&fitting.collect::<Vec<_>>(), own, true).map(|one| vec![one])
            }
            Self::NoneOf(entries) => {
                let fits = |one: &&Interface| !entries.iter().any(|entry| entry.fits(one));
                let fitting = all.iter().filter(fits);
                best(&fitting.collect::<Vec<_>>(), own, false).map(|one| vec![one])
            }
            Self::Groups(groups) => groups.iter().find_map(|group| {
                let mut found = Vec::new();
                for entry in group {
                    // Two entries, such as eth*+eth*, are two interfaces.
                    let is_free = |one: &&Interface| !found.contains(&one.address);
                    let fitting = all.iter().filter(is_free).filter(|one| entry.fits(one));
                    found.push(best(&fitting.collect::<Vec<_>>(), own, true)?);
                }
                Some(found)
            }),
        }
    }
}

/// Interfaces that are used together: `eth1+eth2`.
fn group(text: &str) -> Result<Vec<Entry>, String> {
    let named: Vec<_> = text.split('+').map(str::trim).collect();
    if named.iter().any(|entry| entry.is_empty()) {
        return Err(format!("'{text}' has no interface on one side of +"));
    }
    if named.len() > MAX_TOGETHER {
        return Err(format!("'{text}' has more than {MAX_TOGETHER} interfaces"));
    }
    named.into_iter().map(Entry::parse).collect()
}

/// The best of the addresses that fit: `own`, if it fits. Otherwise the first that other hosts can
/// use, preferably of the same family as `own`; or else a loopback address, if one was named.
fn best(fitting: &[&Interface], own: IpAddr, may_be_loopback: bool) -> Option<IpAddr> {
    if fitting.iter().any(|one| one.address == own) {
        return Some(own);
    }
    let family = |one: &Interface| one.address.is_ipv4() == own.is_ipv4();
    let usable = || fitting.iter().filter(|one| is_usable(one.address));
    let usable = usable().find(|one| family(one)).or_else(|| usable().next());
    let loopback = || fitting.iter().find(|one| may_be_loopback && one.address.is_loopback());
    usable.or_else(loopback).map(|one| one.address)
}

/// Whether other hosts can use an address as it is; link-local addresses also need the name of an
/// interface.
fn is_usable(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !address.is_loopback() && !is_link_local
}

/// The addresses of this host for its data: of `all` interfaces, according to the setting `given`,
/// or else to a variable of others; `own` without either. Pure.
fn choose(
    given: &str,
    variables: &HashMap<String, String>,
    all: &[Interface],
    own: IpAddr,
) -> Result<DataAddresses, InterfaceError> {
    let only = |address| DataAddresses::from(vec![address]);
    if !given.trim().is_empty() {
        let choice = Choice::parse(given).map_err(InterfaceError)?;
        return choice.addresses(all, own).map(Into::into).ok_or_else(|| {
            let has: Vec<_> = all.iter().map(ToString::to_string).collect();
            InterfaceError(format!("none of this host's interfaces fits: {}", has.join(", ")))
        });
    }
    // A job on this host needs no other address.
    if own.is_loopback() {
        return Ok(only(own));
    }
    let mut set = OTHERS.iter().filter_map(|name| Some((*name, variables.get(*name)?)));
    let Some((name, text)) = set.find(|(_, text)| !text.trim().is_empty()) else {
        return Ok(only(own));
    };
    let choice = if name == NCCL { Choice::of_nccl(text) } else { Choice::parse(text) };
    Ok(match choice.map(|choice| choice.addresses(all, own)) {
        // Other hosts can't reach a loopback address, which may be named for jobs of one host.
        Ok(Some(addresses)) if !addresses.iter().all(IpAddr::is_loopback) => addresses.into(),
        _ => DataAddresses { ignored: Some((name, text.clone())), ..only(own) },
    })
}

/// Checks a value of the setting `data.interface`, without looking at the interfaces of this host.
///
/// # Errors
/// [`InterfaceError`] if it is not valid.
pub fn check(given: &str) -> Result<(), InterfaceError> {
    if given.is_empty() {
        return Ok(());
    }
    Choice::parse(given).map(drop).map_err(InterfaceError)
}

/// The interfaces of this host that are used together for its data. `given` is the setting
/// `data.interface`, `variables` are those of the process, and `own` is the address by which others
/// know the host.
///
/// # Errors
/// [`InterfaceError`] if `given` is not valid, or no interface of this host fits.
pub fn data_addresses(
    given: &str,
    variables: &HashMap<String, String>,
    own: IpAddr,
) -> Result<DataAddresses, InterfaceError> {
    choose(given, variables, &interfaces(), own)
}

/// An interface for each address of this host that other hosts can use as it is, in the system's
/// order.
pub fn usable() -> Vec<Interface> {
    let mut all = interfaces();
    all.retain(|one| is_usable(one.address));
    all
}

/// Whether this host has an address.
pub fn is_own(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

/// The address of this host from which it reaches a peer, according to its routes. Nothing is sent.
///
/// # Errors
/// The system's error if there is no route.
pub fn toward(peer: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match peer {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(peer)?;
    Ok(socket.local_addr()?.ip())
}

fn interfaces() -> Vec<Interface> {
    let read = |one: InterfaceAddress| {
        let address = one.address?;
        let v4 = address.as_sockaddr_in().map(|own| IpAddr::V4(*SocketAddrV4::from(*own).ip()));
        let v6 = address.as_sockaddr_in6().map(|own| IpAddr::V6(*SocketAddrV6::from(*own).ip()));
        // The name of a second address has a suffix, as in eth0:1.
        let name = one.interface_name.split(':').next().unwrap_or_default().to_owned();
        Some(Interface { name, address: v4.or(v6)? })
    };
    getifaddrs().map(|all| all.filter_map(read).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "192.168.0.7";

    fn examples() -> Vec<Interface> {
        [
            ("lo", "127.0.0.1"),
            ("eth0", OWN),
            ("eth0", "fe80::1"),
            ("docker0", "172.17.0.1"),
            ("eth10", "10.10.0.7"),
            ("eth1", "2001:db8::7"),
            ("eth1", "10.1.0.7"),
            ("ib0", "169.254.0.7"),
            ("ib1", "10.2.3.7"),
        ]
        .map(|(name, address)| Interface {
            name: name.to_owned(),
            address: address.parse().unwrap(),
        })
        .to_vec()
    }

    fn chosen(given: &str, variable: Option<(&str, &str)>) -> Result<String, InterfaceError> {
        let pair = |(name, text): (&str, &str)| (name.to_owned(), text.to_owned());
        let variables = variable.map(pair).into_iter().collect();
        let found = choose(given, &variables, &examples(), OWN.parse().unwrap())?;
        let each: Vec<_> = found.addresses.iter().map(ToString::to_string).collect();
        Ok(each.join(" "))
    }

    #[test]
    fn a_host_knows_its_own_addresses() {
        let own = toward("127.0.0.1:9".parse().unwrap()).unwrap();
        assert_eq!(own, IpAddr::from([127, 0, 0, 1]));
        assert!(is_own(own) && !is_own("192.0.2.1".parse().unwrap()));
    }

    #[test]
    fn the_first_that_fits_is_used() {
        for (given, address) in [
            ("", OWN),
            ("eth0", OWN),
            ("eth1", "10.1.0.7"),
            ("eth1,ib1", "10.1.0.7"),
            ("ib1,eth1", "10.2.3.7"),
            ("ib*", "10.2.3.7"),
            ("eth*", OWN),
            ("eth1*", "10.10.0.7"),
            ("10.2.0.0/16", "10.2.3.7"),
            ("10.0.0.0/8", "10.10.0.7"),
            ("2001:db8::/32", "2001:db8::7"),
            ("0.0.0.0/0", OWN),
            ("lo", "127.0.0.1"),
            ("^lo,docker0", OWN),
            ("^eth0,docker*", "10.10.0.7"),
            ("^ 192.168.0.0/16, docker0,eth10", "10.1.0.7"),
        ] {
            assert_eq!(chosen(given, None).unwrap(), address, "{given}");
        }
    }

    #[test]
    fn a_group_is_used_together() {
        for (given, addresses) in [
            ("eth0+eth10", "192.168.0.7 10.10.0.7"),
            ("eth10 + eth0", "10.10.0.7 192.168.0.7"),
            ("eth9+eth10, eth1+ib1, eth0", "10.1.0.7 10.2.3.7"),
            ("eth9+eth10,ib1", "10.2.3.7"),
            ("eth1*+eth1*", "10.10.0.7 10.1.0.7"),
            ("10.10.0.0/16+10.1.0.0/16", "10.10.0.7 10.1.0.7"),
            ("lo+eth0", "127.0.0.1 192.168.0.7"),
        ] {
            assert_eq!(chosen(given, None).unwrap(), addresses, "{given}");
        }
        let nine = ["eth0"; 9].join("+");
        for (given, says) in [
            ("eth0+", "'eth0+' has no interface on one side of +"),
            ("^eth0+eth1", "^ and + can't be combined"),
            (nine.as_str(), "has more than 8 interfaces"),
            ("eth0+eth9", "none of this host's interfaces fits"),
            ("eth10+eth10", "none of this host's interfaces fits"),
        ] {
            let error = chosen(given, None).unwrap_err().to_string();
            assert!(error.contains(says), "{given}: {error}");
        }
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        for (given, says) in [
            ("eth9", "none of this host's interfaces fits: lo (127.0.0.1), eth0 (192"),
            ("10.1.0.0/33", "'10.1.0.0/33' is not a network such as 10.1.0.0/16"),
            ("x/8", "'x/8' is not a network"),
            ("^", "no interface is named"),
            ("^lo,eth*,docker0,ib*", "fits"),
            (",", "no interface is named"),
        ] {
            let error = chosen(given, None).unwrap_err().to_string();
            assert!(error.contains(says), "{given}: {error}");
        }
    }

    #[test]
    fn variables_of_others_count_without_the_setting() {
        for (name, text, address) in [
            (NCCL, "eth1", "10.10.0.7"),
            (NCCL, "=eth1", "10.1.0.7"),
            (NCCL, "^docker,lo,eth0", "10.10.0.7"),
            (NCCL, "^=eth0,eth10,docker0", "10.1.0.7"),
            (NCCL, "nothing", OWN),
            (NCCL, "lo", OWN),
            (NCCL, " ", OWN),
            ("GLOO_SOCKET_IFNAME", "eth1", "10.1.0.7"),
        ] {
            assert_eq!(chosen("", Some((name, text))).unwrap(), address, "{name}={text}");
        }
        assert_eq!(chosen("ib1", Some((NCCL, "eth1"))).unwrap(), "10.2.3.7");
        let variables = HashMap::from([(NCCL.to_owned(), "nothing".to_owned())]);
        let found = choose("", &variables, &examples(), OWN.parse().unwrap()).unwrap();
        assert_eq!(found.ignored, Some((NCCL, "nothing".to_owned())));
    }

    #[test]
    fn this_machine_has_a_loopback_address() {
        let own = IpAddr::from([192, 0, 2, 1]);
        let found = data_addresses("127.0.0.0/8", &HashMap::new(), own).unwrap();
        assert_eq!(found.addresses, [IpAddr::from([127, 0, 0, 1])]);
    }
}
