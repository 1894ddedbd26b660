//! The events of a scenario, one per line.

use std::{collections::BTreeMap, str::FromStr, time::Duration};

use gradwire_collectives::Rules;
use gradwire_coordinator::{
    engine::Engine,
    model::{
        ConnectionId, EngineConfig, Event,
        event::{Announcement, Noticed, StuckRank, Submitted},
    },
};
use gradwire_proto::{
    Collective, DType, Epoch, Failure, FailureKind, JobId, NodeId, PROTOCOL, Part, Priority,
    ProcessSetId, Rank, ReduceOp, Request, Sequence, Shape, TensorId, TensorName, VERSION,
    convert::TensorRef, pb,
};
use gradwire_settings::{OnDeadlock, Settings};

use crate::show;

type Parsed<T> = Result<T, String>;

/// An engine, the time, and the slots of each node.
pub(crate) struct Scenario {
    engine: Engine,
    now: Duration,
    slots: BTreeMap<u32, u32>,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            engine: Engine::new(config("").unwrap()),
            now: Duration::ZERO,
            slots: BTreeMap::new(),
        }
    }
}

fn number<T: FromStr>(text: &str) -> Parsed<T> {
    text.parse().map_err(|_| format!("invalid number {text:?}"))
}

fn time(text: &str) -> Parsed<Duration> {
    match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(ms), _) => Ok(Duration::from_millis(number(ms)?)),
        (None, Some(s)) => Ok(Duration::from_secs(number(s)?)),
        (None, None) => Err(format!("invalid time {text:?}")),
    }
}

fn pairs(text: &str) -> impl Iterator<Item = Parsed<(&str, &str)>> {
    text.split_whitespace()
        .map(|pair| pair.split_once('=').ok_or_else(|| format!("{pair:?} is not key=value")))
}

fn config(text: &str) -> Parsed<EngineConfig> {
    let job = JobId::new("job").map_err(|e| e.to_string())?;
    let mut config =
        EngineConfig::new(job, 2, 0, &Settings::default()).map_err(|e| e.to_string())?;
    // With one algorithm, the answers do not depend on the cost model.
    config.rules = Rules::parse("ring").expect("an algorithm");
    config.probe = false;
    config.return_timeout = None;
    for pair in pairs(text) {
        let (key, value) = pair?;
        match key {
            "probe" => config.probe = value == "true",
            "nodes" => config.nodes = number(value)?,
            "servers" => config.servers = number(value)?,
            "ranks" => config.ranks = Some(number(value)?),
            "piece_bytes" => config.piece_bytes = number(value)?,
            "credit" => config.credit_pieces = number(value)?,
            "max_tensors" => config.max_tensors = number(value)?,
            "max_pending" => config.max_pending = number(value)?,
            "stall" => config.stall_warning = time(value)?,
            "shutdown" => config.stall_shutdown = time(value)?,
            "deadlock" if value == "warn" => config.deadlock = OnDeadlock::Warn,
            "start" => config.start_timeout = time(value)?,
            "return" => config.return_timeout = Some(time(value)?),
            "epoch" => (config.epoch, config.elastic) = (Epoch(number(value)?), true),
            "algorithm" => config.rules = Rules::parse(value).map_err(|e| e.to_string())?,
            _ => return Err(format!("unknown setting {key}")),
        }
    }
    Ok(config)
}

/// A join, and whether it has proven the secret.
fn join(connection: u32, text: &str) -> Parsed<(pb::Join, bool)> {
    let mut proven = true;
    let mut join = pb::Join {
        protocol: PROTOCOL,
        version: VERSION.to_owned(),
        job: "job".to_owned(),
        host: char::from_u32('a' as u32 + connection).unwrap_or('?').to_string(),
        data_address: format!("10.0.0.{}:7000", connection + 1),
        slots: 1,
        order: connection,
        ..pb::Join::default()
    };
    for pair in pairs(text) {
        let (key, value) = pair?;
        match key {
            "protocol" => join.protocol = number(value)?,
            "version" => value.clone_into(&mut join.version),
            "job" => value.clone_into(&mut join.job),
            "host" => value.clone_into(&mut join.host),
            "address" => value.clone_into(&mut join.data_address),
            "slots" => join.slots = number(value)?,
            "order" => join.order = number(value)?,
            "epoch" => join.epoch = number(value)?,
            "attempt" => join.attempt = number(value)?,
            "received" => join.received = number(value)?,
            "rack" => value.clone_into(&mut join.rack),
            "metrics" => value.clone_into(&mut join.metrics_address),
            "proven" => proven = value == "true",
            _ => return Err(format!("unknown field {key} of a join")),
        }
    }
    Ok((join, proven))
}

fn ranks(text: &str) -> Parsed<Vec<Rank>> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend((number::<u32>(first)?..=number(last)?).map(Rank));
    }
    Ok(all)
}

/// `name` or `#id`, optionally after the number of a process set and a slash.
fn tensor(text: &str) -> Parsed<(ProcessSetId, TensorRef)> {
    let (set, text) = text.split_once('/').unwrap_or(("0", text));
    let tensor = match text.strip_prefix('#') {
        Some(id) => TensorRef::Id(TensorId(number(id)?)),
        None => TensorName::new(text).map(TensorRef::Name).map_err(|e| e.to_string())?,
    };
    Ok((ProcessSetId(number(set)?), tensor))
}

fn shape(dims: &str) -> Parsed<Shape> {
    let dims: Vec<u64> =
        dims.split(',').filter(|d| !d.is_empty()).map(number).collect::<Parsed<_>>()?;
    Shape::new(&dims).map_err(|e| e.to_string())
}

/// `[ranks=R] [collective] [dtype] [shape] [op] [root=R] [from=R] [to=R] [list=N,N] [pre=F]
/// [post=F] [prio=P] [at=LINE] [dup] [+ [dtype] [shape]]…`; a request that
/// daemons can't send is an error.
fn submitted(text: &str, all: &[Rank]) -> Parsed<Submitted> {
    let mut request = Request::allreduce(DType::F32, Shape::default(), ReduceOp::Sum);
    let mut submitted = Submitted {
        ranks: all.to_vec(),
        request: request.clone(),
        priority: Priority(0),
        duplicate: false,
        sites: Vec::new(),
    };
    for word in text.split_whitespace() {
        let part = request.more.last_mut();
        if let Ok(dtype) = word.parse() {
            *part.map_or(&mut request.dtype, |part| &mut part.dtype) = dtype;
        } else if let Ok(op) = word.parse() {
            request.reduce_op = op;
        } else if let Ok(collective) = word.parse() {
            let empty = matches!(
                collective,
                Collective::Barrier
                    | Collective::Join
                    | Collective::AddProcessSet
                    | Collective::RemoveProcessSet
            );
            request.collective = collective;
            if empty {
                request = Request::empty(collective);
            }
        } else if let Some(dims) = word.strip_prefix('[').and_then(|w| w.strip_suffix(']')) {
            *part.map_or(&mut request.shape, |part| &mut part.shape) = shape(dims)?;
        } else if word == "+" {
            request.more.push(Part { dtype: DType::F32, shape: Shape::default() });
        } else if word == "dup" {
            submitted.duplicate = true;
        } else {
            match word.split_once('=').ok_or_else(|| format!("unknown word {word}"))? {
                ("ranks", value) => submitted.ranks = ranks(value)?,
                ("root" | "from", value) => request.root = Rank(number(value)?),
                ("to" | "list", value) => {
                    request.list = value.split(',').map(number).collect::<Parsed<_>>()?;
                }
                ("pre", value) => request.prescale = number(value)?,
                ("post", value) => request.postscale = number(value)?,
                ("at", line) => submitted.sites.push(line.to_owned()),
                ("prio", value) => submitted.priority = Priority(number(value)?),
                (key, _) => return Err(format!("unknown field {key} of a request")),
            }
        }
    }
    request.validate().map_err(|e| e.to_string())?;
    submitted.request = request;
    Ok(submitted)
}

fn failure(text: &str) -> Parsed<Failure> {
    let (head, what) = text.split_once(": ").ok_or("expected kind [rank=R]: text")?;
    let mut words = head.split_whitespace();
    let kind = match words.next() {
        Some("worker") => FailureKind::WorkerLost,
        Some("node") => FailureKind::NodeLost,
        Some("connection") => FailureKind::ConnectionLost,
        other => return Err(format!("unknown kind {other:?}")),
    };
    let failure = Failure::new(kind, what);
    match words.next().and_then(|word| word.strip_prefix("rank=")) {
        Some(rank) => Ok(failure.rank(Rank(number(rank)?))),
        None => Ok(failure),
    }
}

/// `ANSWER RANK=NAME…`: the last answer that the node has carried out, and what each rank waits
/// for.
fn stuck(connection: ConnectionId, text: &str) -> Parsed<Event> {
    let (last, waits) = text.split_once(' ').unwrap_or((text, ""));
    let rank = |pair: Parsed<(&str, &str)>| {
        let (rank, name) = pair?;
        let (set, tensor) = tensor(name)?;
        let TensorRef::Name(name) = tensor else { return Err("expected a name".to_owned()) };
        let (name, call) = (name.to_string(), "allreduce".to_owned());
        Ok(StuckRank {
            rank: Rank(number(rank)?),
            set,
            name,
            call,
            in_flight: 1,
            site: String::new(),
        })
    };
    let ranks = pairs(waits).map(rank).collect::<Parsed<_>>()?;
    Ok(Event::Stuck { connection, last: number(last)?, ranks })
}

impl Scenario {
    /// Runs one line; returns the answer of the engine.
    pub(crate) fn run(&mut self, line: &str) -> Parsed<String> {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        match verb {
            "config" => {
                self.engine = Engine::new(config(rest)?);
                return Ok(String::new());
            }
            "at" => {
                self.now = time(rest)?;
                return Ok(String::new());
            }
            "status" => return Ok(show::status(&self.engine, self.now)),
            "deadline" => {
                let deadline = self.engine.next_deadline();
                return Ok(format!("deadline: {deadline:?}\n"));
            }
            "suspended" => return Ok(self.step(Event::Suspended { time: time(rest)? })),
            "tick" => return Ok(self.step(Event::Tick)),
            "paused" => return Ok(self.step(Event::Paused)),
            "standstill" => {
                return Ok(self.step(Event::StandsStill { what: rest.to_owned() }));
            }
            "cancel" => return Ok(self.step(Event::Cancel { why: rest.to_owned() })),
            _ => {}
        }
        let (from, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        let node: u32 = number(from)?;
        let connection = ConnectionId(u64::from(node));
        let event = match verb {
            "join" => {
                let (join, proven) = join(node, rest)?;
                self.slots.insert(join.order, join.slots);
                Event::Joined { connection, join, proven }
            }
            "ready" => Event::Ready {
                connection,
                announcements: rest
                    .split_whitespace()
                    .map(|name| announcement(tensor(name)?, Vec::new()))
                    .collect::<Parsed<_>>()?,
            },
            "submit" => {
                let (name, requests) = rest.split_once(' ').unwrap_or((rest, ""));
                let announcements = vec![self.announcement(node, name, requests)?];
                Event::Ready { connection, announcements }
            }
            // A message with several announcements, as daemons send it.
            "message" => {
                let announcements = rest.split(';').map(|one| {
                    let one = one.trim();
                    let (name, requests) = one.split_once(' ').unwrap_or((one, ""));
                    self.announcement(node, name, requests)
                });
                Event::Ready { connection, announcements: announcements.collect::<Parsed<_>>()? }
            }
            "done" => Event::Done {
                connection,
                sequences: rest
                    .split_whitespace()
                    .map(|s| number(s).map(Sequence))
                    .collect::<Parsed<_>>()?,
            },
            "probed" => {
                let (sequence, taken) = rest.split_once(' ').ok_or("expected NUMBER TIME")?;
                let (sequence, time) = (Sequence(number(sequence)?), time(taken)?);
                Event::Probed { connection, sequence, time, retransmits: 0 }
            }
            "forgotten" => Event::Forgotten {
                connection,
                ids: rest
                    .split_whitespace()
                    .map(|id| number(id.trim_start_matches('#')).map(TensorId))
                    .collect::<Parsed<_>>()?,
            },
            "failed" => {
                let noticed = Noticed::UNKNOWN;
                Event::Failed { connection, failure: failure(rest)?, noticed }
            }
            "left" => Event::Left { connection, ranks: ranks(rest)?, absent: false },
            "absent" => Event::Left { connection, ranks: ranks(rest)?, absent: true },
            "stuck" => stuck(connection, rest)?,
            "lost" => Event::Lost { connection, why: rest.to_owned(), may_return: false },
            "broke" => Event::Lost { connection, why: rest.to_owned(), may_return: true },
            "alive" => Event::MessageReceived { connection },
            "datagram" => Event::DatagramReceived { node: NodeId(node) },
            "nonsense" => Event::Nonsense { connection, what: rest.to_owned() },
            _ => return Err("unknown event".to_owned()),
        };
        Ok(self.step(event))
    }

    /// Tells the engine that no more events are waiting.
    pub(crate) fn drained(&mut self) -> String {
        self.step(Event::Drained)
    }

    fn step(&mut self, event: Event) -> String {
        show::output(&self.engine.step(event, self.now))
    }

    fn announcement(&self, node: u32, name: &str, requests: &str) -> Parsed<Announcement> {
        let own = self.own_ranks(node);
        let all: Parsed<_> = requests.split('|').map(|r| submitted(r, &own)).collect();
        announcement(tensor(name)?, all?)
    }

    fn own_ranks(&self, node: u32) -> Vec<Rank> {
        let first: u32 = self.slots.range(..node).map(|(_, slots)| slots).sum();
        let slots = self.slots.get(&node).copied().unwrap_or(1);
        (first..first + slots).map(Rank).collect()
    }
}

fn announcement(
    (set, tensor): (ProcessSetId, TensorRef),
    submitted: Vec<Submitted>,
) -> Parsed<Announcement> {
    Ok(Announcement { set, tensor, submitted, latest: None })
}
