//! Tells the coordinator, or a viewer on this host, what the ranks of this node do: what they say
//! themselves, what the system knows about their processes, their last operations, and the tensors
//! that only some of them have submitted. For the coordinator this runs on a thread of its own
//! (`gw-explain`), one at a time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use gradwire_coordinator::explanation_text;
use gradwire_proto::{Ending, Rank, pb};
use gradwire_shm::handover::MAX_FRAME;
use prost::Message as _;

use super::{
    node::Node,
    recording::{self, Saving},
};
use crate::{
    model::{job::Outgoing, milliseconds},
    workers::{
        observations::{ANSWER, Threads},
        process_state::{self, Used},
        slots::Seen,
        worker::Worker,
    },
};

/// The shortest time in which the use of processors is observed.
const SAMPLE: Duration = Duration::from_millis(250);

/// The most bytes of an answer without stacks of other threads than the main ones (BOUND).
const MAX_BYTES: usize = MAX_FRAME - 4096;

/// How long a viewer waits while the coordinator asks (WAIT).
const BUSY: Duration = Duration::from_secs(2);

/// The most waits, and the longest text, that a viewer gets (BOUND): the answer is one frame, and
/// the ranks take most of it.
const MAX_WAITS: usize = 100;
const MAX_TEXT: usize = 256 << 10;

/// How many viewers have asked.
static VIEWERS: AtomicU64 = AtomicU64::new(0);

/// Answers the coordinator's question.
pub(crate) fn answer(node: &Arc<Node>, asked: pb::Explain) {
    if !node.observations.occupy() {
        // The coordinator asks again once its question is closed.
        return;
    }
    let there = node.clone();
    let run = move || {
        let explained = explain(&there, asked);
        there.observations.vacate();
        there.job.send(Outgoing::Explained(Box::new(explained)));
    };
    if let Err(error) = thread::Builder::new().name("gw-explain".to_owned()).spawn(run) {
        node.observations.vacate();
        tracing::warn!(%error, "the system refused the thread that explains waits");
    }
}

/// What the ranks of this node do, for viewers without a coordinator. `stacks`: the text
/// has the whole stacks of all threads.
pub(crate) fn to_viewer(node: &Node, stacks: bool) -> pb::Explanation {
    let until = Instant::now() + BUSY;
    while !node.observations.occupy() {
        if Instant::now() >= until {
            let reason = "this daemon is busy with another question".to_owned();
            return pb::Explanation { reason, ..about(node) };
        }
        thread::sleep(Duration::from_millis(10));
    }
    // The coordinator's questions have small numbers.
    let number = u64::MAX - VIEWERS.fetch_add(1, Ordering::Relaxed);
    let pb::Explained { ranks, partly, .. } = explain(node, pb::Explain { number, save: false });
    node.observations.vacate();
    let host = &node.config.host;
    let wait = |it: pb::PartlySubmitted| pb::Wait {
        process_set: it.process_set,
        name: it.name,
        waiting_ms: it.waiting_ms,
        waiting: it.submitted,
        missing: it.missing,
    };
    let explanation = pb::Explanation {
        wait_count: partly.len() as u64,
        waits: partly.into_iter().take(MAX_WAITS).map(wait).collect(),
        ranks: ranks.into_iter().map(|it| pb::RankState { host: host.clone(), ..it }).collect(),
        ..about(node)
    };
    let text = explanation_text(&explanation, stacks);
    within_limits(pb::Explanation { text, ..explanation })
}

/// An explanation that fits into one frame (BOUND).
fn within_limits(mut explanation: pb::Explanation) -> pb::Explanation {
    let text = &mut explanation.text;
    if text.len() > MAX_TEXT {
        text.truncate(text.floor_char_boundary(MAX_TEXT));
        text.push_str("…\n");
    }
    if explanation.encoded_len() > MAX_BYTES {
        // The text has the important stacks.
        explanation.ranks.iter_mut().for_each(|rank| rank.threads.clear());
    }
    explanation
}

/// The job and the hosts, as far as this node knows them.
fn about(node: &Node) -> pb::Explanation {
    let coordinator = node.config.coordinator;
    let silent = node.liveness.silent_for().as_secs_f64();
    let (phase, reason) = match node.job.ending() {
        Some(Ending::Failed(failure)) => ("failed", failure.to_string()),
        Some(Ending::Finished) => ("finished", "all ranks have left".to_owned()),
        None if node.job.world().is_none() => {
            let why = format!("the world has not formed; the coordinator is {coordinator}");
            ("forming", why)
        }
        None => {
            let why = format!("the coordinator {coordinator} has been silent for {silent:.1} s");
            ("running", why)
        }
    };
    let world = node.job.world();
    let nodes = world.iter().flat_map(|world| &world.nodes);
    let (hosts, first_ranks) = nodes.map(|it| (it.host.clone(), it.first_rank.0)).unzip();
    pb::Explanation {
        job: node.config.identity.job.to_string(),
        phase: phase.to_owned(),
        reason,
        hosts,
        first_ranks,
        ..pb::Explanation::default()
    }
}

/// Sends a report about long waits to the ranks of this node that wait.
pub(crate) fn pass_on(node: &Node, stalled: &pb::Stalled) {
    for worker in node.workers.all() {
        if stalled.ranks.binary_search(&worker.rank.0).is_ok() {
            let text = stalled.text.clone();
            let report = pb::Stalled { text, ranks: Vec::new() };
            let sent = worker.outbox.send(pb::daemon_message::Message::Stalled(report));
            node.ensure_sent(&worker, sent);
        }
    }
}

/// A rank of this node, while it is observed.
struct Observed {
    local_rank: u32,
    rank: Rank,
    seen: Seen,
    pid: Option<u32>,
    before: Option<Used>,
    wrote: Vec<String>,
    is_new: bool,
}

fn explain(node: &Node, pb::Explain { number, save }: pb::Explain) -> pb::Explained {
    let began = Instant::now();
    let saving = if save { Some(recording::save(node)) } else { None };
    let observations = &node.observations;
    observations.begin(number);
    let mut asked = Vec::new();
    let ranks: Vec<Observed> = (0..node.config.slots)
        .map(|local_rank| {
            let (rank, seen) = (node.rank(local_rank), node.workers.seen(local_rank));
            let pid = match &seen {
                Seen::Attached(worker) => Some(worker.pid),
                Seen::Coming(pid) => pid.or_else(|| node.pid_of(local_rank)),
                Seen::Left => None,
            };
            let before = pid.and_then(process_state::used);
            if let Seen::Attached(worker) = &seen
                && can_answer(worker)
            {
                let explain =
                    pb::daemon_message::Message::Explain(pb::Explain { number, save: false });
                // A broken connection is noticed elsewhere.
                if worker.outbox.send(explain).is_ok() {
                    asked.push(local_rank);
                }
            }
            let wrote = node.last_lines.of(node.number_of(local_rank));
            let elastic = node.config.elastic.as_ref();
            let is_new = elastic.is_some_and(|elastic| !elastic.is_survivor(local_rank));
            Observed { local_rank, rank, seen, pid, before, wrote, is_new }
        })
        .collect();
    let mut answers = observations.wait(number, &asked, began + ANSWER);
    thread::sleep((began + SAMPLE).saturating_duration_since(Instant::now()));
    let now = Instant::now();
    let states = ranks.into_iter().map(|it| {
        let threads = answers.remove(&it.local_rank);
        state(it, threads, now)
    });
    let mut explained = pb::Explained {
        number,
        ranks: states.collect(),
        partly: node.queue().map(|queue| queue.partly(now, Duration::ZERO)).unwrap_or_default(),
        // A viewer that has asked for the recordings reads them next.
        saved: saving.map(saved),
    };
    if explained.encoded_len() > MAX_BYTES {
        explained.ranks.iter_mut().for_each(|rank| rank.threads.truncate(1));
    }
    explained
}

/// The result of saving the recording, once it is known.
fn saved(saving: Option<Saving>) -> pb::Saved {
    let unset = || Err("recorder.directory is not set".to_owned());
    let (path, error) = match saving.map_or_else(unset, Saving::wait_blocking) {
        Ok(path) => (path.display().to_string(), String::new()),
        Err(error) => (String::new(), error),
    };
    pb::Saved { host: String::new(), path, error }
}

/// Whether a rank can answer at all: a stopped process does not.
fn can_answer(worker: &Worker) -> bool {
    let seen = process_state::doing(worker.pid, None).doing;
    !matches!(seen, pb::Doing::Stopped | pb::Doing::Gone)
}

fn state(observed: Observed, threads: Option<Threads>, now: Instant) -> pb::RankState {
    let mut state = pb::RankState {
        rank: observed.rank.0,
        pid: observed.pid.unwrap_or_default(),
        answered: threads.is_some(),
        threads: threads.unwrap_or_default(),
        output: observed.wrote,
        is_new: observed.is_new,
        ..pb::RankState::default()
    };
    if let Some(pid) = observed.pid {
        let seen = process_state::doing(pid, observed.before);
        state.set_doing(seen.doing);
        (state.cpu, state.call) = (seen.cpu as f32, seen.call);
        if state.threads.is_empty() {
            state.threads = process_state::threads(pid);
        }
    }
    match &observed.seen {
        Seen::Attached(worker) => {
            (state.recent, state.submitted) = worker.recorded.look();
            if let Some((what, time)) = worker.pause.look(now) {
                (state.paused, state.paused_ms) = (what, milliseconds(time));
            }
        }
        // A process that has ended before it joined matters more than that it is absent.
        Seen::Coming(_) if state.doing() == pb::Doing::Gone => {}
        Seen::Coming(_) => state.set_doing(pb::Doing::Absent),
        Seen::Left => state.set_doing(pb::Doing::Left),
    }
    state
}
