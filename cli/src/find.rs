//! Finds the jobs of this host: their daemons serve `/coordinator` where they serve their metrics.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use gradwire_launcher::error::CommandError;
use gradwire_settings::{AddressRange, Settings};

/// How long a daemon may take to answer (WAIT). A port at which nobody listens answers at once.
const ANSWER: Duration = Duration::from_secs(2);

/// The most bytes that are read of an answer.
const MAX_ANSWER: u64 = 4096;

/// What an answer contains before the address.
const TYPE: &str = "coordinator ";

/// The address of the coordinator of the only job of this host.
///
/// # Errors
/// [`CommandError`] if there is none, or with the addresses of all if there are several.
pub fn coordinator() -> Result<String, CommandError> {
    // Daemons listen there if nobody has set another place.
    let AddressRange { ip, ports } = Settings::default().metrics.listen;
    let place = AddressRange { ip, ports: ports.clone() };
    let found: BTreeSet<SocketAddr> =
        ports.filter_map(|port| ask(SocketAddr::new(ip, port))).collect();
    let mut all = found.iter().map(ToString::to_string);
    match (all.next(), all.next()) {
        (Some(only), None) => Ok(only),
        (None, _) => {
            let what = format!("no job was found on this host: no daemon answers at {place}");
            Err(CommandError::failed(what).hint(
                "name the address of the coordinator; gradwire run --verbose tells it as \"grpc\"",
            ))
        }
        (Some(one), Some(other)) => {
            let all: Vec<String> = [one, other].into_iter().chain(all).collect();
            let what = format!("there are {} jobs on this host", all.len());
            let hint = format!("name the address of one of their coordinators: {}", all.join(", "));
            Err(CommandError::failed(what).hint(hint))
        }
    }
}

/// Asks the daemon at an address, if there is one.
fn ask(daemon: SocketAddr) -> Option<SocketAddr> {
    let mut stream = TcpStream::connect_timeout(&daemon, ANSWER).ok()?;
    stream.set_read_timeout(Some(ANSWER)).ok()?;
    write!(stream, "GET /coordinator HTTP/1.0\r\nHost: {daemon}\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER).read_to_string(&mut answer).ok()?;
    address(&answer)
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
}
