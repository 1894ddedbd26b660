//! The launcher's link to an agent: starts it, greets it, asks it, and ends it. Each answer has a
//! time limit (WAIT); an agent that exceeds it is lost.

use std::{
    collections::VecDeque,
    net::IpAddr,
    time::{Duration, Instant},
};

use gradwire_launcher::{
    launch::places,
    messages::Reader,
    reach::{Reached, Way},
};
use gradwire_services::launch::to_line;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    process::{ChildStdin, ChildStdout},
    task::JoinHandle,
    time::{sleep_until, timeout},
};

use crate::{
    agent::unix_us,
    facts::{Clock, HostFacts, Refused},
    limits::{CLOCKS, END, FACTS, MARGIN, PING},
    messages::{Order, Peer, Report},
};

/// The command of gradwire on a host.
pub(super) const AGENT: &str = "doctor-agent";

/// The hint for another release.
const SAME_RELEASE: &str = "install the same release on every host";

/// How many bytes of an agent's standard error are kept (BOUND).
const MAX_SAID: usize = 8 << 10;

/// The link to an agent.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) number: usize,
    pub(super) way: Way,
    child: Reached,
    orders: Option<ChildStdin>,
    reports: Reader<ChildStdout>,
    printed: JoinHandle<VecDeque<String>>,
    /// Why it no longer answers.
    pub(super) lost: Option<String>,
}

impl Link {
    pub(super) fn open(number: usize, way: Way) -> Result<Self, Refused> {
        let mut child = way.start().map_err(|(what, hint)| Refused::new(what, hint))?;
        let (orders, stdout) = (child.0.stdin.take(), child.0.stdout.take());
        let stdout = stdout.ok_or_else(|| Refused::new("the agent has no output", ""))?;
        let printed = tokio::spawn(overhear(child.0.stderr.take()));
        Ok(Self { number, way, child, orders, reports: Reader::new(stdout), printed, lost: None })
    }

    /// Gives an order. If an agent does not read it, its answer is missing.
    pub(super) async fn give(&mut self, order: &Order) {
        if let Some(orders) = &mut self.orders {
            let _ = timeout(MARGIN, orders.write_all(to_line(order).as_bytes())).await;
        }
    }

    /// The next report; `None` once there are no more. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Report> {
        if self.lost.is_some() {
            return None;
        }
        match self.reports.next::<Report>().await {
            Some(Ok(report)) => return Some(report),
            Some(Err(error)) => self.lost = Some(error.to_string()),
            None => self.lost = Some("its agent ended".to_owned()),
        }
        None
    }

    pub(super) fn silent(&mut self, limit: Duration) {
        let why = || format!("its agent gave no answer within {} ms", limit.as_millis());
        self.lost.get_or_insert_with(why);
    }

    /// Receives the first answer, with the address by which ssh reached the host.
    async fn greet(&mut self) -> Result<Option<IpAddr>, Refused> {
        let version = gradwire_proto::VERSION.to_owned();
        self.give(&Order::Begin { version: version.clone() }).await;
        loop {
            match self.reports.next::<Report>().await {
                Some(Ok(Report::Hello { version: theirs, address })) => {
                    if theirs == version {
                        return Ok(address);
                    }
                    let host = &self.way.host;
                    let what = format!("host {host} has gradwire {theirs}, but this is {version}");
                    return Err(Refused { is_version: true, ..Refused::new(what, SAME_RELEASE) });
                }
                // A login may print a greeting before the agent speaks.
                Some(_) => {}
                None => return Err(self.why_unreachable().await),
            }
        }
    }

    async fn why_unreachable(&mut self) -> Refused {
        let status = timeout(END, self.child.0.wait()).await.ok().and_then(Result::ok);
        let printed =
            timeout(END, &mut self.printed).await.ok().and_then(Result::ok).unwrap_or_default();
        // A release without `gradwire doctor` prints the unknown command.
        let is_version = printed.iter().any(|line| line.contains(AGENT));
        let code = status.and_then(|status| status.code());
        let (what, hint) = self.way.unreachable(code, &printed, None);
        let hint = if is_version { SAME_RELEASE.to_owned() } else { hint };
        Refused { is_version, what, hint }
    }

    /// Reads the clock of the host several times; the fastest answer counts.
    async fn clock(&mut self) -> Option<Clock> {
        let mut best: Option<Clock> = None;
        for _ in 0..CLOCKS {
            let (asked, began) = (unix_us(), Instant::now());
            self.give(&Order::Clock).await;
            let unix_us = loop {
                if let Report::Clock { unix_us } = self.next().await? {
                    break unix_us;
                }
            };
            let took = i64::try_from(began.elapsed().as_micros()).unwrap_or(i64::MAX);
            let clock = Clock {
                ahead_us: unix_us.saturating_sub(asked.saturating_add(took / 2)),
                wrong_by_us: took / 2 + 1,
            };
            best = best.filter(|best| best.wrong_by_us <= clock.wrong_by_us).or(Some(clock));
        }
        best
    }

    /// Greets a host, reads its clock, and finds its address.
    pub(super) async fn start(
        &mut self,
        remote: Option<&str>,
        limit: Duration,
    ) -> Result<(IpAddr, Option<Clock>), Refused> {
        let begin = async {
            let by_ssh = self.greet().await?;
            Ok((by_ssh, self.clock().await))
        };
        let Ok(begun) = timeout(limit, begin).await else {
            return Err(Refused::new(
                format!("host {} did not answer within {} s", self.way.host, limit.as_secs_f64()),
                "check that it is up, and that ssh asks nothing; allow more time with \
                 --start-timeout SECONDS",
            ));
        };
        let (by_ssh, clock) = begun?;
        let host = &self.way.host;
        let address = if self.way.local {
            Some(places::local_address(host, remote).await)
        } else {
            places::remote_address(host, by_ssh).await
        };
        let address = address.ok_or_else(|| {
            let what = format!("host {host} has no address: only ssh knows its name");
            Refused::new(what, "use its address, or add its name to /etc/hosts")
        })?;
        Ok((address, clock))
    }

    pub(super) async fn facts(&mut self, order: Order) -> Option<HostFacts> {
        self.give(&order).await;
        let facts = async {
            loop {
                if let Report::Facts { facts } = self.next().await? {
                    return Some(*facts);
                }
            }
        };
        let answer = timeout(FACTS, facts).await;
        answer.inspect_err(|_| self.silent(FACTS)).unwrap_or_default()
    }

    /// Lets the host dial all peers at once. If the agent is lost, some results are missing.
    pub(super) async fn dial(
        &mut self,
        peers: Vec<Peer>,
        limit: Duration,
    ) -> Vec<(Peer, Option<String>)> {
        let (mut dialled, count) = (Vec::new(), peers.len());
        self.give(&Order::Dial { peers, limit_ms: millis(limit) }).await;
        // A connection and its handshake each have this limit.
        let limit = 2 * limit + MARGIN;
        let deadline = Instant::now() + limit;
        while dialled.len() < count {
            tokio::select! {
                report = self.next() => match report {
                    Some(Report::Dialled { peer, failed }) => dialled.push((peer, failed)),
                    Some(_) => {}
                    None => break,
                },
                () = sleep_until(deadline.into()) => {
                    self.silent(limit);
                    break;
                }
            }
        }
        dialled
    }

    /// Checks that the agent still answers: it may have frozen or ended since its last answer.
    /// Other reports are dropped.
    pub(super) async fn check_is_there(&mut self) {
        if self.lost.is_none() && timeout(PING, self.clock()).await.is_err() {
            self.silent(PING);
        }
    }

    /// Lets the agent end by itself, or kills it.
    pub(super) async fn close(mut self) {
        drop(self.orders.take());
        let _ = timeout(END, self.child.0.wait()).await;
    }
}

async fn overhear(stderr: Option<impl AsyncRead + Unpin>) -> VecDeque<String> {
    let Some(mut stderr) = stderr else { return VecDeque::new() };
    let (mut kept, mut buffer) = (Vec::new(), [0; 1024]);
    // Read to the end, so that the agent never waits.
    while let Ok(read @ 1..) = stderr.read(&mut buffer).await {
        let free = MAX_SAID.saturating_sub(kept.len());
        kept.extend_from_slice(&buffer[..read.min(free)]);
    }
    let text = String::from_utf8_lossy(&kept).into_owned();
    let lines = text.lines().map(|line| line.chars().filter(|c| !c.is_control()).collect());
    lines.filter(|line: &String| !line.is_empty()).collect()
}

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
