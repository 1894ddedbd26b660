//! The hosts and how many ranks each takes: parses `-H`, `--hostfile` and `--servers` (TRUST).

use std::{collections::BTreeSet, fmt, net::Ipv6Addr};

use gradwire_proto::{InvalidRackLabel, MAX_LABEL_BYTES, check_rack_label};

use crate::args::MAX_RANKS;

/// A host with its slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Its name or address, as the user gave it.
    pub name: String,
    /// How many ranks it takes; none for a server.
    pub slots: u32,
    /// The label of its rack; empty for none.
    pub rack: String,
    /// The rate of its line in Mbit/s, if it was given.
    pub line_mbit: Option<u32>,
    /// The network that carries its data, instead of the setting `data.interface`.
    pub interface: Option<String>,
}

impl Host {
    /// A host with a name and slots only.
    pub fn new(name: impl Into<String>, slots: u32) -> Self {
        Self { name: name.into(), slots, rack: String::new(), line_mbit: None, interface: None }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.contains(':') {
            return write!(f, "[{}]:{}", self.name, self.slots);
        }
        write!(f, "{}:{}", self.name, self.slots)
    }
}

/// The fastest line, in Mbit/s: the limit of the setting `node.line_mbit`.
const MAX_LINE_MBIT: u32 = 10_000_000;

/// The longest value of `interface=` in a hostfile.
const MAX_INTERFACE_BYTES: usize = 256;

/// A mistake in a list of hosts, and its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {mistake}")]
pub struct HostsError {
    place: String,
    mistake: Mistake,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum Mistake {
    #[error(
        "'{0}' is not a slot count: expected 1 to {MAX_RANKS}; a host without ranks is a server \
         (--servers, or role=server in a hostfile)"
    )]
    Slots(String),
    #[error("'{0}' is not a host's name or address")]
    Name(String),
    #[error(
        "'{given}' may mean the address {given} or {slots} slots of {address}; write [{given}] or \
         [{address}]:{slots}"
    )]
    Ambiguous { given: String, address: String, slots: String },
    #[error(
        "unknown word '{0}'; a line is `host slots=N`, or `host role=server`; rack=LABEL, \
         line=RATE and interface=NAME may follow"
    )]
    Word(String),
    #[error("{word} is given twice; '{given}' is the second one")]
    Again { word: String, given: String },
    #[error(
        "'{0}' is not the rate of a line; it must be a number of Mbit/s from 1 to {MAX_LINE_MBIT}, \
         such as 25000 or 25G"
    )]
    Line(String),
    #[error("'{0}' is not a rack's label; it must be {InvalidRackLabel}")]
    Rack(String),
    #[error(
        "'{0}' is not an interface; it must be a name such as eth1, a pattern such as ib*, or a \
         network such as 10.1.0.0/16"
    )]
    Interface(String),
    #[error("host {0} is given twice; give it once with all its slots")]
    Twice(String),
    #[error("host {0} is a server and has slots; omit them, because a server has no ranks")]
    ServerWithSlots(String),
    #[error(
        "host {0} is a server, but the first host must have ranks, because its daemon hosts the \
         coordinator; list a host with ranks before it"
    )]
    ServerFirst(String),
    #[error(
        "host {} has {}, which is less than {ranks}", .host.name, count(.host.slots, "slot")
    )]
    TooFew { host: Host, ranks: u32 },
    #[error("no hosts are given")]
    None,
}

impl Mistake {
    fn at(self, place: impl Into<String>) -> HostsError {
        HostsError { place: place.into(), mistake: self }
    }
}

/// Parses `-H`: `host:slots,…`, or `[v6]:slots` for IPv6; a host without `:slots` takes one rank.
///
/// # Errors
/// [`HostsError`] with the entry that is wrong.
pub fn parse_list(text: &str) -> Result<Vec<Host>, HostsError> {
    parse_list_with(text, 1)
}

/// As [`parse_list`]; a host without `:slots` takes `slots` ranks.
///
/// # Errors
/// As [`parse_list`].
pub fn parse_list_with(text: &str, slots: u32) -> Result<Vec<Host>, HostsError> {
    collect("-H", entries("-H", text).map(|(place, entry)| (place, with_default(entry, slots))))
}

/// Gives each host `ranks` slots (`-N`), or this machine if `hosts` is empty. A host with one slot
/// may have been written without slots, so it gets them, too.
///
/// # Errors
/// [`HostsError`] for a host with fewer slots.
pub fn with_slots(mut hosts: Vec<Host>, ranks: u32) -> Result<Vec<Host>, HostsError> {
    if hosts.is_empty() {
        return Ok(vec![Host::new("localhost", ranks)]);
    }
    for host in hosts.iter_mut().filter(|host| host.slots > 0) {
        if host.slots < ranks {
            return Err(Mistake::TooFew { host: host.clone(), ranks }.at("-N"));
        }
        host.slots = ranks;
    }
    Ok(hosts)
}

/// Parses `--servers`: `host,…`, hosts without ranks. They come after `hosts`, or this machine.
///
/// # Errors
/// [`HostsError`] with the entry that is wrong.
pub fn parse_servers(text: &str, hosts: &[Host]) -> Result<Vec<Host>, HostsError> {
    let servers = entries("--servers", text)
        .map(|(place, entry)| (place, entry_of(entry).and_then(|host| as_server(entry, host))));
    let known = hosts.iter().map(|host| (String::new(), Ok(host.clone())));
    let all = collect("--servers", known.chain(servers))?;
    if all.len() == hosts.len() { Err(Mistake::None.at("--servers")) } else { Ok(all) }
}

/// The entries of a list, each with its place for errors.
fn entries<'a>(option: &'a str, text: &'a str) -> impl Iterator<Item = (String, &'a str)> {
    let entries = text.split(',').map(str::trim).enumerate().filter(|(_, entry)| !entry.is_empty());
    entries.map(move |(i, entry)| (format!("{option} entry {}", i + 1), entry))
}

/// The host of an entry; without slots it gets `slots`.
fn with_default(entry: &str, slots: u32) -> Result<Host, Mistake> {
    let host = entry_of(entry)?;
    Ok(if has_slots(entry, &host) { host } else { Host { slots, ..host } })
}

/// Whether a host was written with slots.
fn has_slots(written: &str, host: &Host) -> bool {
    let bare = written.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    bare.unwrap_or(written) != host.name
}

/// Makes a server of a host that was written without slots.
fn as_server(written: &str, host: Host) -> Result<Host, Mistake> {
    if has_slots(written, &host) {
        return Err(Mistake::ServerWithSlots(host.name));
    }
    Ok(Host { slots: 0, ..host })
}

/// Parses a hostfile. A line is `host slots=N`, `host:N`, `host` for one rank, or `host
/// role=server` for none; `rack=LABEL`, `line=RATE` and `interface=NAME` may follow. `#` begins a
/// comment. Blank lines and a byte order mark are ignored. `file` is its name, for errors.
///
/// # Errors
/// [`HostsError`] with the line that is wrong.
pub fn parse_file(file: &str, text: &str) -> Result<Vec<Host>, HostsError> {
    parse_file_with(file, text, 1)
}

/// As [`parse_file`]; a host without slots takes `slots` ranks.
///
/// # Errors
/// As [`parse_file`].
pub fn parse_file_with(file: &str, text: &str, slots: u32) -> Result<Vec<Host>, HostsError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = text.lines().enumerate().filter_map(|(i, line)| {
        let line = line.split('#').next().unwrap_or_default().trim();
        (!line.is_empty()).then(|| (format!("hostfile {file} line {}", i + 1), line))
    });
    let hosts = lines.enumerate().map(|(at, (place, line))| match line_of(line, slots) {
        Ok(host) if at == 0 && host.slots == 0 => (place, Err(Mistake::ServerFirst(host.name))),
        host => (place, host),
    });
    collect(&format!("hostfile {file}"), hosts)
}

/// Parses the output of a host discovery script. A line is `host:slots`, or `host` for `slots`;
/// comments and blank lines are as in a hostfile. `script` is its path, for errors.
///
/// # Errors
/// [`HostsError`] with the line that is wrong.
pub fn parse_script(script: &str, text: &str, slots: u32) -> Result<Vec<Host>, HostsError> {
    let all = format!("the output of the host discovery script {script}");
    let lines = text.lines().enumerate().filter_map(|(i, line)| {
        let line = line.split('#').next().unwrap_or_default().trim();
        (!line.is_empty()).then(|| (format!("{all}, line {}, '{}'", i + 1, shown(line)), line))
    });
    collect(&all, lines.map(|(place, line)| (place, with_default(line, slots))))
}

fn collect(
    all: &str,
    hosts: impl Iterator<Item = (String, Result<Host, Mistake>)>,
) -> Result<Vec<Host>, HostsError> {
    let (mut seen, mut found) = (BTreeSet::new(), Vec::new());
    for (place, host) in hosts {
        match host {
            Ok(host) if seen.insert(host.name.to_lowercase()) => found.push(host),
            Ok(host) => return Err(Mistake::Twice(host.name).at(place)),
            Err(mistake) => return Err(mistake.at(place)),
        }
    }
    if found.is_empty() { Err(Mistake::None.at(all)) } else { Ok(found) }
}

/// The host of a line of a hostfile; without slots it gets `default`.
fn line_of(line: &str, default: u32) -> Result<Host, Mistake> {
    let mut words = line.split_whitespace();
    let entry = words.next().unwrap_or_default();
    let mut host = entry_of(entry)?;
    let (mut slots, mut rack, mut line, mut interface) = (None, None, None, None);
    let mut is_server = false;
    for word in words {
        match word.split_once('=') {
            Some(("slots", number)) if slots.is_none() => slots = Some(number_of(number)?),
            Some(("role", "server")) if !is_server => is_server = true,
            Some(("rack", label)) if rack.is_none() => rack = Some(rack_of(label)?),
            Some(("line", rate)) if line.is_none() => line = Some(line_mbit_of(rate)?),
            Some(("interface", name)) if interface.is_none() => {
                interface = Some(interface_of(name)?)
            }
            Some((word @ ("slots" | "rack" | "line" | "interface"), again)) => {
                return Err(Mistake::Again { word: word.to_owned(), given: shown(again) });
            }
            _ => return Err(Mistake::Word(shown(word))),
        }
    }
    host.rack = rack.unwrap_or_default();
    (host.line_mbit, host.interface) = (line, interface);
    match slots {
        Some(_) if is_server => Err(Mistake::ServerWithSlots(host.name)),
        None if is_server => as_server(entry, host),
        Some(slots) if has_slots(entry, &host) => {
            Err(Mistake::Again { word: "slots".to_owned(), given: slots.to_string() })
        }
        None if !has_slots(entry, &host) => Ok(Host { slots: default, ..host }),
        _ => Ok(Host { slots: slots.unwrap_or(host.slots), ..host }),
    }
}

fn rack_of(label: &str) -> Result<String, Mistake> {
    match check_rack_label(label) {
        Ok(()) if !label.is_empty() => Ok(label.to_owned()),
        _ => Err(Mistake::Rack(shown(label))),
    }
}

fn interface_of(given: &str) -> Result<String, Mistake> {
    // TRUST: it becomes the value of a variable. Whether it exists is known only on the host.
    let fits = (1..=MAX_INTERFACE_BYTES).contains(&given.len())
        && given.bytes().all(|byte| byte.is_ascii_graphic());
    if fits { Ok(given.to_owned()) } else { Err(Mistake::Interface(shown(given))) }
}

/// The rate of a line in Mbit/s, from a number or one with a unit, such as 25G.
fn line_mbit_of(given: &str) -> Result<u32, Mistake> {
    let (number, unit) = match given.strip_suffix(['G', 'g']) {
        Some(number) => (number, 1000),
        None => (given.strip_suffix(['M', 'm']).unwrap_or(given), 1),
    };
    let digits = number.bytes().all(|byte| byte.is_ascii_digit());
    let rate = number.parse().ok().filter(|_| digits).and_then(|rate: u32| rate.checked_mul(unit));
    let rate = rate.filter(|rate| (1..=MAX_LINE_MBIT).contains(rate));
    rate.ok_or_else(|| Mistake::Line(shown(given)))
}

fn entry_of(entry: &str) -> Result<Host, Mistake> {
    let (name, slots) = match entry.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((name, "")) => (name, "1"),
        Some((name, rest)) => (name, rest.strip_prefix(':').unwrap_or(rest)),
        // More than one colon and no brackets: an IPv6 address without slots.
        None if entry.matches(':').count() > 1 => (bare_address(entry)?, "1"),
        None => entry.rsplit_once(':').unwrap_or((entry, "1")),
    };
    // A name becomes an argument of ssh: with a '-' at its start it would be an option.
    let fits = !name.is_empty()
        && name.len() <= MAX_LABEL_BYTES
        && !name.starts_with('-')
        && name.chars().all(|c| c.is_alphanumeric() || ".-_:@%".contains(c));
    if !fits {
        return Err(Mistake::Name(shown(name)));
    }
    let slots = number_of(slots)?;
    Ok(Host::new(name, slots))
}

fn number_of(given: &str) -> Result<u32, Mistake> {
    let digits = given.bytes().all(|byte| byte.is_ascii_digit());
    let number = given.parse().ok().filter(|n| digits && (1..=MAX_RANKS).contains(n));
    number.ok_or_else(|| Mistake::Slots(shown(given)))
}

/// An IPv6 address without brackets, so without slots.
fn bare_address(entry: &str) -> Result<&str, Mistake> {
    let is_address = |text: &str| {
        text.split('%').next().is_some_and(|address| address.parse::<Ipv6Addr>().is_ok())
    };
    match entry.rsplit_once(':') {
        Some((address, slots)) if is_address(address) => {
            let (given, address, slots) = (shown(entry), shown(address), shown(slots));
            Err(Mistake::Ambiguous { given, address, slots })
        }
        _ if is_address(entry) => Ok(entry),
        _ => Err(Mistake::Name(shown(entry))),
    }
}

/// The beginning of a text from outside, with invisible characters escaped.
fn shown(text: &str) -> String {
    let visible = |c: char| c == '\'' || c == '"' || c == '\\';
    let chars = text.chars().take(80);
    chars.flat_map(|c| if visible(c) { vec![c] } else { c.escape_debug().collect() }).collect()
}

/// A number with its noun: `1 rank`, `2 ranks`.
pub fn count(number: impl TryInto<u64>, noun: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn host(name: &str, slots: u32) -> Host {
        Host::new(name, slots)
    }

    #[test]
    fn lists_and_files_are_read() {
        assert_eq!(
            parse_list("a:2, user@b.example:4,c,[fe80::1%eth0]:3,::1").unwrap(),
            [
                host("a", 2),
                host("user@b.example", 4),
                host("c", 1),
                host("fe80::1%eth0", 3),
                host("::1", 1)
            ]
        );
        assert_eq!(parse_list("[::1]:2,2001:db8::7").unwrap()[1], host("2001:db8::7", 1));
        assert_eq!(parse_file("h", "\u{feff}a slots=2\n").unwrap(), [host("a", 2)]);
        let text = "# the cluster\n\na slots=2\n  b   slots=4  # fast\n\tc:3\nd\r\n";
        assert_eq!(
            parse_file("hosts", text).unwrap(),
            [host("a", 2), host("b", 4), host("c", 3), host("d", 1)]
        );
        let in_rack = |host: Host, rack: &str| Host { rack: rack.to_owned(), ..host };
        assert_eq!(
            parse_file("h", "a rack=pod1/r3 slots=2\nb:4 rack=r4\nc").unwrap(),
            [in_rack(host("a", 2), "pod1/r3"), in_rack(host("b", 4), "r4"), host("c", 1)]
        );
    }

    #[test]
    fn a_hostfile_names_interfaces() {
        let named = |text| parse_file("h", text).map(|hosts| hosts[0].interface.clone());
        assert_eq!(
            named("a slots=2 interface=eth1+eth2,10.1.0.0/16\n").unwrap().unwrap(),
            "eth1+eth2,10.1.0.0/16"
        );
        assert_eq!(named("a interface=ib* rack=r1").unwrap().as_deref(), Some("ib*"));
        for (text, expected) in [
            ("a interface=", "hostfile h line 1: '' is not an interface; it must be a name such"),
            ("a interface=x\u{7}", "hostfile h line 1: 'x\\u{7}' is not an interface"),
            ("a interface=x interface=y", "hostfile h line 1: interface is given twice; 'y' is"),
        ] {
            let error = named(text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }

    #[test]
    fn each_mistake_is_named_with_its_place() {
        let cases = [
            ("a:0", "-H entry 1: '0' is not a slot count: expected 1 to 1048576"),
            ("a:1,b:two", "-H entry 2: 'two' is not a slot count"),
            ("a:1,b:-2", "-H entry 2: '-2' is not a slot count"),
            ("a:+2", "-H entry 1: '+2' is not a slot count"),
            ("a:99999999999", "-H entry 1: '99999999999' is not a slot count"),
            ("a:1,b,A:2", "-H entry 3: host A is given twice"),
            ("-oProxyCommand=x:1", "-H entry 1: '-oProxyCommand=x' is not a host's name"),
            ("a b:1", "-H entry 1: 'a b' is not a host's name or address"),
            (":3", "-H entry 1: '' is not a host's name or address"),
            (" , ", "-H: no hosts are given"),
            (
                "::1:2",
                "-H entry 1: '::1:2' may mean the address ::1:2 or 2 slots of ::1; write [::1:2] \
                 or [::1]:2",
            ),
            ("a,fe80::1%eth0:4", "-H entry 2: 'fe80::1%eth0:4' may mean the address"),
            ("a:2:3", "-H entry 1: 'a:2:3' is not a host's name or address"),
            ("a\u{200b}b", "-H entry 1: 'a\\u{200b}b' is not a host's name or address"),
        ];
        for (text, expected) in cases {
            let error = parse_list(text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
        let cases = [
            ("a\nb slots=x\n", "hostfile h line 2: 'x' is not a slot count"),
            ("\n# c\na slot=2", "hostfile h line 3: unknown word 'slot=2'; a line is `host"),
            ("a slots=2 slots=3", "hostfile h line 1: slots is given twice; '3' is the second one"),
            ("a:2 slots=3", "hostfile h line 1: slots is given twice; '3' is the second one"),
            ("[::1]:2 slots=3", "hostfile h line 1: slots is given twice; '3' is the second one"),
            ("a rack=x rack=y", "hostfile h line 1: rack is given twice; 'y' is the second one"),
            ("a line=1 line=2", "hostfile h line 1: line is given twice; '2' is the second one"),
            ("a line=", "hostfile h line 1: '' is not the rate of a line; it must be a number"),
            ("a line=0", "hostfile h line 1: '0' is not the rate of a line"),
            ("a line=25T", "hostfile h line 1: '25T' is not the rate of a line"),
            ("a line=99999G", "hostfile h line 1: '99999G' is not the rate of a line"),
            ("a\nb rack=", "hostfile h line 2: '' is not a rack's label; it must be 1 to 8 names"),
            ("a rack=pod1//r3", "hostfile h line 1: 'pod1//r3' is not a rack's label"),
            ("a rack=1/2/3/4/5/6/7/8/9", "hostfile h line 1: '1/2/3/4/5/6/7/8/9' is not a rack's"),
            ("a rack=\u{7}", "hostfile h line 1: '\\u{7}' is not a rack's label"),
            ("a\n\na slots=3", "hostfile h line 3: host a is given twice"),
            ("# nothing\n", "hostfile h: no hosts are given"),
            ("a\nb role=worker", "hostfile h line 2: unknown word 'role=worker'; a line is"),
            ("a\nb:2 role=server", "hostfile h line 2: host b is a server and has slots"),
            ("a\nb role=server slots=1", "hostfile h line 2: host b is a server and has slots"),
            ("a role=server\nb", "hostfile h line 1: host a is a server, but the first host must"),
        ];
        for (text, expected) in cases {
            let error = parse_file("h", text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }

    #[test]
    fn every_host_gets_as_many_ranks() {
        let shown = |list: &str, ranks| {
            let hosts = parse_list_with(list, ranks).unwrap();
            let hosts = parse_servers("s", &hosts).unwrap();
            let hosts = with_slots(hosts, ranks).map_err(|error| error.to_string())?;
            let hosts: Vec<_> = hosts.iter().map(ToString::to_string).collect();
            Ok::<_, String>(hosts.join(","))
        };
        assert_eq!(shown("a,b:4,c:6", 4), Ok("a:4,b:4,c:4,s:0".to_owned()));
        assert_eq!(shown("a:8", 2), Ok("a:2,s:0".to_owned()));
        for slots in [1, 2] {
            let error = format!("-N: host a has {}, which is less than 4", count(slots, "slot"));
            assert_eq!(shown(&format!("a:{slots}"), 4), Err(error));
        }
        let in_file = parse_file_with("h", "a\nb slots=1\nc:2\nd role=server", 2).unwrap();
        assert_eq!(in_file.iter().map(|host| host.slots).collect::<Vec<_>>(), [2, 1, 2, 0]);
        assert_eq!(with_slots(Vec::new(), 3).unwrap()[0].to_string(), "localhost:3");
    }

    #[test]
    fn servers_follow_hosts_with_ranks() {
        let hosts = parse_file("h", "a:2\nb role=server rack=r1\nc").unwrap();
        let slots: Vec<u32> = hosts.iter().map(|host| host.slots).collect();
        assert_eq!((slots, hosts[1].rack.as_str()), (vec![2, 0, 1], "r1"));
        let all = parse_servers(" d,[::1], e", &parse_list("a:2").unwrap()).unwrap();
        assert_eq!(all, [host("a", 2), host("d", 0), host("::1", 0), host("e", 0)]);
        let cases = [
            ("d:2", "--servers entry 1: host d is a server and has slots"),
            (
                "d:0",
                "--servers entry 1: '0' is not a slot count: expected 1 to 1048576; a host without \
                 ranks is a server",
            ),
            ("d,a", "--servers entry 2: host a is given twice"),
            ("d,,d", "--servers entry 3: host d is given twice"),
            (",", "--servers: no hosts are given"),
            ("d e", "--servers entry 1: 'd e' is not a host's name"),
        ];
        for (text, expected) in cases {
            let error = parse_servers(text, &[host("a", 1)]).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics_or_becomes_an_option_of_ssh(
            text in "[a-c:,\\[\\]=# \n0-9-]{0,40}",
        ) {
            for host in parse_list(&text).into_iter().chain(parse_file("f", &text)).flatten() {
                prop_assert!(!host.name.starts_with('-'));
            }
        }

        #[test]
        fn a_list_is_read_as_it_is_written(slots in prop::collection::vec(1u32..100, 1..8)) {
            let slots = slots.iter().enumerate();
            let hosts: Vec<_> = slots.map(|(i, n)| host(&format!("h{i}"), *n)).collect();
            let text = hosts.iter().map(Host::to_string).collect::<Vec<_>>().join(",");
            prop_assert_eq!(parse_list(&text).unwrap(), hosts);
        }
    }
}
