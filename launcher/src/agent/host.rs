//! Does this host have what the job needs? Checked before anything is started, so that a missing
//! program is one clear error and not a half-started job.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs,
    hash::{BuildHasher, RandomState},
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use gradwire_services::launch::{Begin, ITSELF, Text};

/// The programs and the directory, as found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checked {
    /// The program of the ranks.
    pub program: PathBuf,
    /// The program of the daemon.
    pub gradwired: PathBuf,
    /// The working directory of all.
    pub directory: PathBuf,
}

/// Finds the programs and the directory.
///
/// # Errors
/// What is missing, and a hint.
pub fn check(begin: &Begin) -> Result<Checked, (String, String)> {
    let host = &begin.host;
    let (theirs, ours) = (&begin.version, gradwire_proto::VERSION);
    if theirs != ours {
        return Err((
            format!("host {host} has gradwire {ours}, but the launcher has {theirs}"),
            "install the same release on every host".to_owned(),
        ));
    }
    let directory = match begin.directory.to_os() {
        empty if empty.is_empty() => PathBuf::from("."),
        directory => PathBuf::from(directory),
    };
    if !directory.is_dir() {
        return Err((
            format!("directory {} does not exist on host {host}", directory.display()),
            "start the job from a directory that exists on every host".to_owned(),
        ));
    }
    let path = match begin.environment.get("PATH") {
        Some(path) => OsString::from(path),
        None => std::env::var_os("PATH").unwrap_or_default(),
    };
    let find = |program: &Text| which::which_in(program.to_os(), Some(&path), &directory);
    let own = (begin.program == ITSELF.into()).then(|| std::env::current_exe().ok()).flatten();
    let program = own.map_or_else(|| find(&begin.program), Ok).map_err(|_| {
        let name = &begin.program;
        let hint =
            if Path::new(&name.to_os()).extension().is_some_and(|extension| extension == "py") {
                format!("run a script with its interpreter: python {name}")
            } else {
                "the program and its arguments follow the options of gradwire run".to_owned()
            };
        (format!("program '{name}' {}", why_not(name, host, &path, &directory)), hint)
    })?;
    let gradwired = find_gradwired(&begin.gradwired, &path, &directory).ok_or_else(|| {
        let name = if begin.gradwired.is_empty() { "gradwired" } else { &begin.gradwired };
        (
            format!("program '{name}' not found on host {host}"),
            "install gradwired beside gradwire, or set launch.gradwired".to_owned(),
        )
    })?;
    Ok(Checked { program, gradwired, directory })
}

/// The program of the daemon: the setting `launch.gradwired`, or else beside this one or in PATH.
pub fn find_gradwired(setting: &str, path: &OsStr, directory: &Path) -> Option<PathBuf> {
    let find = |program: &str| which::which_in(program, Some(path), directory).ok();
    match setting {
        "" => beside_own().or_else(|| find("gradwired")),
        program => find(program),
    }
}

/// Why a program can't be run: it does not exist, or is not executable.
fn why_not(name: &Text, host: &str, path: &OsStr, directory: &Path) -> String {
    let name = name.to_os();
    let not_there = |place: String| format!("not found on host {host} ({place})");
    if !name.as_bytes().contains(&b'/') {
        let places = std::env::split_paths(path).map(|place| directory.join(place).join(&name));
        let mut reasons = places.filter_map(|place| Some((unusable(&place)?, place)));
        return match reasons.next() {
            Some((reason, place)) => {
                format!("is {} on host {host}, which {reason}", place.display())
            }
            None => not_there(format!("PATH={}", path.to_string_lossy())),
        };
    }
    match unusable(&directory.join(name)) {
        Some(reason) => format!("on host {host} {reason}"),
        None => not_there(format!("in {}", directory.display())),
    }
}

/// Why a file can't be run; `None` if it does not exist.
fn unusable(file: &Path) -> Option<String> {
    match file.metadata() {
        Ok(about) if about.is_dir() => Some("is a folder".to_owned()),
        Ok(_) => Some("is not executable".to_owned()),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => Some(format!("can't be read: {error}")),
    }
}

fn beside_own() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    let beside = own.parent().unwrap_or(Path::new("/")).join("gradwired");
    beside.is_file().then_some(beside)
}

/// The first port that is tried, and how many are tried.
const FIRST_PORT: u16 = 10_000;
const TRIES: u64 = 64;

/// A TCP port without a listener at this moment.
///
/// A rank may listen on it only after seconds of imports. So it is below the range from which the
/// system takes ports for connections: otherwise a connection of another program could have it by
/// then.
///
/// # Errors
/// An error of the system, if it has no port.
pub fn free_port() -> io::Result<u16> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let end = range.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(0);
    // Jobs that start at the same time try different ports.
    let start = RandomState::new().hash_one(std::process::id());
    let count = u64::from(u16::saturating_sub(end, FIRST_PORT));
    let tried = (0..TRIES.min(count)).map(|number| start.wrapping_add(number) % count);
    let port = |offset: u64| FIRST_PORT + u16::try_from(offset).unwrap_or(0);
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok();
    match tried.map(port).find(is_free) {
        Some(port) => Ok(port),
        None => Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port()),
    }
}

/// This machine's address as a remote host sees it: the source address of packets to that host. No
/// packet is sent.
pub fn source_towards(remote: IpAddr) -> Option<IpAddr> {
    let any: SocketAddr =
        if remote.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0; 8], 0).into() };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect((remote, 9)).ok()?;
    socket.local_addr().ok().map(|at| at.ip()).filter(|address| !address.is_unspecified())
}

/// The address by which this host was reached: from `SSH_CONNECTION` of ssh, "client port server
/// port", or this host's address towards the host on which srun runs.
pub fn reached_address() -> Option<IpAddr> {
    let by_srun = || source_towards(std::env::var("SLURM_LAUNCH_NODE_IPADDR").ok()?.parse().ok()?);
    let by_ssh = std::env::var("SSH_CONNECTION").ok();
    by_ssh.map_or_else(by_srun, |text| parse_ssh_connection(&text))
}

fn parse_ssh_connection(text: &str) -> Option<IpAddr> {
    // A link-local IPv6 address has a zone after '%', which means nothing to other hosts.
    text.split_whitespace().nth(2)?.split('%').next()?.parse().ok()
}

/// The variable with the number of threads that PyTorch, NumPy and others use in each process.
const THREADS: &str = "OMP_NUM_THREADS";

/// The number of threads of a rank, as a variable, unless the user has set it: its share of this
/// host's cores. Without the variable, N ranks of a host together start N times as many threads as
/// it has cores. `begin` and `start` are the environments of the job and of the rank.
pub(crate) fn threads(
    begin: &BTreeMap<String, String>,
    start: &BTreeMap<String, String>,
) -> Option<(&'static str, String)> {
    let is_set = start.contains_key(THREADS)
        || begin.contains_key(THREADS)
        || std::env::var_os(THREADS).is_some();
    let ranks: usize = start.get("LOCAL_WORLD_SIZE")?.parse().ok()?;
    let cores = std::thread::available_parallelism().ok()?.get();
    (!is_set).then(|| (THREADS, (cores / ranks.max(1)).max(1).to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_do_not_take_the_free_port() {
        let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
        let first: u16 = range.split_whitespace().next().unwrap().parse().unwrap();
        if first <= FIRST_PORT {
            println!("skipped: the system takes all ports for connections");
            return;
        }
        let port = free_port().unwrap();
        assert!((FIRST_PORT..first).contains(&port), "{port}");
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
        assert_ne!(free_port().unwrap(), listener.local_addr().unwrap().port());
    }

    fn begin(program: &str, gradwired: &str) -> Begin {
        Begin {
            version: gradwire_proto::VERSION.to_owned(),
            host: "n1".to_owned(),
            grace_ms: 0,
            silence_ms: 0,
            directory: "/".into(),
            environment: [("PATH".to_owned(), "/bin:/usr/bin".to_owned())].into(),
            program: program.into(),
            gradwired: gradwired.to_owned(),
            recorder: String::new(),
            leftovers: Vec::new(),
        }
    }

    fn in_path(program: &str, path: &str) -> Begin {
        let environment = [("PATH".to_owned(), path.to_owned())].into();
        Begin { environment, ..begin(program, "/bin/sh") }
    }

    #[test]
    fn what_is_missing_is_named_with_its_host() {
        assert!(check(&begin("sh", "sh")).unwrap().program.ends_with("sh"));
        let own = check(&begin(ITSELF, "sh")).unwrap().program;
        assert_eq!(own, std::env::current_exe().unwrap());
        let cases = [
            (begin("zonk", "sh"), "program 'zonk' not found on host n1 (PATH=/bin:/usr/bin)"),
            (begin("./zonk", "sh"), "program './zonk' not found on host n1 (in /)"),
            (begin("etc/passwd", "sh"), "program 'etc/passwd' on host n1 is not executable"),
            (begin("./etc", "sh"), "program './etc' on host n1 is a folder"),
            (
                begin("etc/passwd/x", "sh"),
                "program 'etc/passwd/x' on host n1 can't be read: Not a directory (os error 20)",
            ),
            (
                in_path("passwd", "/zonk:/etc"),
                "program 'passwd' is /etc/passwd on host n1, which is not executable",
            ),
            (begin("sh", "zonkd"), "program 'zonkd' not found on host n1"),
            (
                Begin { directory: "/zonk".into(), ..begin("sh", "sh") },
                "directory /zonk does not exist on host n1",
            ),
            (
                Begin { version: "9.9.9".into(), ..begin("sh", "sh") },
                "host n1 has gradwire 0.1.0, but the launcher has 9.9.9",
            ),
        ];
        for (begin, expected) in cases {
            let (what, hint) = check(&begin).unwrap_err();
            assert_eq!(what, expected);
            assert!(!hint.is_empty());
        }
    }

    #[test]
    fn names_need_not_be_utf_8() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join(OsStr::from_bytes(b"caf\xe9"));
        let program = directory.join(OsStr::from_bytes(b"run\xe9"));
        std::fs::create_dir(&directory).unwrap();
        std::fs::copy("/bin/sh", &program).unwrap();
        let begin = Begin {
            directory: directory.clone().into_os_string().into(),
            program: Text::from(&b"./run\xe9"[..]),
            ..begin("", "sh")
        };
        let checked = check(&begin).unwrap();
        assert_eq!(checked.directory, directory);
        assert_eq!(checked.program.file_name(), program.file_name());
    }

    #[test]
    fn the_address_that_ssh_reached_is_read() {
        let parse = |text: &str| parse_ssh_connection(text).map(|at| at.to_string());
        assert_eq!(parse("10.0.0.9 51000 10.0.0.1 22").as_deref(), Some("10.0.0.1"));
        assert_eq!(parse("fe80::2%eth0 1 fe80::1%eth0 22").as_deref(), Some("fe80::1"));
        assert_eq!(parse("10.0.0.9 51000"), None);
    }

    #[test]
    fn a_rank_gets_its_share_of_the_cores() {
        let cores = std::thread::available_parallelism().unwrap().get();
        let start =
            |ranks: usize| BTreeMap::from([("LOCAL_WORLD_SIZE".to_owned(), ranks.to_string())]);
        let given = BTreeMap::from([(THREADS.to_owned(), "7".to_owned())]);
        let none = BTreeMap::new();
        if std::env::var_os(THREADS).is_none() {
            let shares = [(1, cores), (cores, 1), (10 * cores, 1)];
            for (ranks, share) in shares {
                assert_eq!(threads(&none, &start(ranks)), Some((THREADS, share.to_string())));
            }
        }
        assert_eq!(threads(&given, &start(1)), None);
        assert_eq!(threads(&none, &given), None, "without a number of ranks");
    }
}
