//! Where the data plane of a node listens, as it stands in messages: `ip:port`, or several of them
//! with commas between if the node uses several interfaces together.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

/// How many interfaces of a node may be used together (BOUND).
pub const MAX_ENDPOINTS: usize = 8;

/// At least one address and at most [`MAX_ENDPOINTS`], in the order of `data.interface`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoints(Vec<SocketAddr>);

/// No address, too many, or one that is not `ip:port`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected ip:port, or up to {MAX_ENDPOINTS} of them with commas between")]
pub struct InvalidEndpoints;

impl Endpoints {
    /// These addresses.
    ///
    /// # Errors
    /// [`InvalidEndpoints`] if there are none or too many.
    pub fn new(all: Vec<SocketAddr>) -> Result<Self, InvalidEndpoints> {
        match (1..=MAX_ENDPOINTS).contains(&all.len()) {
            true => Ok(Self(all)),
            false => Err(InvalidEndpoints),
        }
    }

    /// The first one, which stands for the node.
    pub fn first(&self) -> SocketAddr {
        self.0[0]
    }

    /// All of them.
    pub fn all(&self) -> &[SocketAddr] {
        &self.0
    }

    /// The local and the remote end of connection `number` of a lane with a node that listens at
    /// `peer`: consecutive connections use one interface after the other. The first interface of
    /// one node is paired with the first of the other, and so on, so the number of pairs is that of
    /// the node with fewer.
    pub fn pair(&self, peer: &Self, number: u32) -> (IpAddr, SocketAddr) {
        let at = number as usize % self.pairs(peer);
        (self.0[at].ip(), peer.0[at])
    }

    /// How many interfaces two nodes use together.
    pub fn pairs(&self, peer: &Self) -> usize {
        self.0.len().min(peer.0.len())
    }
}

impl From<SocketAddr> for Endpoints {
    fn from(only: SocketAddr) -> Self {
        Self(vec![only])
    }
}

impl fmt::Display for Endpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, one) in self.0.iter().enumerate() {
            write!(f, "{}{one}", if at > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

impl FromStr for Endpoints {
    type Err = InvalidEndpoints;

    fn from_str(text: &str) -> Result<Self, InvalidEndpoints> {
        // BOUND: no more is parsed than may be there.
        let parsed = text.split(',').take(MAX_ENDPOINTS + 1).map(str::parse);
        Self::new(parsed.collect::<Result<_, _>>().map_err(|_| InvalidEndpoints)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_endpoints_are_the_same() {
        for text in ["127.0.0.1:1", "10.1.0.1:7000,[2001:db8::1]:7001"] {
            assert_eq!(text.parse::<Endpoints>().unwrap().to_string(), text);
        }
        let nine = ["10.0.0.1:1"; 9].join(",");
        for text in ["", "10.0.0.1", "10.0.0.1:1,", "10.0.0.1:1 ,10.0.0.2:1", nine.as_str()] {
            assert_eq!(text.parse::<Endpoints>(), Err(InvalidEndpoints), "{text:?}");
        }
    }

    #[test]
    fn connections_alternate_between_interfaces() {
        let here: Endpoints = "10.1.0.1:1,10.2.0.1:2,10.3.0.1:3".parse().unwrap();
        let there: Endpoints = "10.1.0.9:4,10.2.0.9:5".parse().unwrap();
        let pair = |number| {
            let (from, to) = here.pair(&there, number);
            format!("{from} {to}")
        };
        let expected = ["10.1.0.1 10.1.0.9:4", "10.2.0.1 10.2.0.9:5", "10.1.0.1 10.1.0.9:4"];
        assert_eq!([pair(0), pair(1), pair(2)], expected);
        assert_eq!([here.pairs(&there), there.pairs(&here), here.pairs(&here)], [2, 2, 3]);
    }
}
