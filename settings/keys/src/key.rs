//! Configuration keys, and how a written value is checked.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
};

use bytesize::ByteSize;
use gradwire_proto::{InvalidRackLabel, check_rack_label};

/// One configuration key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key {
    /// `section.key`.
    pub name: &'static str,
    /// What it accepts.
    pub kind: Kind,
    /// The default, as a user would write it.
    pub default: &'static str,
    /// The unit of numbers, or empty.
    pub unit: &'static str,
    /// What it does, in a sentence or two.
    pub doc: &'static str,
    /// The user or the mechanism that sets it.
    pub audience: Audience,
}

/// The user or the mechanism that sets a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audience {
    /// A user, for a job.
    User,
    /// The measurements at the start of a job; a value in the settings overrides them.
    Measured,
    /// Nobody as a rule: the default fits, and tests and experiments change it.
    Internal,
}

impl Key {
    /// The environment variable that sets it.
    pub fn variable(&self) -> String {
        format!("GRADWIRE_{}", self.name.replace('.', "__").to_uppercase())
    }
}

/// What a key accepts. Ranges are inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A whole number.
    Number {
        /// The smallest number.
        min: u64,
        /// The largest number.
        max: u64,
    },
    /// A whole number, or `auto`.
    NumberOrAuto {
        /// The smallest number.
        min: u64,
        /// The largest number.
        max: u64,
    },
    /// A number of bytes: a whole number, or with a unit such as `256KiB`.
    Bytes {
        /// The smallest number.
        min: u64,
        /// The largest number.
        max: u64,
    },
    /// One of these words; `_` is read as `-`.
    Choice(&'static [&'static str]),
    /// An algorithm, or rules for algorithms. Only the form of a text is checked here;
    /// `gradwire-settings` parses it.
    Rules,
    /// Any text without control characters.
    Text,
    /// The label of a rack, or empty: see [`check_rack_label`].
    RackLabel,
    /// A list of words, or text that is split at white space.
    Words,
    /// `ip:port`, or empty; port 0 lets the system choose.
    AddressOrNone,
    /// `http://host:port`, or empty.
    UrlOrNone,
    /// `ip:port` or `ip:first-last`; port 0 lets the system choose.
    AddressRange,
}

/// One address of this machine and a range of ports; the first free port is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressRange {
    /// The address.
    pub ip: IpAddr,
    /// The ports, in the order in which they are tried.
    pub ports: RangeInclusive<u16>,
}

impl AddressRange {
    fn parse(text: &str) -> Option<Self> {
        let (first, last) = match text.rsplit_once('-') {
            Some((first, last)) => (first, Some(last.parse().ok()?)),
            None => (text, None),
        };
        let first: SocketAddr = first.parse().ok()?;
        let last = last.unwrap_or(first.port());
        // Port 0 means any port, so it can't start a range.
        let is_range = last > first.port() && first.port() > 0;
        let ports = first.port()..=last;
        (last == first.port() || is_range).then_some(Self { ip: first.ip(), ports })
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (*self.ports.start(), *self.ports.end());
        write!(f, "{}", SocketAddr::new(self.ip, first))?;
        if last == first { Ok(()) } else { write!(f, "-{last}") }
    }
}

/// A value that its key accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Checked {
    /// A number, or `auto`.
    Number(Option<u64>),
    /// A text, also of a choice.
    Text(String),
    /// Words.
    Words(Vec<String>),
    /// An address, or nothing.
    Address(Option<SocketAddr>),
    /// An address and its ports.
    AddressRange(AddressRange),
}

/// A value as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Given {
    /// One word or text.
    Text(String),
    /// A list of them.
    List(Vec<String>),
    /// Anything else, such as a table; no key accepts it.
    Other(String),
}

impl Given {
    /// The text without surrounding white space; `None` if it is not a text.
    fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text.trim()) } else { None }
    }
}

impl From<&str> for Given {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl fmt::Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) | Self::Other(text) => f.write_str(text),
            Self::List(words) => write!(f, "{words:?}"),
        }
    }
}

impl Kind {
    /// Checks one value (TRUST). The error says what is accepted.
    ///
    /// # Errors
    /// The text.
    pub fn check(self, given: &Given) -> Result<Checked, String> {
        self.parse(given.text(), given).ok_or_else(|| format!("expected {self}"))
    }

    fn parse(self, text: Option<&str>, given: &Given) -> Option<Checked> {
        match self {
            Self::Number { min, max } => {
                let number = text?.parse().ok()?;
                (min..=max).contains(&number).then_some(Checked::Number(Some(number)))
            }
            Self::NumberOrAuto { .. } if text? == "auto" => Some(Checked::Number(None)),
            Self::NumberOrAuto { min, max } => Self::Number { min, max }.parse(text, given),
            Self::Bytes { min, max } => {
                let bytes = text?.parse::<ByteSize>().ok()?.as_u64();
                (min..=max).contains(&bytes).then_some(Checked::Number(Some(bytes)))
            }
            Self::Choice(words) => {
                let text = text?.replace('_', "-");
                words.contains(&text.as_str()).then_some(Checked::Text(text))
            }
            Self::Rules => Some(Checked::Text(text?.to_owned())),
            Self::Text => is_plain(text?).then(|| Checked::Text(text.unwrap_or_default().into())),
            Self::RackLabel => {
                let label = text.filter(|label| check_rack_label(label).is_ok())?;
                Some(Checked::Text(label.to_owned()))
            }
            Self::Words => words(given).map(Checked::Words),
            Self::AddressOrNone if text?.is_empty() => Some(Checked::Address(None)),
            Self::AddressOrNone => text?.parse().ok().map(|at| Checked::Address(Some(at))),
            Self::UrlOrNone => {
                is_url(text?).then(|| Checked::Text(text.unwrap_or_default().into()))
            }
            Self::AddressRange => AddressRange::parse(text?).map(Checked::AddressRange),
        }
    }

    /// The checked value in its written form.
    pub fn write(self, value: &Checked) -> String {
        match (self, value) {
            (Self::Bytes { .. }, Checked::Number(Some(bytes))) => write_bytes(*bytes),
            (_, Checked::Number(Some(number))) => number.to_string(),
            (_, Checked::Number(None)) => "auto".to_owned(),
            (_, Checked::Text(text)) => text.clone(),
            (_, Checked::Words(words)) => words.join(" "),
            (_, Checked::Address(Some(address))) => address.to_string(),
            (_, Checked::Address(None)) => String::new(),
            (_, Checked::AddressRange(range)) => range.to_string(),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Number { min, max: u64::MAX } => write!(f, "a whole number from {min}"),
            Self::Number { min, max } => write!(f, "a whole number from {min} to {max}"),
            Self::NumberOrAuto { min, max } => {
                write!(f, "'auto' or a whole number from {min} to {max}")
            }
            Self::Bytes { min, max } => write!(
                f,
                "a number of bytes from {} to {}, such as 65536 or 64KiB",
                write_bytes(min),
                write_bytes(max)
            ),
            Self::Choice(words) => write!(f, "one of {}", words.join(", ")),
            Self::Rules => f.write_str(
                "auto, an algorithm such as ring or circulant(radix=4), or rules such as \
                 allreduce:0-64K=recursive-doubling; 64K-=^ring",
            ),
            Self::Text => f.write_str("text without control characters"),
            Self::RackLabel => InvalidRackLabel.fmt(f),
            Self::Words => f.write_str("a list of words"),
            Self::AddressOrNone => {
                f.write_str("an address ip:port, such as 10.0.0.1:7000, or empty")
            }
            Self::UrlOrNone => f.write_str("a URL http://host:port, or empty"),
            Self::AddressRange => f.write_str(
                "an address with a port or a port range, ip:port or ip:first-last, \
                 such as 0.0.0.0:9401-9499",
            ),
        }
    }
}

/// Whether this is empty, or a URL with a host and a port, without TLS and without a path.
fn is_url(text: &str) -> bool {
    let of_host = |place: &str| {
        let (host, port) = place.strip_suffix('/').unwrap_or(place).rsplit_once(':')?;
        let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        let is_host = match address {
            Some(address) => address.parse::<Ipv6Addr>().is_ok(),
            None => !host.is_empty() && host.chars().all(is_name),
        };
        Some(is_host && port.parse::<u16>().is_ok_and(|port| port > 0))
    };
    text.is_empty() || text.strip_prefix("http://").and_then(of_host) == Some(true)
}

fn is_plain(text: &str) -> bool {
    !text.chars().any(char::is_control)
}

fn words(given: &Given) -> Option<Vec<String>> {
    let words: Vec<String> = match given {
        Given::List(words) => words.clone(),
        given => given.text()?.split_whitespace().map(str::to_owned).collect(),
    };
    words.iter().all(|word| is_plain(word)).then_some(words)
}

/// Writes a size exactly, in the largest binary unit that divides it; `ByteSize` would round.
fn write_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    UNITS
        .iter()
        .find(|(_, shift)| bytes != 0 && bytes.trailing_zeros() >= *shift)
        .map_or_else(|| bytes.to_string(), |(unit, shift)| format!("{}{unit}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(kind: Kind, text: &str) -> Result<Checked, String> {
        kind.check(&Given::from(text))
    }

    #[test]
    fn sizes_accept_units_and_name_their_range() {
        let kind = Kind::Bytes { min: 64 << 10, max: 64 << 20 };
        for (text, bytes) in
            [("4MiB", 4 << 20), ("256KiB", 256 << 10), ("65536", 65536), ("1 MB", 1_000_000)]
        {
            assert_eq!(check(kind, text), Ok(Checked::Number(Some(bytes))), "{text}");
        }
        for bad in ["", "4Zonk", "-1", "1KiB", "65MiB", "nan", "99999999999999999999999"] {
            let error = check(kind, bad).unwrap_err();
            assert!(error.starts_with("expected a number of bytes from 64KiB to 64MiB"), "{error}");
        }
    }

    #[test]
    fn ports_are_one_or_a_range() {
        let kind = Kind::AddressRange;
        for text in ["0.0.0.0:9401-9499", "127.0.0.1:0", "[::1]:9401", "[::]:1-65535"] {
            assert_eq!(check(kind, text).map(|checked| kind.write(&checked)), Ok(text.to_owned()));
        }
        let same = check(kind, "10.0.0.1:7-7").unwrap();
        assert_eq!(kind.write(&same), "10.0.0.1:7");
        for bad in [
            "",
            "9401-9499",
            "a:1-2",
            "::1:9401",
            "1.2.3.4:9-8",
            "1.2.3.4:0-9",
            "1.2.3.4:1-",
            "1.2.3.4:1-2-3",
            "1.2.3.4:1-65536",
        ] {
            let error = check(kind, bad).unwrap_err();
            assert!(error.contains("ip:port or ip:first-last"), "{bad}: {error}");
        }
    }

    #[test]
    fn urls_have_a_host_and_a_port() {
        let kind = Kind::UrlOrNone;
        for text in ["", "http://localhost:4317", "http://10.0.0.1:4317/", "http://[::1]:4317"] {
            assert_eq!(check(kind, text), Ok(Checked::Text(text.to_owned())));
        }
        for bad in [
            "localhost:4317",
            "https://localhost:4317",
            "http://localhost",
            "http://localhost:0",
            "http://localhost:65536",
            "http://localhost:4317/v1/metrics",
            "http://:4317",
            "http://[::1:4317",
            "http://a b:4317",
            "http://user@host:4317",
        ] {
            let error = check(kind, bad).unwrap_err();
            assert_eq!(error, "expected a URL http://host:port, or empty", "{bad}");
        }
    }

    #[test]
    fn numbers_are_whole_and_in_range() {
        let kind = Kind::NumberOrAuto { min: 0, max: 10 };
        assert_eq!(check(kind, "auto"), Ok(Checked::Number(None)));
        assert_eq!(check(kind, " 7 "), Ok(Checked::Number(Some(7))));
        for bad in ["11", "-1", "1.5", "true", "Auto"] {
            assert_eq!(
                check(kind, bad).unwrap_err(),
                "expected 'auto' or a whole number from 0 to 10"
            );
        }
        assert!(Kind::Number { min: 0, max: 9 }.check(&Given::from("3.5")).is_err());
        assert!(Kind::Number { min: 0, max: 9 }.check(&Given::from("true")).is_err());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            bytes in prop_oneof![any::<u64>(), (0u64..4096).prop_map(|n| n << 20)],
        ) {
            // ByteSize parses numbers with a unit as floating point, which is exact up to 2^53.
            let bytes = bytes >> 11;
            let kind = Kind::Bytes { min: 0, max: u64::MAX };
            let checked = Checked::Number(Some(bytes));
            prop_assert_eq!(check(kind, &kind.write(&checked)), Ok(checked));
        }
    }
}
