//! Tells the coordinator what the ranks of this node do: what they say themselves, what the system
//! knows about their processes, their last operations, and the tensors that only some of them have
//! submitted. Runs on a thread of its own (`gw-explain`), one at a time.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use gradwire_proto::{Rank, pb};
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
const MAX_BYTES: usize = 1 << 20;

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
                // If the message can't be sent, others notice that.
                if worker.outbox.send(explain).is_ok() {
                    asked.push(local_rank);
                }
            }
            let wrote = node.last_lines.of(node.number_of(local_rank));
            Observed { local_rank, rank, seen, pid, before, wrote }
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
        partly: node.queue().map(|queue| queue.partly(now)).unwrap_or_default(),
        saved: saving.map(saved),
    };
    if explained.encoded_len() > MAX_BYTES {
        explained.ranks.iter_mut().for_each(|rank| rank.threads.truncate(1));
    }
    explained
}

/// The result of saving the recording, as far as it is known by now.
fn saved(saving: Option<Saving>) -> pb::Saved {
    let unset = || Err("recorder.directory is not set".to_owned());
    let (path, error) = match saving.map_or_else(unset, Saving::look) {
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
