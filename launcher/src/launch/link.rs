//! The launcher's link to the agent of one host: started here or through ssh, and used through its
//! standard input and output. Reports become events, output goes straight to the console.
//!
//! Reading and writing do not wait for each other: an agent whose output is not read still receives
//! the order to stop. And reports do not wait for output: processes write only as fast as it is
//! read, by credit.

use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use gradwire_proto::{MAX_CONTROL_MESSAGE, Rank, beat::Suspension};
use gradwire_services::launch::{
    Begin, LineEnd, Order, ProcessEnd, Report, Role, Stream, Text, to_line,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncWriteExt, BufReader},
    process::{ChildStderr, ChildStdin, ChildStdout},
    sync::mpsc,
    time::{self, MissedTickBehavior, interval, sleep, timeout},
};

use super::{
    fold,
    job::events::Event,
    lines::{Entry, Line, Source},
    places,
};
use crate::{
    messages::Reader,
    reach::{Reached, Way},
};

/// The interval of the signs of life that an agent receives and answers. Each side gives the other
/// up after [`SILENCE`].
const PING: Duration = Duration::from_secs(5);

/// After this silence a remote agent ends all processes, and the launcher counts a host as lost: a
/// broken network sends no goodbye, and neither does an agent that is stopped. A suspended launcher
/// is silent, too.
pub const SILENCE: Duration = Duration::from_secs(60);

/// How long an agent whose output has ended may take to end.
const END: Duration = Duration::from_secs(2);

/// How long the rest of its standard error may take then.
const NOISE: Duration = Duration::from_millis(100);

/// The number of pieces of output for which the agent gets credit at a time.
const BATCH: u32 = 128;

/// The pause until orders are looked at again.
const ROOM: Duration = Duration::from_millis(20);

/// The reason for a host that was lost by [`SILENCE`].
const SILENT: &str = "its agent gives no sign of life";

/// How many lines of a process's standard error are kept for the report.
const TAIL: usize = 10;

/// The longest such line, in characters.
const TAIL_CHARS: usize = 400;

/// A host to reach.
#[derive(Debug, Clone)]
pub struct Target {
    /// Its index among the job's nodes.
    pub node: usize,
    /// A host of the job that is not this machine, if there is one.
    pub remote: Option<String>,
    /// How it is reached.
    pub way: Way,
    /// What the host must have.
    pub begin: Begin,
}

/// Shared by all links.
#[derive(Debug, Clone)]
pub struct Shared {
    /// Where events go.
    pub events: mpsc::Sender<Event>,
    /// Where output goes.
    pub console: mpsc::Sender<Entry>,
    /// When the launch began.
    pub born: Instant,
    /// Whether agents' own messages are shown.
    pub verbose: bool,
    /// Set when the job is being stopped: then the services' logs about each other's end are
    /// hidden.
    pub hushed: Arc<AtomicBool>,
}

/// Starts the agent of a host, and returns when it has ended. Orders are sent through the channel.
pub async fn serve(
    target: Target,
    shared: Shared,
    (send, receive): (mpsc::Sender<Order>, mpsc::Receiver<Order>),
) {
    let begin = Order::Begin(target.begin.clone());
    match target.way.start() {
        Ok(mut child) => {
            let stdin = child.0.stdin.take();
            let speak = async {
                if let Some(stdin) = stdin {
                    speak(stdin, begin, receive).await;
                }
            };
            let (asked, offset, open_line) = (None, None, String::new());
            let (output, queue) = mpsc::unbounded_channel();
            let show = show(queue, shared.console.clone(), send.clone());
            let link = Link { target, shared, orders: send, output, asked, offset, open_line };
            tokio::join!(speak, link.listen(child), show);
        }
        Err((what, hint)) => {
            let event = Event::Refused { node: target.node, what, hint };
            // The receiver is gone only at the end of the job.
            let _ = shared.events.send(event).await;
        }
    }
}

/// Writes orders and signs of life. When the channel closes, so does the agent's standard input,
/// which means Stop.
async fn speak(mut stdin: ChildStdin, begin: Order, mut orders: mpsc::Receiver<Order>) {
    let mut ping = interval(PING);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut next = Some(begin);
    while let Some(order) = next {
        // The end of an agent is noticed at its output.
        if stdin.write_all(to_line(&order).as_bytes()).await.is_err() {
            return;
        }
        next = tokio::select! {
            order = orders.recv() => order,
            _ = ping.tick() => Some(Order::Clock),
        };
    }
}

/// A part of the output, and whether the agent has spent credit for it.
type Piece = (Entry, bool);

/// Passes output on to the console, and gives the agent credit for more. So the queue is short
/// (BOUND), and reports do not wait for a slow reader.
async fn show(
    mut queue: mpsc::UnboundedReceiver<Piece>,
    console: mpsc::Sender<Entry>,
    orders: mpsc::Sender<Order>,
) {
    let mut pieces = 0;
    while let Some((entry, has_cost)) = queue.recv().await {
        // Without a console, output is lost, and the job ends with that.
        let _ = console.send(entry).await;
        pieces += u32::from(has_cost);
        if pieces < BATCH && !queue.is_empty() {
            continue;
        }
        // Half of the queue stays free for other orders, even if the agent reads none.
        while orders.capacity() <= orders.max_capacity() / 2 && !orders.is_closed() {
            sleep(ROOM).await;
        }
        if pieces > 0 && orders.send(Order::Shown { pieces }).await.is_ok() {
            pieces = 0;
        }
    }
}

struct Link {
    target: Target,
    shared: Shared,
    orders: mpsc::Sender<Order>,
    output: mpsc::UnboundedSender<Piece>,
    /// When the agent was asked for its time, and its answer to Begin.
    asked: Option<(Instant, IpAddr, u16)>,
    /// The launcher's time at the agent's zero.
    offset: Option<Duration>,
    /// The beginning of an unfinished line of the daemon (BOUND).
    open_line: String,
}

impl Link {
    async fn listen(mut self, mut child: Reached) {
        let (stdout, stderr) = (child.0.stdout.take(), child.0.stderr.take());
        let heard = Arc::<Mutex<Tail>>::default();
        let host = self.target.way.host.clone();
        let noise = tokio::spawn(overhear(stderr, host, self.shared.clone(), heard.clone()));
        let strange = match stdout {
            Some(stdout) => self.read(stdout).await,
            None => None,
        };
        let status = timeout(END, child.0.wait()).await.ok().and_then(Result::ok);
        // Another process may keep its standard error open. The launcher must know of the loss
        // before the other hosts notice its consequences (TELL).
        let stop = noise.abort_handle();
        let _ = timeout(NOISE, noise).await;
        stop.abort();
        let stderr: VecDeque<String> = std::mem::take(&mut *lock(&heard)).into_lines().collect();
        let at = self.shared.born.elapsed();
        let node = self.target.node;
        let event = if self.offset.is_none() {
            let code = status.and_then(|status| status.code());
            let (what, hint) = self.target.way.unreachable(code, &stderr, strange);
            Event::Refused { node, what, hint }
        } else {
            let what = strange.or_else(|| stderr.back().cloned()).unwrap_or_else(|| match status {
                Some(status) => {
                    format!("{} {}", self.target.way.what(), ProcessEnd::from(status))
                }
                None => "its agent no longer answers".to_owned(),
            });
            Event::Lost { node, what, at }
        };
        let _ = self.shared.events.send(event).await;
    }

    /// Reads reports until the end. Returns the reason if it is not a closed connection.
    async fn read(&mut self, stdout: ChildStdout) -> Option<String> {
        let mut reports = Reader::new(stdout);
        let mut tails: BTreeMap<Role, Tail> = BTreeMap::new();
        loop {
            // The job limits the time for the first answer.
            let next = match self.offset {
                Some(_) => next(&mut reports).await?,
                None => reports.next().await?.map_err(|error| error.to_string()),
            };
            let report = match next {
                Ok(report) => report,
                // A login may print a greeting before the agent speaks.
                Err(why) if self.asked.is_none() && why != SILENT => continue,
                Err(why) => return Some(why),
            };
            match report {
                Report::Output { role, stream, text, end } => {
                    if stream == Stream::Stderr {
                        tails.entry(role).or_default().keep(&text, end);
                    }
                    self.output(role, stream, text, end).await;
                }
                Report::LastWords { rank } => self.last_words(rank),
                Report::LastWordsEnd { rank } => self.show(Entry::Ends(rank.0), true),
                report => {
                    if let Report::Exited { role: Role::Rank(rank), .. } = report {
                        self.show(Entry::Ends(rank), false);
                    }
                    let event = self.event(report, &mut tails).await;
                    if let Some(event) = event
                        && self.shared.events.send(event).await.is_err()
                    {
                        return None;
                    }
                }
            }
        }
    }

    async fn output(&mut self, role: Role, stream: Stream, text: Text, end: LineEnd) {
        let node = self.target.node;
        let host = &self.target.way.host;
        let (source, stream) = match (role, stream) {
            (Role::Rank(rank), stream) => (Source::Rank(rank), stream),
            (_, Stream::Stdout) => {
                self.open_line.push_str(&text.to_string());
                if end != LineEnd::Open || self.open_line.len() > MAX_CONTROL_MESSAGE {
                    let line = std::mem::take(&mut self.open_line);
                    let _ = self.shared.events.send(Event::Said { node, role, line }).await;
                }
                return;
            }
            (Role::Daemon, stream) => (Source::daemon(host), stream),
        };
        let hidden = role == Role::Daemon
            && self.shared.hushed.load(Ordering::Relaxed)
            && !self.shared.verbose;
        self.show(Line { source, stream, text, end, hidden }.into(), true);
    }

    fn show(&self, entry: Entry, has_cost: bool) {
        // The receiver lasts as long as this.
        let _ = self.output.send((entry, has_cost));
    }

    /// A rank is about to report an error: for a moment its output is held.
    fn last_words(&self, rank: Rank) {
        self.show(Entry::Begins(rank.0), true);
        // The console ends without this if the launcher ends before.
        let console = self.shared.console.downgrade();
        tokio::spawn(async move {
            sleep(fold::HOLD).await;
            if let Some(console) = console.upgrade() {
                let _ = console.send(Entry::Over).await;
            }
        });
    }

    async fn event(&mut self, report: Report, tails: &mut BTreeMap<Role, Tail>) -> Option<Event> {
        let node = self.target.node;
        match report {
            Report::Ready { address, port } => {
                let host = &self.target.way.host;
                let address = if self.target.way.local {
                    Some(places::local_address(host, self.target.remote.as_deref()).await)
                } else {
                    places::remote_address(host, address).await
                };
                let Some(address) = address else {
                    self.offset = Some(Duration::ZERO);
                    let what = format!("the name {host} has no address that other hosts can use");
                    let hint = "give the host's address instead of its name".to_owned();
                    return Some(Event::Refused { node, what, hint });
                };
                self.asked = Some((Instant::now(), address, port));
                let _ = self.orders.send(Order::Clock).await;
                None
            }
            Report::Refused { what, hint } => {
                self.offset = Some(Duration::ZERO);
                Some(Event::Refused { node, what, hint })
            }
            Report::Clock { at_us } => {
                let (asked, address, port) = self.asked?;
                if self.offset.is_some() {
                    return None;
                }
                // Assume that the agent read its clock halfway between question and answer.
                let read = asked.duration_since(self.shared.born) + asked.elapsed() / 2;
                self.offset = Some(read.saturating_sub(Duration::from_micros(at_us)));
                Some(Event::Ready { node, address, port })
            }
            Report::Started { role, pid, at_us } => {
                Some(Event::Started { node, role, pid, at: self.when(at_us) })
            }
            Report::Failed { role, what } => Some(Event::Failed { node, role, what }),
            Report::Exited { role, pid, end, at_us } => {
                let tail = tails.remove(&role).unwrap_or_default().into_lines().collect();
                Some(Event::Exited { node, role, pid, end, at: self.when(at_us), tail })
            }
            Report::DaemonStopped { pid, at_us, rank_failed } => {
                Some(Event::DaemonStopped { node, pid, at: self.when(at_us), rank_failed })
            }
            Report::Asked { what, at_us } => {
                Some(Event::Asked { node, what, at: self.when(at_us) })
            }
            Report::Consequence { rank, failure } => {
                Some(Event::Consequence { node, worker: rank.0, failure })
            }
            Report::Forming { rank } => Some(Event::Forming { node, worker: rank.0 }),
            Report::Waiting { rank } => Some(Event::Waiting { node, worker: rank.0 }),
            Report::Leaving { rank } => Some(Event::Leaving { node, worker: rank.0 }),
            Report::Stopped => Some(Event::Stopped { node }),
            Report::Output { .. } | Report::LastWords { .. } | Report::LastWordsEnd { .. } => None,
        }
    }

    /// Converts an agent's time to the launcher's, to compare ends on different hosts.
    fn when(&self, at_us: u64) -> Duration {
        self.offset.unwrap_or_default() + Duration::from_micros(at_us)
    }
}

/// The next report of an agent that answers signs of life, or none at the end (WAIT). Time counts
/// only while the launcher waits, and not while it is suspended.
async fn next<R: AsyncRead + Unpin>(reports: &mut Reader<R>) -> Option<Result<Report, String>> {
    let now = || time::Instant::now().into_std();
    let mut begun = now();
    let mut suspension = Suspension::new(begun);
    loop {
        tokio::select! {
            biased;
            report = reports.next() => {
                return report.map(|it| it.map_err(|error| error.to_string()));
            }
            // Often, because a long time between two checks means that this process was suspended.
            () = sleep(PING) => {}
        }
        let now = now();
        if suspension.check(now, SILENCE).is_some() {
            begun = now;
        }
        if now - begun >= SILENCE {
            return Some(Err(SILENT.to_owned()));
        }
    }
}

/// The last lines of an output, without those that a progress bar overwrites.
#[derive(Debug, Default)]
struct Tail {
    lines: VecDeque<Kept>,
    /// Whether the last line goes on.
    open: bool,
}

/// The beginning of a line, and the number of all its characters.
#[derive(Debug, Default)]
struct Kept {
    text: String,
    length: usize,
}

impl Tail {
    fn keep(&mut self, text: &Text, end: LineEnd) {
        let goes_on = std::mem::replace(&mut self.open, end == LineEnd::Open);
        if !goes_on {
            let is_blank = text.as_bytes().iter().all(u8::is_ascii_whitespace);
            if end == LineEnd::Return || is_blank {
                self.open = false;
                return;
            }
            if self.lines.len() == TAIL {
                self.lines.pop_front();
            }
            self.lines.push_back(Kept::default());
        }
        let Some(line) = self.lines.back_mut() else { return };
        let text = text.to_string();
        let printable = |c: &char| !c.is_control() || *c == '\t';
        let room = TAIL_CHARS.saturating_sub(line.length);
        line.text.extend(text.chars().filter(printable).take(room));
        line.length += text.chars().filter(printable).count();
    }

    /// The lines; one that was cut ends with its length.
    fn into_lines(self) -> impl Iterator<Item = String> {
        self.lines.into_iter().map(|Kept { text, length }| match length {
            0..=TAIL_CHARS => text,
            _ => format!("{text}… ({length} characters)"),
        })
    }
}

/// Reads the standard error of the agent or of ssh.
async fn overhear(
    stderr: Option<ChildStderr>,
    host: String,
    shared: Shared,
    tail: Arc<Mutex<Tail>>,
) {
    let Some(stderr) = stderr else { return };
    let mut lines = BufReader::new(stderr).split(b'\n');
    while let Ok(Some(line)) = lines.next_segment().await {
        let text = Text::from(line.strip_suffix(b"\r").unwrap_or(&line));
        lock(&tail).keep(&text, LineEnd::Newline);
        if shared.verbose {
            let source = Source::Service(format!("agent {host}"));
            let (stream, end) = (Stream::Stderr, LineEnd::Newline);
            let line = Line { source, stream, text, end, hidden: false };
            let _ = shared.console.send(line.into()).await;
        }
    }
}

/// A panic elsewhere leaves whole lines.
fn lock(tail: &Mutex<Tail>) -> MutexGuard<'_, Tail> {
    tail.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    /// WAIT: an agent that is stopped sends nothing and does not end.
    #[tokio::test(start_paused = true)]
    async fn a_silent_agent_is_given_up() {
        let (mut agent, launcher) = duplex(1024);
        let mut reports = Reader::new(launcher);
        // An agent that only answers signs of life is alive.
        let answers = tokio::spawn(async move {
            for at_us in 0..100 {
                sleep(PING).await;
                agent.write_all(to_line(&Report::Clock { at_us }).as_bytes()).await.unwrap();
            }
            agent
        });
        for at in 0..100 {
            let report = next(&mut reports).await;
            assert!(
                matches!(report, Some(Ok(Report::Clock { at_us })) if at_us == at),
                "{report:?}"
            );
        }
        let agent = answers.await.unwrap();
        let begun = time::Instant::now();
        let report = next(&mut reports).await;
        assert_eq!(report, Some(Err(SILENT.to_owned())));
        assert_eq!(begun.elapsed().as_secs(), SILENCE.as_secs());
        drop(agent);
        assert!(next(&mut reports).await.is_none());
    }

    #[test]
    fn the_last_lines_are_few_and_short() {
        let mut tail = Tail::default();
        for i in 0..20 {
            tail.keep(&format!("line {i}").into(), LineEnd::Newline);
            tail.keep(&"10%".into(), LineEnd::Return);
            tail.keep(&"  ".into(), LineEnd::Newline);
        }
        // One line in three parts.
        for end in [LineEnd::Open, LineEnd::Open, LineEnd::Newline] {
            tail.keep(&"\u{1b}[2J".repeat(9000).into(), end);
        }
        let tail: Vec<_> = tail.into_lines().collect();
        assert_eq!(tail.len(), TAIL, "BOUND");
        assert_eq!(tail[0], "line 11");
        let kept: String = "[2J".chars().cycle().take(TAIL_CHARS).collect();
        assert_eq!(tail[TAIL - 1], format!("{kept}… (81000 characters)"), "no control characters");
    }
}
