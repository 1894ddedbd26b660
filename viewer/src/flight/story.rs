//! What happened first, in three sentences: how the job ended, which rank was missing, and who
//! waited for what. Then the last operations of the ranks where they differ, and the last warnings.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use gradwire_proto::DType;
use gradwire_trace::flight::{Operation, Outcome};

use super::{
    merge::{Job, RankRecord, call, is_in_flight, named},
    waits::{Wait, mutual, waits},
};

/// The most operations of a rank, groups of ranks and events of a host that are shown (BOUND).
const OPERATIONS: usize = 4;
const GROUPS: usize = 8;
const EVENTS: usize = 4;

/// The level of an event that is not worth a line.
const UNIMPORTANT: u8 = 2;

/// The three sentences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Story {
    /// How the job ended, if it did.
    pub end: String,
    /// Which rank was missing, or what the transfer waited for.
    pub missing: String,
    /// The ranks that waited, and for what.
    pub waited: String,
}

/// The whole report, in lines.
pub fn text(job: &Job) -> String {
    let Story { end, missing, waited } = story(job);
    let mut out = format!("{end}\n{missing}\n{waited}\n");
    // Writing to a string can't fail.
    let mut line = |text: String| {
        let _ = writeln!(out, "{text}");
    };
    line(String::new());
    positions(job, &mut line);
    events(job, &mut line);
    about(job, &mut line);
    out
}

fn about(job: &Job, line: &mut impl FnMut(String)) {
    let hosts = job.hosts.len();
    let of = format!("{hosts} of {} nodes, {} of {} ranks", job.nodes, job.ranks.len(), job.size);
    let clocks = match job.error_ns {
        Some(error_ns) => format!("clocks agree within {:.3} ms", error_ns as f64 / 1e6),
        None => "the clock of a node is not known, so times of nodes may not agree".to_owned(),
    };
    line(format!("recorded: {of}; {clocks}"));
    let missing = job.unrecorded_nodes();
    if !missing.is_empty() {
        let numbers: Vec<String> = missing.iter().take(GROUPS).map(u32::to_string).collect();
        let all = numbers.join(",");
        line(format!("no file of node {all}: copy it from the recorder.directory of its host"));
    }
    if !job.left_out.is_empty() {
        let hosts = job.left_out.join(", ");
        line(format!("left out, because they are of an earlier epoch: {hosts}"));
    }
}

/// What happened first.
pub fn story(job: &Job) -> Story {
    let waits = waits(job);
    let partial: Vec<Wait> =
        waits.iter().filter(|wait| !wait.missing.is_empty()).cloned().collect();
    let end = end(job);
    if let Some((one, other)) = mutual(&partial) {
        let part = |wait: &Wait| format!("{} for '{}'", named(wait.waiting.clone()), wait.name);
        let missing = format!(
            "Ranks waited for each other under different names: {}, {}.",
            part(one),
            part(other)
        );
        return Story { end, missing, waited: waited(job, one) };
    }
    match (partial.first(), waits.first()) {
        (Some(wait), _) => {
            Story { end, missing: missing(job, wait, &partial), waited: waited(job, wait) }
        }
        (None, Some(wait)) => {
            Story { end, missing: transfer(job, wait), waited: waited(job, wait) }
        }
        (None, None) => {
            let last = job.ranks.values().flat_map(|rank| &rank.operations).map(|it| it.ended_ns);
            let waited = match last.max().filter(|at_ns| *at_ns > 0) {
                Some(at_ns) => format!("The last operation ended {}.", before(job, at_ns)),
                None => "No operation has ended.".to_owned(),
            };
            Story { end, missing: "No operation was in flight.".to_owned(), waited }
        }
    }
}

fn end(job: &Job) -> String {
    let id = &job.job;
    if let Some((failure, at_ns)) = &job.failure {
        let first = failure.clone().hint("").headline();
        return format!("Job {id} failed at {}: {first}.", time(*at_ns));
    }
    let killed: Vec<_> = job.hosts.values().filter(|host| host.saved_ns.is_none()).collect();
    if let Some(host) = killed.first() {
        let (name, pid) = (&host.name, host.pid);
        let last = host.events.last().map_or_else(String::new, |event| {
            format!("; its last event is of {}", time(event.at_ns))
        });
        return format!(
            "The daemon of host {name} (pid {pid}) of job {id} was killed before it could say \
             why{last}."
        );
    }
    format!("Job {id} had not failed when this was recorded, at {}.", time(job.end_ns))
}

/// The rank that was missing, and what it did last.
fn missing(job: &Job, wait: &Wait, partial: &[Wait]) -> String {
    let who = named(wait.missing.clone());
    let (verb, they) = if wait.missing.len() == 1 { ("was", "it") } else { ("were", "they") };
    let more = partial.iter().filter(|other| other.missing == wait.missing).count() - 1;
    let more = match more {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let mut text = format!("{who} {verb} missing: {they} had not submitted '{}'{more}", wait.name);
    if let Some(first) = wait.missing.first()
        && let Some(rank) = job.ranks.get(first)
    {
        let subject = if wait.missing.len() == 1 { "it".into() } else { format!("rank {first}") };
        let _ = write!(text, "; {}", last_of(job, &subject, rank));
    }
    sentence(&text)
}

/// Makes a sentence of a text that begins with an ASCII character.
fn sentence(text: &str) -> String {
    let (first, rest) = text.split_at(1);
    format!("{}{rest}.", first.to_uppercase())
}

/// What a rank did last.
fn last_of(job: &Job, subject: &str, rank: &RankRecord) -> String {
    let gone = rank.gone_ns.map(|at_ns| format!("; its connection ended {}", before(job, at_ns)));
    let gone = gone.unwrap_or_default();
    if rank.pid.is_none() {
        return format!("{subject} had not joined the job");
    }
    let Some(last) = rank.operations.last() else {
        return format!("{subject} had submitted nothing{gone}");
    };
    let state = match last.outcome {
        Outcome::InFlight => "in flight",
        Outcome::Done => "done",
        Outcome::Failed => "failed",
    };
    format!(
        "{subject} had last submitted '{}'{}, {} ({state}){gone}",
        last.name,
        at(last),
        before(job, last.submitted_ns)
    )
}

/// Why an operation that all ranks had submitted did not end.
fn transfer(job: &Job, wait: &Wait) -> String {
    let hosts = |nodes: &BTreeSet<u32>| {
        let names = nodes.iter().filter_map(|node| job.hosts.get(node));
        names.map(|host| host.name.as_str()).collect::<Vec<_>>().join(", ")
    };
    let name = &wait.name;
    if !wait.unknown.is_empty() {
        let unknown = named(wait.unknown.clone());
        return format!(
            "No recorded rank was missing for '{name}', but nothing is recorded of {unknown}."
        );
    }
    match wait.sequence {
        None => format!("All ranks had submitted '{name}', but no order for it had arrived."),
        Some(sequence) if !wait.still.is_empty() => format!(
            "All ranks had submitted '{name}' (operation {sequence}), but none of its bytes had \
             moved on host {}.",
            hosts(&wait.still)
        ),
        Some(sequence) => {
            let nodes = wait.waiting.iter().filter_map(|rank| job.ranks.get(rank));
            let nodes: BTreeSet<u32> = nodes.map(|rank| rank.node).collect();
            format!(
                "All ranks had submitted '{name}' (operation {sequence}), and it was being moved \
                 on host {}.",
                hosts(&nodes)
            )
        }
    }
}

/// The ranks that waited, for what, and since when.
fn waited(job: &Job, wait: &Wait) -> String {
    let find = |rank: &u32| {
        let operations = &job.ranks.get(rank)?.operations;
        operations.iter().rev().find(|it| is_in_flight(it) && it.name == wait.name)
    };
    let first = wait.waiting.iter().find_map(find);
    let what = first.map_or_else(String::new, |it| format!(" ({}){}", described(it), at(it)));
    let set = if wait.set == 0 { String::new() } else { format!(" of process set {}", wait.set) };
    let who = named(wait.waiting.clone());
    let since = before(job, wait.since_ns);
    sentence(&format!("{who}{set} waited for '{}'{what}, since {since}", wait.name))
}

/// `allreduce of f32 [2, 3]`.
fn described(it: &Operation) -> String {
    if it.dims == [0] {
        // A barrier, for example, has no tensor.
        return call(it);
    }
    let dtype = DType::from_wire(it.dtype.into()).map_or("?", DType::name);
    let more = if it.tensors > 1 { format!(" and {} more", it.tensors - 1) } else { String::new() };
    format!("{} of {dtype} {:?}{more}", call(it), it.dims)
}

/// ` at train.py:3 in step`, if it is known.
fn at(it: &Operation) -> String {
    if it.site.is_empty() { String::new() } else { format!(" at {}", it.site) }
}

/// `1.234 s before the end`.
fn before(job: &Job, at_ns: u64) -> String {
    format!("{:.3} s before the end", job.end_ns.saturating_sub(at_ns) as f64 / 1e9)
}

/// `17:03:12.123 UTC`.
fn time(at_ns: u64) -> String {
    let ms = at_ns / 1_000_000;
    let (s, m, h) = (ms / 1000 % 60, ms / 60_000 % 60, ms / 3_600_000 % 24);
    format!("{h:02}:{m:02}:{s:02}.{:03} UTC", ms % 1000)
}

/// The last operations of a rank and their outcomes, as ranks can have them alike.
type Position = Vec<(u32, String, Outcome)>;

fn position(rank: &RankRecord) -> Position {
    let last = rank.operations.iter().rev().take(OPERATIONS);
    last.map(|it| (it.process_set, it.name.clone(), it.outcome)).collect()
}

/// How far an operation had come.
fn phase(it: &Operation) -> String {
    match it.outcome {
        Outcome::Done => "done".to_owned(),
        Outcome::Failed => "failed".to_owned(),
        Outcome::InFlight if it.begun_ns > 0 => "being moved".to_owned(),
        Outcome::InFlight if it.ordered_ns > 0 => "ordered, no byte moved".to_owned(),
        Outcome::InFlight if it.announced_ns > 0 => "submitted by all ranks of its host".to_owned(),
        Outcome::InFlight => "submitted".to_owned(),
    }
}

/// The last operations: one block for ranks that have the same, the smallest group first.
fn positions(job: &Job, line: &mut impl FnMut(String)) {
    let mut groups: BTreeMap<Position, Vec<u32>> = BTreeMap::new();
    for (rank, record) in &job.ranks {
        groups.entry(position(record)).or_default().push(*rank);
    }
    let mut groups: Vec<Vec<u32>> = groups.into_values().collect();
    groups.sort_by_key(|ranks| (ranks.len(), ranks[0]));
    let more: usize = groups.iter().skip(GROUPS).map(Vec::len).sum();
    for ranks in groups.iter().take(GROUPS) {
        let record = &job.ranks[&ranks[0]];
        let host = job.host_of(ranks[0]).unwrap_or("?");
        let (who, count) = (named(ranks.clone()), record.count);
        line(match (ranks.len(), record.pid) {
            (1, None) => format!("{who} on host {host} had not joined the job"),
            (1, Some(pid)) => {
                format!("{who} on host {host} (pid {pid}) had submitted {count} operations:")
            }
            (_, None) => format!("{who} had not joined the job"),
            _ => format!("{who} were at the same place; rank {} on host {host}:", ranks[0]),
        });
        for it in record.operations.iter().rev().take(OPERATIONS) {
            let sequence = it.sequence.map_or_else(String::new, |it| format!(", operation {it}"));
            line(format!(
                "  '{}' {}{}: {}{sequence}, submitted {}",
                it.name,
                described(it),
                at(it),
                phase(it),
                before(job, it.submitted_ns)
            ));
        }
    }
    if more > 0 {
        line(format!("and {more} ranks in other places"));
    }
}

/// The last warnings of the daemons.
fn events(job: &Job, line: &mut impl FnMut(String)) {
    for host in job.hosts.values() {
        let all: Vec<_> = host.events.iter().filter(|event| event.level < UNIMPORTANT).collect();
        for event in &all[all.len().saturating_sub(EVENTS)..] {
            line(format!("{} host {}: {}", time(event.at_ns), host.name, event.text));
        }
    }
}
