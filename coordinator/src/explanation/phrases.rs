//! The phrases of an explanation: what waits for whom, what a process does, where it is. Pure.

use std::{collections::BTreeSet, time::Duration};

use gradwire_proto::{Collective, EPOCH_MEETING, ProcessSetId, Rank, Request, pb};

use crate::model::text;

/// The most groups of ranks in a text (BOUND).
pub(super) const MAX_GROUPS: usize = 8;

/// The most names of tensors that wait for the same ranks.
const MAX_NAMES: usize = 3;

/// The largest share of a core that a sleeping process uses.
const IDLE: f32 = 0.1;

/// Parts of a file's path that is not the program's own code.
const LIBRARIES: [&str; 4] = ["site-packages/", "dist-packages/", "/lib/python3", "<frozen"];

/// The beginning of the path of Gradwire's own code.
const GRADWIRE: &str = "gradwire/";

/// What some functions of the kernel mean.
const CALLS: [(&str, &str); 12] = [
    ("futex", "a lock or another thread"),
    ("pipe_read", "data from a pipe"),
    ("pipe_write", "room in a pipe"),
    ("nanosleep", "a timer"),
    ("do_wait", "a child process"),
    ("poll", "data or a timer"),
    ("do_select", "data or a timer"),
    ("unix_stream", "a local socket"),
    ("tcp_recvmsg", "the network"),
    ("wait_for_data", "the network"),
    ("fuse", "a FUSE file system"),
    ("tty_read", "its terminal"),
];

/// `tensors 'a', 'b' have waited 5.0 s for rank 1 on host b`.
pub(super) fn waited(
    explanation: &pb::Explanation,
    set: u32,
    missing: &[u32],
    waits: &[&pb::Wait],
) -> String {
    let longest = waits.iter().map(|wait| wait.waiting_ms).max().unwrap_or_default();
    let time = text::seconds(Duration::from_millis(longest));
    let places = places(explanation, missing);
    if let [wait] = waits
        && wait.name == Request::INIT
    {
        return format!("the other ranks have waited {time} for {places} to call init()");
    }
    let names = text::some_names(waits.iter().map(|wait| wait.name.as_str()), MAX_NAMES);
    let (noun, have) = if waits.len() == 1 { ("tensor", "has") } else { ("tensors", "have") };
    let place = match ProcessSetId(set) {
        ProcessSetId::GLOBAL => String::new(),
        set => format!(" of process set {set}"),
    };
    let submitted: BTreeSet<u32> =
        waits.iter().flat_map(|wait| wait.waiting.iter().copied()).collect();
    let submitted: Vec<u32> = submitted.into_iter().collect();
    let have_it = if submitted.len() == 1 { "has submitted" } else { "have submitted" };
    let it = if waits.len() == 1 { "it" } else { "them" };
    format!(
        "{noun} {names}{place} {have} waited {time} for {places}; {} {have_it} {it}{}",
        named(&submitted),
        called_at(explanation, waits)
    )
}

/// ` at train.py:12 in step`: the line from which ranks have submitted these tensors, if it is
/// known, and how many others there are. Earlier calls with the same name don't count.
fn called_at(explanation: &pb::Explanation, waits: &[&pb::Wait]) -> String {
    let is_one = |rank: u32, name: &str| {
        waits.iter().any(|wait| wait.name == name && wait.waiting.contains(&rank))
    };
    let recent =
        explanation.ranks.iter().flat_map(|rank| rank.recent.iter().map(move |it| (rank, it)));
    let sites: BTreeSet<&str> = recent
        .filter(|(_, it)| it.outcome() == pb::Outcome::InFlight && !it.site.is_empty())
        .filter(|(rank, it)| is_one(rank.rank, &it.name))
        .map(|(_, it)| it.site.as_str())
        .collect();
    let others = sites.len().saturating_sub(1);
    match (sites.first(), others) {
        (None, _) => String::new(),
        (Some(site), 0) => format!(" at {site}"),
        (Some(site), _) => format!(" at {site} and {}", text::count(others, "other place")),
    }
}

/// The pairs of waits that block each other: each is for ranks that wait in the other one.
pub(super) fn mutual(waits: &[pb::Wait]) -> Vec<(&pb::Wait, &pb::Wait)> {
    let blocks = |one: &pb::Wait, other: &pb::Wait| {
        one.missing.iter().all(|rank| other.waiting.contains(rank))
    };
    let mut pairs = Vec::new();
    for (at, one) in waits.iter().enumerate() {
        let rest = &waits[at + 1..];
        let other = rest.iter().find(|other| blocks(one, other) && blocks(other, one));
        pairs.extend(other.map(|other| (one, other)));
    }
    pairs.truncate(MAX_NAMES);
    pairs
}

/// What two waits that block each other mean: the ranks of one have left the process set, or the
/// order of calls differs.
pub(super) fn of_each_other(one: &pb::Wait, other: &pb::Wait) -> String {
    let removes = |wait: &pb::Wait| {
        let number = wait.name.strip_prefix(Collective::RemoveProcessSet.name());
        number.is_some_and(|number| number.starts_with(".#"))
    };
    let (removal, wait) = if removes(one) { (one, other) } else { (other, one) };
    if removes(removal) && !removes(wait) {
        return format!(
            "{} left a process set (remove_process_set, destroy_process_group or the end of the \
             program), but '{}' of {} still waits there",
            named(&removal.waiting),
            wait.name,
            named(&wait.waiting)
        );
    }
    let names = |wait: &pb::Wait| format!("{} for '{}'", named(&wait.waiting), wait.name);
    format!("they wait for each other under different names: {}, {}", names(one), names(other))
}

/// `rank 3`, `ranks 4 and 9`, or `ranks 0-2,5`.
pub(super) fn named(ranks: &[u32]) -> String {
    match ranks {
        [] => "no rank".to_owned(),
        [one, other] if other - one > 1 => format!("ranks {one} and {other}"),
        _ => text::named_ranks(&ranks.iter().copied().map(Rank).collect::<Vec<_>>()),
    }
}

/// The host of a rank.
fn host(explanation: &pb::Explanation, rank: u32) -> &str {
    let after = explanation.first_ranks.partition_point(|first| *first <= rank);
    after.checked_sub(1).and_then(|at| explanation.hosts.get(at)).map_or("?", String::as_str)
}

/// `ranks 2-3 on host b, rank 5 on host c`.
fn places(explanation: &pb::Explanation, ranks: &[u32]) -> String {
    let mut hosts: Vec<(&str, Vec<Rank>)> = Vec::new();
    for &rank in ranks {
        let host = host(explanation, rank);
        match hosts.last_mut() {
            Some((last, ranks)) if *last == host => ranks.push(Rank(rank)),
            _ => hosts.push((host, vec![Rank(rank)])),
        }
    }
    let more = hosts.len().saturating_sub(MAX_GROUPS);
    let part =
        |(host, ranks): &(&str, Vec<Rank>)| format!("{} on host {host}", text::named_ranks(ranks));
    let mut parts: Vec<String> = hosts.iter().take(MAX_GROUPS).map(part).collect();
    if more > 0 {
        parts.push(format!("ranks on {more} more hosts"));
    }
    parts.join(", ")
}

/// `rank 4 on host b (pid 123) is running, 98 % of a core`.
pub(super) fn state(explanation: &pb::Explanation, rank: &pb::RankState) -> String {
    let pid = if rank.pid > 0 { format!(" (pid {})", rank.pid) } else { String::new() };
    let host = host(explanation, rank.rank);
    let meets = |wait: &pb::Wait| wait.name == EPOCH_MEETING && wait.missing.contains(&rank.rank);
    let does = match rank.doing() {
        pb::Doing::Absent if explanation.waits.iter().any(meets) => {
            "has not come to this epoch: it has made no call since the loss or change before it"
                .to_owned()
        }
        _ => does(rank, 1),
    };
    format!("rank {} on host {host}{pid} {does}", rank.rank)
}

/// What a process does, as a predicate of this number of ranks that do the same.
pub(super) fn does(rank: &pb::RankState, ranks: usize) -> String {
    let verb = |of_one, of_several| if ranks == 1 { of_one } else { of_several };
    let (is, has) = (verb("is", "are"), verb("has", "have"));
    let cpu = format!("{:.0} % of a core", 100.0 * rank.cpu);
    let calls = || {
        let meaning = CALLS.iter().find(|(part, _)| rank.call.contains(part));
        match meaning {
            _ if rank.call.is_empty() => String::new(),
            Some((_, meaning)) => {
                let it = verb("it waits", "they wait");
                format!(": {it} for {meaning} ({})", rank.call)
            }
            None => format!(" in {}", rank.call),
        }
    };
    match rank.doing() {
        pb::Doing::Running => format!("{is} running, {cpu}"),
        pb::Doing::Sleeping if rank.cpu > IDLE => format!("{is} busy, {cpu}"),
        pb::Doing::Sleeping => format!("{}{}", verb("sleeps", "sleep"), calls()),
        pb::Doing::Uninterruptible => {
            let call = if rank.call.is_empty() { "the kernel" } else { &rank.call };
            format!("{is} in uninterruptible I/O, in {call}")
        }
        pb::Doing::Stopped => format!("{is} stopped, by a signal or a debugger"),
        pb::Doing::Gone => format!("{has} ended"),
        pb::Doing::Absent => format!("{has} not called init()"),
        pb::Doing::Left => format!("{has} left the job"),
        pb::Doing::Unknown => {
            verb("does something that its host", "do something that their hosts").to_owned()
                + " can't see"
        }
    }
}

/// Where this number of ranks are, all in one place, as a predicate: a line of their program, or
/// what the system knows.
pub(super) fn stand(rank: &pb::RankState, ranks: usize) -> String {
    let is = if ranks == 1 { "is" } else { "are" };
    match rank.threads.first().and_then(|thread| place(&thread.frames)) {
        Some(line) if line.contains(':') => format!("in {line}"),
        // Without a stack of its own, a thread has a state, such as `sleeping in futex_do_wait`.
        Some(state) => format!("{is} {state}"),
        None => does(rank, ranks),
    }
}

/// `its last operations: allreduce 'a' (done, 1.2 s ago), …`.
pub(super) fn recent(rank: &pb::RankState) -> Option<String> {
    let part = |operation: &pb::RecentOperation| {
        let outcome = match operation.outcome() {
            pb::Outcome::InFlight => "in flight",
            pb::Outcome::Done => "done",
            pb::Outcome::Failed => "failed",
        };
        let age = text::seconds(Duration::from_millis(operation.age_ms));
        let site = match operation.site.as_str() {
            "" => String::new(),
            site => format!(" at {site}"),
        };
        format!("{} '{}' ({outcome}, submitted {age} ago{site})", operation.call, operation.name)
    };
    let parts: Vec<String> = rank.recent.iter().map(part).collect();
    match parts.len() {
        0 if rank.doing() == pb::Doing::Absent => None,
        0 => Some("it has not submitted an operation yet".to_owned()),
        _ => Some(format!("its last operations: {}", parts.join(", "))),
    }
}

/// Whether a frame is code of the program, and not of a library.
pub(super) fn is_own(frame: &str) -> bool {
    !frame.starts_with(GRADWIRE) && !LIBRARIES.iter().any(|part| frame.contains(part))
}

/// The innermost frame of the program's own code, or else the innermost one.
pub(super) fn place(frames: &[String]) -> Option<&String> {
    frames.iter().find(|frame| is_own(frame)).or(frames.first())
}
