//! Which network of this host carries the data: the setting `data.interface`, or what its user has
//! set for NCCL or Gloo.
//!
//! The setting is a list of names (`eth1`), patterns (`ib*`) and networks (`10.1.0.0/16`), of which
//! the first that fits counts; after `^` it is a list of what is not used. `NCCL_SOCKET_IFNAME` has
//! prefixes instead (NVIDIA's documentation of NCCL, "Environment Variables").

use std::{
    collections::HashMap,
    fmt,
    net::{IpAddr, SocketAddrV4, SocketAddrV6},
};

use nix::ifaddrs::{InterfaceAddress, getifaddrs};

const NCCL: &str = "NCCL_SOCKET_IFNAME";

/// Variables of others with the names of interfaces; the first that is set counts.
pub const OTHERS: [&str; 2] = [NCCL, "GLOO_SOCKET_IFNAME"];

/// An interface with one of its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Interface {
    name: String,
    address: IpAddr,
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

/// The address of a host for its data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataAddress {
    /// The address.
    pub address: IpAddr,
    /// The variable of another library that names no interface of this host, and its value. It is
    /// ignored: that library may not run here.
    pub ignored: Option<(&'static str, String)>,
}

impl From<IpAddr> for DataAddress {
    fn from(address: IpAddr) -> Self {
        Self { address, ignored: None }
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
struct Choice {
    is_excluding: bool,
    entries: Vec<Entry>,
}

impl Choice {
    fn parse(text: &str) -> Result<Self, String> {
        let (is_excluding, list) = match text.trim().strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let entries = list.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        let entries: Vec<_> = entries.map(Entry::parse).collect::<Result<_, _>>()?;
        match entries.is_empty() {
            true => Err("no interface is named".to_owned()),
            false => Ok(Self { is_excluding, entries }),
        }
    }

    /// The same for NCCL's list: of prefixes, or after `=` of names.
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

    /// The address that the host uses: `own` if that fits. Otherwise the first that does; one of
    /// its family, if there is one, and one beyond this host, unless a loopback address is named.
    fn address(&self, all: &[Interface], own: IpAddr) -> Option<IpAddr> {
        let fitting: Vec<&Interface> = if self.is_excluding {
            all.iter().filter(|one| !self.entries.iter().any(|entry| entry.fits(one))).collect()
        } else {
            let each = self.entries.iter();
            each.flat_map(|entry| all.iter().filter(|one| entry.fits(one))).collect()
        };
        if fitting.iter().any(|one| one.address == own) {
            return Some(own);
        }
        let family = |one: &Interface| one.address.is_ipv4() == own.is_ipv4();
        let usable = || fitting.iter().filter(|one| is_usable(one.address));
        let usable = usable().find(|one| family(one)).or_else(|| usable().next());
        let loopback =
            || fitting.iter().find(|one| !self.is_excluding && one.address.is_loopback());
        usable.or_else(loopback).map(|one| one.address)
    }
}

/// Whether other hosts can use an address as it is; those of a link need the name of an interface.
fn is_usable(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !address.is_loopback() && !is_link_local
}

/// The address of this host for its data: of `all` interfaces, according to the setting `given`, or
/// else to a variable of others; `own` without either. Pure.
fn choose(
    given: &str,
    variables: &HashMap<String, String>,
    all: &[Interface],
    own: IpAddr,
) -> Result<DataAddress, InterfaceError> {
    if !given.trim().is_empty() {
        let choice = Choice::parse(given).map_err(InterfaceError)?;
        return choice.address(all, own).map(Into::into).ok_or_else(|| {
            let has: Vec<_> = all.iter().map(ToString::to_string).collect();
            InterfaceError(format!("none of this host's interfaces fits: {}", has.join(", ")))
        });
    }
    // A job on this host needs no other address.
    if own.is_loopback() {
        return Ok(own.into());
    }
    let mut set = OTHERS.iter().filter_map(|name| Some((*name, variables.get(*name)?)));
    let Some((name, text)) = set.find(|(_, text)| !text.trim().is_empty()) else {
        return Ok(own.into());
    };
    let choice = if name == NCCL { Choice::of_nccl(text) } else { Choice::parse(text) };
    Ok(match choice.map(|choice| choice.address(all, own)) {
        Ok(Some(address)) => address.into(),
        _ => DataAddress { address: own, ignored: Some((name, text.clone())) },
    })
}

/// The address of this host for its data. `given` is the setting `data.interface`, `variables` are
/// those of the process, and `own` is the address by which others know the host.
///
/// # Errors
/// [`InterfaceError`] if `given` is not valid, or no interface of this host fits.
pub fn data_address(
    given: &str,
    variables: &HashMap<String, String>,
    own: IpAddr,
) -> Result<DataAddress, InterfaceError> {
    let read = |one: InterfaceAddress| {
        let address = one.address?;
        let v4 = address.as_sockaddr_in().map(|own| IpAddr::V4(*SocketAddrV4::from(*own).ip()));
        let v6 = address.as_sockaddr_in6().map(|own| IpAddr::V6(*SocketAddrV6::from(*own).ip()));
        // The name of a second address has a suffix, as in eth0:1.
        let name = one.interface_name.split(':').next().unwrap_or_default().to_owned();
        Some(Interface { name, address: v4.or(v6)? })
    };
    let all: Vec<_> = getifaddrs().map(|all| all.filter_map(read).collect()).unwrap_or_default();
    choose(given, variables, &all, own)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "192.168.0.7";

    fn interfaces() -> Vec<Interface> {
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
        let address = choose(given, &variables, &interfaces(), OWN.parse().unwrap());
        address.map(|found| found.address.to_string())
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
            (NCCL, " ", OWN),
            ("GLOO_SOCKET_IFNAME", "eth1", "10.1.0.7"),
        ] {
            assert_eq!(chosen("", Some((name, text))).unwrap(), address, "{name}={text}");
        }
        assert_eq!(chosen("ib1", Some((NCCL, "eth1"))).unwrap(), "10.2.3.7");
        let variables = HashMap::from([(NCCL.to_owned(), "nothing".to_owned())]);
        let found = choose("", &variables, &interfaces(), OWN.parse().unwrap()).unwrap();
        assert_eq!(found.ignored, Some((NCCL, "nothing".to_owned())));
    }

    #[test]
    fn this_machine_has_a_loopback_address() {
        let own = IpAddr::from([192, 0, 2, 1]);
        let found = data_address("127.0.0.0/8", &HashMap::new(), own).unwrap();
        assert_eq!(found.address, IpAddr::from([127, 0, 0, 1]));
    }
}
