//! Finds the jobs of this host. Jobs that this user has started have files ([`run_file`]). For
//! other jobs it asks the daemons, which serve `/coordinator` beside their metrics.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{SocketAddr, TcpStream, ToSocketAddrs},
    thread,
    time::{Duration, Instant},
};

use gradwire_launcher::{
    error::{CommandError, print_line},
    run_file::{self, RunningJob},
};
use gradwire_settings::{AddressRange, Settings};
use gradwire_viewer::view::count;

use crate::cluster::printable;

/// How long all daemons may take to answer (WAIT). A port without a listener answers at once.
const ANSWER: Duration = Duration::from_secs(2);

/// How many bytes of an answer are read.
const MAX_ANSWER: usize = 4096;

/// The text before the address in an answer.
const TYPE: &str = "coordinator ";

/// The hint if no job is found.
const NAME_IT: &str =
    "give the address of the coordinator; gradwire run --verbose shows it as \"grpc\"";

/// The address of the coordinator of a job. `named` is this address, the address of the status
/// page, or the id if this user started the job on this host. Without it, the job is the only one
/// of this user, or else of this host.
///
/// # Errors
/// [`CommandError`] if no job matches, or several do.
pub fn coordinator(named: Option<&str>) -> Result<String, CommandError> {
    if let Some(page) = named.and_then(|named| named.strip_prefix("http://")) {
        return coordinator_by(page.split('/').next().unwrap_or_default());
    }
    match named {
        // An IPv6 address contains colons.
        Some(named) if named.contains(':') => {
            let port = named.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
            let wrong = || {
                let what = format!("invalid address '{}': expected IP:PORT", printable(named));
                CommandError::usage(what).hint(NAME_IT)
            };
            return port.map(|_| named.to_owned()).ok_or_else(wrong);
        }
        _ => {}
    }
    let jobs = running()?;
    match (named, &jobs[..]) {
        (None, []) => on_this_host(),
        _ => Ok(choose(named, &jobs)?.coordinator.to_string()),
    }
}

/// A job that this user has started on this host: by its id, by the address of its coordinator, or
/// the only one.
///
/// # Errors
/// [`CommandError`] if no job matches, or several do.
pub fn own_job(named: Option<&str>) -> Result<RunningJob, CommandError> {
    let jobs = running()?;
    choose(named, &jobs).cloned()
}

fn running() -> Result<Vec<RunningJob>, CommandError> {
    let jobs = run_file::running().map_err(|error| {
        CommandError::failed(format!("can't find the running jobs: {error}")).hint(NAME_IT)
    })?;
    if let Some(removed) = jobs.removed() {
        print_line(format_args!("gradwire: {removed}"));
    }
    Ok(jobs.running)
}

fn choose<'a>(named: Option<&str>, jobs: &'a [RunningJob]) -> Result<&'a RunningJob, CommandError> {
    match (named, jobs) {
        (Some(named), jobs) => {
            let is_it =
                |job: &&RunningJob| job.job == named || job.coordinator.to_string() == named;
            jobs.iter().find(is_it).ok_or_else(|| unknown(named, jobs))
        }
        (None, []) => Err(CommandError::failed("you have no job on this host")),
        (None, [job]) => Ok(job),
        (None, jobs) => {
            let what = format!("{} of your jobs run on this host", jobs.len());
            Err(CommandError::failed(what).hint(format!("give one of {}", listed(jobs))))
        }
    }
}

/// The error for an id of none of these jobs.
fn unknown(id: &str, jobs: &[RunningJob]) -> CommandError {
    let what = format!("you have no job '{}' on this host", printable(id));
    match jobs {
        [] => CommandError::failed(what).hint(NAME_IT),
        jobs => CommandError::failed(what).hint(format!("your jobs are {}", listed(jobs))),
    }
}

/// These jobs in one line.
fn listed(jobs: &[RunningJob]) -> String {
    let line = |job: &RunningJob| {
        let RunningJob { job, coordinator, ranks, hosts, command, .. } = job;
        let (ranks, hosts) = (count(u64::from(*ranks), "rank"), count(*hosts as u64, "host"));
        printable(&format!("{coordinator} (job {job}, {ranks} on {hosts}: {command})"))
    };
    jobs.iter().map(line).collect::<Vec<_>>().join(", ")
}

/// Asks the daemons of this host, which other users or other launchers may have started.
fn on_this_host() -> Result<String, CommandError> {
    // Daemons listen here by default.
    let AddressRange { ip, ports } = Settings::default().metrics.listen;
    let place = AddressRange { ip, ports: ports.clone() };
    // All at once, so that a silent listener does not delay the others.
    let end = Instant::now() + ANSWER;
    let found: BTreeSet<SocketAddr> = thread::scope(|scope| {
        let asked: Vec<_> =
            ports.map(|port| scope.spawn(move || ask(SocketAddr::new(ip, port), end))).collect();
        asked.into_iter().filter_map(|answer| answer.join().ok().flatten()).collect()
    });
    let mut all = found.iter().map(ToString::to_string);
    match (all.next(), all.next()) {
        (Some(only), None) => Ok(only),
        (None, _) => {
            let what = format!("no job found on this host: no daemon answers at {place}");
            Err(CommandError::failed(what).hint(NAME_IT))
        }
        (Some(one), Some(other)) => {
            let all: Vec<String> = [one, other].into_iter().chain(all).collect();
            let what = format!("there are {} jobs on this host", all.len());
            let hint = format!("give the address of one of their coordinators: {}", all.join(", "));
            Err(CommandError::failed(what).hint(hint))
        }
    }
}

/// The address of the coordinator, from the daemon that serves its metrics at `metrics`.
///
/// # Errors
/// [`CommandError`] if no daemon answers there.
pub fn coordinator_by(metrics: &str) -> Result<String, CommandError> {
    let end = Instant::now() + ANSWER;
    // The host may be given by its name, like in a browser.
    let found = metrics.to_socket_addrs().into_iter().flatten().find_map(|daemon| ask(daemon, end));
    let none = || {
        let what = format!("no daemon answers at '{}'", printable(metrics));
        CommandError::failed(what).hint(NAME_IT)
    };
    found.map(|address| address.to_string()).ok_or_else(none)
}

/// Asks the daemon at an address, if there is one.
fn ask(daemon: SocketAddr, end: Instant) -> Option<SocketAddr> {
    // `None` once the time is over: a limit of zero would mean no limit.
    let left = || end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
    let mut stream = TcpStream::connect_timeout(&daemon, left()?).ok()?;
    stream.set_write_timeout(left()).ok()?;
    write!(stream, "GET /coordinator HTTP/1.0\r\nHost: {daemon}\r\n\r\n").ok()?;
    let mut answer = Vec::new();
    let mut buffer = [0; MAX_ANSWER];
    while answer.len() < MAX_ANSWER {
        stream.set_read_timeout(Some(left()?)).ok()?;
        match stream.read(&mut buffer).ok()? {
            0 => break,
            read => answer.extend_from_slice(&buffer[..read]),
        }
    }
    address(std::str::from_utf8(&answer).ok()?)
}

/// The address in an answer (TRUST).
fn address(answer: &str) -> Option<SocketAddr> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let is_good = head.split(' ').nth(1) == Some("200");
    body.strip_prefix(TYPE).filter(|_| is_good)?.trim_end().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_of_a_daemon_has_an_address() {
        let answer = "HTTP/1.0 200 OK\r\ncontent-length: 23\r\n\r\ncoordinator 10.0.0.1:7\n";
        assert_eq!(address(answer), Some("10.0.0.1:7".parse().unwrap()));
        for other in [
            answer.replace("200 OK", "404 Not Found"),
            answer.replace("10.0.0.1:7", "10.0.0.1"),
            answer.replace("coordinator ", "<html>"),
            String::new(),
        ] {
            assert_eq!(address(&other), None, "TRUST: {other}");
        }
    }

    /// The wait for a silent listener is limited.
    #[test]
    fn a_silent_listener_is_not_a_daemon() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap();
        assert_eq!(ask(address, Instant::now() + Duration::from_millis(100)), None);
        assert_eq!(ask(address, Instant::now()), None);
    }
}
