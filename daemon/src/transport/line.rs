//! The rate of this host's line: from the settings, or else from the interface of the data plane.

use std::{
    fs,
    net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6},
    path::{Path, PathBuf},
};

use gradwire_proto::Endpoints;

use nix::ifaddrs::{InterfaceAddress, getifaddrs};

/// A megabit per second, in bytes per second.
const MBIT: u64 = 1_000_000 / 8;

#[derive(Debug)]
pub(crate) enum Line {
    /// In Mbit/s.
    Given(u32),
    /// The sum of the rates in these files of the interfaces; unknown if one of the files has none.
    Interfaces(Vec<PathBuf>),
    Unknown,
}

fn has(interface: &InterfaceAddress, address: IpAddr) -> bool {
    let Some(own) = &interface.address else { return false };
    let v4 = own.as_sockaddr_in().map(|own| IpAddr::V4(*SocketAddrV4::from(*own).ip()));
    let v6 = own.as_sockaddr_in6().map(|own| IpAddr::V6(*SocketAddrV6::from(*own).ip()));
    v4.or(v6) == Some(address)
}

impl Line {
    /// The line with these addresses of the host; `given` is the rate in Mbit/s, if the settings
    /// have one.
    pub(crate) fn of(addresses: &Endpoints, given: Option<u32>) -> Self {
        if let Some(rate) = given {
            return Self::Given(rate);
        }
        let file = |address: &SocketAddr| {
            let mut all = getifaddrs().ok()?;
            let interface = all.find(|one| has(one, address.ip()))?;
            // The name of a second address has a suffix, as in eth0:1.
            let name = interface.interface_name.split(':').next().unwrap_or_default();
            Some(PathBuf::from("/sys/class/net").join(name).join("speed"))
        };
        let files: Option<Vec<_>> = addresses.all().iter().map(file).collect();
        files.map_or(Self::Unknown, |mut files| {
            // Two addresses of one interface share its line.
            files.sort();
            files.dedup();
            Self::Interfaces(files)
        })
    }

    /// The rate in Mbit/s; 0 if unknown.
    pub(crate) fn mbit(&self) -> u32 {
        self.rate().map_or(0, |rate| u32::try_from(rate / MBIT).unwrap_or(u32::MAX))
    }

    /// The rate in bytes per second. `None` if unknown: loopback has no rate, and virtual
    /// interfaces often report -1. It may change if another cable is plugged in.
    pub(crate) fn rate(&self) -> Option<u64> {
        match self {
            Self::Given(mbit) => Some(u64::from(*mbit) * MBIT),
            Self::Interfaces(paths) => paths.iter().map(|path| rate_in(path)).sum(),
            Self::Unknown => None,
        }
    }
}

fn rate_in(path: &Path) -> Option<u64> {
    let mbit: i64 = fs::read_to_string(path).ok()?.trim().parse().ok()?;
    u64::try_from(mbit).ok().filter(|mbit| *mbit > 0).map(|mbit| mbit * MBIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Endpoints {
        text.parse().unwrap()
    }

    #[test]
    fn the_address_determines_the_interface() {
        let loopback = Line::of(&at("127.0.0.1:1,[::1]:1"), None);
        let Line::Interfaces(paths) = &loopback else { panic!("{loopback:?}") };
        assert_eq!(paths, &[PathBuf::from("/sys/class/net/lo/speed")]);
        // Other interfaces may report 0 or -1, but loopback has no rate at all.
        assert_eq!(loopback.rate(), None);
        let nobody = Line::of(&at("127.0.0.1:1,192.0.2.1:1"), None);
        assert!(matches!(nobody, Line::Unknown), "{nobody:?}");
        assert_eq!(nobody.rate(), None);
    }

    #[test]
    fn given_rates_come_first_and_must_be_valid() {
        let given = Line::of(&at("127.0.0.1:1"), Some(1000));
        assert_eq!((given.rate(), given.mbit()), (Some(125_000_000), 1000));
        let file = std::env::temp_dir().join(format!("gwtest-speed-{}", std::process::id()));
        let line = Line::Interfaces(vec![file.clone()]);
        let two = Line::Interfaces(vec![file.clone(), file.clone()]);
        for (text, rate) in [("-1\n", None), ("0\n", None), ("", None), ("8\n", Some(1_000_000))] {
            fs::write(&file, text).unwrap();
            assert_eq!(line.rate(), rate, "{text:?}");
            assert_eq!(two.rate(), rate.map(|rate| 2 * rate), "{text:?}");
        }
        fs::remove_file(file).unwrap();
        assert_eq!(line.rate(), None);
    }
}
