//! `gradwire why`: explains what a job waits for.

use std::time::Duration;

use clap::Args;
use gradwire_launcher::{
    error::{CommandError, print_line},
    nearby::{self, DaemonHere},
    secrets,
};
use gradwire_proto::{
    auth::Claim,
    pb::{self, ChallengeRequest, ExplainRequest, Explanation, ViewerChallenge},
};
use serde_json::{Value, json};

use crate::{
    cluster::printable,
    find,
    process::block_on,
    status::{ANSWER, EXPLANATION, open_within, write},
};

/// How long a coordinator may take for a challenge before the daemons of this host are asked.
const PROMPT: Duration = Duration::from_secs(1);

/// The job, and how much of it to show.
#[derive(Debug, Args)]
pub struct Options {
    /// The job [default: your job on this host].
    ///
    /// Its id if you started it on this host.
    ///
    /// Otherwise the address of its coordinator or status page.
    #[arg(value_name = "JOB")]
    pub address: Option<String>,
    /// Print JSON.
    ///
    /// It has all waits, ranks and stacks.
    #[arg(long)]
    pub json: bool,
    /// Show the whole stacks of all threads of all ranks.
    #[arg(long)]
    pub stacks: bool,
}

/// Explains what a job waits for. If its coordinator can't be found or does not answer, the daemon
/// of this host explains what its ranks do.
///
/// # Errors
/// [`CommandError`] if nobody answers in time, or if this user does not have the job's secret.
pub fn run(options: &Options) -> Result<(), CommandError> {
    let named = options.address.as_deref();
    let daemons = daemons_of(named);
    let limit = if daemons.is_empty() { ANSWER } else { PROMPT };
    let coordinator = find::coordinator(named).and_then(|address| Asked::greet(address, limit));
    let explained = match coordinator {
        Ok(asked) => block_on(asked.explain(options.stacks))??,
        Err(error) => {
            let Some(explained) = by_daemons(&daemons, options.stacks) else { return Err(error) };
            print_line(format_args!("gradwire: {}; the daemon of this host answers", error.what));
            explained
        }
    };
    let text = if options.json { format!("{:#}\n", to_json(&explained)) } else { show(&explained) };
    write(&text).map(drop)
}

/// A coordinator that answers.
struct Asked {
    address: String,
    challenge: ViewerChallenge,
}

impl Asked {
    /// Asks the coordinator at `address` for a challenge, which it gives at once.
    fn greet(address: String, limit: Duration) -> Result<Self, CommandError> {
        let asked = open_within(limit, &address, async |client| {
            client.challenge(ChallengeRequest {}).await
        });
        let challenge = block_on(asked)??;
        Ok(Self { address, challenge })
    }

    async fn explain(self, stacks: bool) -> Result<Explanation, CommandError> {
        let ViewerChallenge { nonce, job } = self.challenge;
        let claim = Claim::View { challenge: &nonce, job: &job };
        let proof = secrets::of(&job)?.prove(&claim).to_vec();
        let request = ExplainRequest { stacks, nonce, proof, save: false };
        open_within(EXPLANATION, &self.address, async |client| client.explain(request).await).await
    }
}

/// The daemons of this host that belong to the named job, or all of them.
fn daemons_of(named: Option<&str>) -> Vec<DaemonHere> {
    let mut daemons = nearby::daemons();
    if let Some(named) = named {
        daemons.retain(|daemon| daemon.job == named || daemon.coordinator == named);
    }
    daemons
}

/// What the ranks of these daemons do; `None` if no daemon answers, or they have several jobs.
fn by_daemons(daemons: &[DaemonHere], stacks: bool) -> Option<Explanation> {
    let answers = daemons.iter().filter_map(|daemon| daemon.ask(stacks).ok());
    answers.map(Some).reduce(|one, other| merge(one?, other?)).flatten()
}

/// What two daemons say about their ranks; `None` if they belong to different jobs.
fn merge(mut one: Explanation, other: Explanation) -> Option<Explanation> {
    one.waits.extend(other.waits);
    one.wait_count += other.wait_count;
    one.ranks.extend(other.ranks);
    one.ranks.sort_by_key(|rank| rank.rank);
    one.text.push_str(&other.text);
    (one.job == other.job).then_some(one)
}

/// An explanation as text.
pub fn show(explained: &Explanation) -> String {
    let head = format!("job {}, {}: {}", explained.job, explained.phase, explained.reason);
    // The texts of ranks may contain anything (TRUST).
    let lines = [head.as_str()].into_iter().chain(explained.text.lines());
    lines.map(|line| format!("{}\n", printable(line))).collect()
}

/// An explanation as JSON.
pub fn to_json(explained: &Explanation) -> Value {
    let seconds = |milliseconds: u64| milliseconds as f64 / 1e3;
    let waits = explained.waits.iter().map(|wait| {
        json!({
            "process_set": wait.process_set,
            "tensor": wait.name,
            "seconds": seconds(wait.waiting_ms),
            "waiting_ranks": wait.waiting,
            "missing_ranks": wait.missing,
        })
    });
    let recent = |it: &pb::RecentOperation| {
        let outcome = match it.outcome() {
            pb::Outcome::InFlight => "in flight",
            pb::Outcome::Done => "done",
            pb::Outcome::Failed => "failed",
        };
        json!({
            "tensor": it.name,
            "call": it.call,
            "seconds_ago": seconds(it.age_ms),
            "outcome": outcome,
            "called_at": (!it.site.is_empty()).then_some(&it.site),
        })
    };
    let thread = |it: &pb::ThreadStack| json!({ "name": it.name, "frames": it.frames });
    let ranks = explained.ranks.iter().map(|rank| {
        json!({
            "rank": rank.rank,
            "host": rank.host,
            "pid": (rank.pid > 0).then_some(rank.pid),
            "state": state(rank.doing()),
            "cpu": rank.cpu,
            "kernel_function": (!rank.call.is_empty()).then_some(&rank.call),
            "answered": rank.answered,
            "paused": (!rank.paused.is_empty()).then_some(&rank.paused),
            "submitted": rank.submitted,
            "output": rank.output,
            "last_operations": rank.recent.iter().map(recent).collect::<Vec<_>>(),
            "threads": rank.threads.iter().map(thread).collect::<Vec<_>>(),
        })
    });
    json!({
        "job": explained.job,
        "phase": explained.phase,
        "reason": explained.reason,
        "waits": waits.collect::<Vec<_>>(),
        "wait_count": explained.wait_count,
        "ranks": ranks.collect::<Vec<_>>(),
        "silent_hosts": explained.silent_hosts,
    })
}

fn state(doing: pb::Doing) -> &'static str {
    match doing {
        pb::Doing::Unknown => "unknown",
        pb::Doing::Running => "running",
        pb::Doing::Sleeping => "sleeping",
        pb::Doing::Uninterruptible => "uninterruptible",
        pb::Doing::Stopped => "stopped",
        pb::Doing::Gone => "gone",
        pb::Doing::Absent => "absent",
        pb::Doing::Left => "left",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained() -> Explanation {
        let wait = |name: &str, waiting_ms| pb::Wait {
            name: name.into(),
            waiting_ms,
            waiting: vec![0],
            missing: vec![1],
            ..pb::Wait::default()
        };
        let rank = pb::RankState {
            rank: 1,
            pid: 7,
            doing: pb::Doing::Stopped.into(),
            host: "a".into(),
            ..pb::RankState::default()
        };
        Explanation {
            job: "j1".into(),
            phase: "running".into(),
            reason: "2 of 2\u{1b} nodes".into(),
            waits: vec![wait("w", 5_000), wait("v", 3)],
            wait_count: 2,
            ranks: vec![rank],
            hosts: vec!["a".into()],
            first_ranks: vec![0],
            silent_hosts: Vec::new(),
            text: "a\n  b\u{7}\n".into(),
            saved: Vec::new(),
        }
    }

    #[test]
    fn control_characters_are_not_shown() {
        assert_eq!(show(&explained()), "job j1, running: 2 of 2 nodes\na\n  b\n", "TRUST");
    }

    #[test]
    fn json_has_everything() {
        let json = to_json(&explained());
        assert_eq!(json["waits"][1]["tensor"], "v");
        assert_eq!(json["ranks"][0]["state"], "stopped");
        assert_eq!(json["ranks"][0]["host"], "a");
        assert!(json["ranks"][0]["kernel_function"].is_null());
    }
}
