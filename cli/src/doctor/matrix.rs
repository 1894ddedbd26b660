//! Which hosts reach each other: a row for each source, a column for each destination. It is shown
//! if a connection failed.

use std::net::SocketAddr;

use gradwire_doctor::facts::{Facts, Purpose};
use serde::Serialize;

use crate::cluster::{aligned, printable};

/// How many rows and columns are shown: those of the first hosts with a failure.
const MAX_SHOWN: usize = 12;

/// A connection for data that was tried.
#[derive(Debug, Clone, Serialize)]
pub struct Connection {
    from: String,
    to: String,
    address: SocketAddr,
    /// Why it failed.
    error: Option<String>,
}

/// All connections for data that were tried.
pub fn connections(facts: &Facts) -> Vec<Connection> {
    let of_data = facts.dialled.iter().filter(|dialled| dialled.purpose == Purpose::Data);
    let name = |host: usize| facts.hosts[host].name.clone();
    let connection = of_data.map(|dialled| Connection {
        from: name(dialled.from),
        to: name(dialled.to),
        address: dialled.address,
        error: dialled.failed.clone(),
    });
    connection.collect()
}

/// The matrix; `None` if all hosts reach each other.
pub fn to_text(all: &[Connection]) -> Option<String> {
    let failed = || all.iter().filter(|connection| connection.error.is_some());
    failed().next()?;
    let (mut hosts, mut addresses) = (Vec::new(), Vec::new());
    for Connection { from, to, .. } in failed() {
        for host in [from, to] {
            if !hosts.contains(&host) && hosts.len() < MAX_SHOWN {
                hosts.push(host);
            }
        }
    }
    for host in &hosts {
        for Connection { to, address, .. } in all {
            if to == *host && !addresses.contains(&(to, address)) {
                addresses.push((to, address));
            }
        }
    }
    let mut reasons: Vec<&str> = Vec::new();
    let mut cell = |from: &String, to: &String, at: &SocketAddr| {
        let is_it = |one: &&Connection| one.from == *from && one.to == *to && one.address == *at;
        match all.iter().find(is_it).map(|connection| connection.error.as_deref()) {
            None => "-".to_owned(),
            Some(None) => "reached".to_owned(),
            Some(Some(why)) => {
                let known = reasons.iter().position(|reason| *reason == why);
                let place = known.unwrap_or_else(|| {
                    reasons.push(why);
                    reasons.len() - 1
                });
                format!("failed ({})", place + 1)
            }
        }
    };
    let heads = |head: &str, of: &dyn Fn(&(&String, &SocketAddr)) -> String| {
        let columns = addresses.iter().map(of);
        std::iter::once(head.to_owned()).chain(columns).collect::<Vec<_>>()
    };
    let mut rows = vec![
        heads("from \\ to", &|(host, _)| printable(host)),
        heads("", &|(_, address)| address.ip().to_string()),
    ];
    for from in &hosts {
        let cells = addresses.iter().map(|(to, at)| cell(from, to, at));
        rows.push(std::iter::once(printable(from)).chain(cells).collect());
    }
    let mut text = format!("Which hosts reach each other:\n{}", aligned(&rows));
    for (place, reason) in (1..).zip(reasons) {
        text.push_str(&format!("({place}) {}\n", printable(reason)));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(from: &str, to: &str, error: Option<&str>) -> Connection {
        let address = SocketAddr::from(([10, 0, 0, to.as_bytes()[0] - b'a' + 1], 7));
        let (from, to) = (from.to_owned(), to.to_owned());
        Connection { from, to, address, error: error.map(ToOwned::to_owned) }
    }

    #[test]
    fn failed_connections_are_shown_in_a_matrix() {
        let mut all = vec![
            connection("a", "b", None),
            connection("b", "a", None),
            connection("a", "c", Some("no answer")),
            connection("c", "a", None),
            connection("b", "c", Some("no answer")),
            connection("c", "b", Some("refused\n")),
        ];
        let text = to_text(&all).unwrap();
        let expected = "\
Which hosts reach each other:
from \\ to a c b
10.0.0.1 10.0.0.3 10.0.0.2
a - failed (1) reached
c reached - failed (2)
b reached failed (1) -
(1) no answer
(2) refused
";
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<_> = text.lines().map(words).collect();
        assert_eq!(lines, expected.lines().collect::<Vec<_>>(), "{text}");
        all.retain(|connection| connection.error.is_none());
        assert_eq!(to_text(&all), None);
    }
}
