//! What one rank does now, as JSON: its state, its last operations and, for those who may see them,
//! its stacks and its last output. Pure.

use gradwire_proto::pb::{Doing, Explanation, Outcome, RankState};
use serde_json::{Value, json};

/// A rank in this explanation; `None` if nothing is known about this rank.
/// `with_insides`: the answer has the stacks of its threads and its last lines of output.
pub fn of(explanation: &Explanation, rank: u32, with_insides: bool) -> Option<Value> {
    let state = explanation.ranks.iter().find(|state| state.rank == rank)?;
    let operations = state.recent.iter().map(|it| {
        json!({
            "name": it.name,
            "call": it.call,
            "age_seconds": it.age_ms as f64 / 1e3,
            "outcome": outcome(it.outcome()),
        })
    });
    let stacks = state.threads.iter().map(|it| json!({"name": it.name, "frames": it.frames}));
    Some(json!({
        "rank": state.rank,
        "host": state.host,
        "pid": (state.pid > 0).then_some(state.pid),
        "doing": doing(state),
        "cpu": state.cpu,
        "kernel_call": (!state.call.is_empty()).then_some(&state.call),
        "answered": state.answered,
        "submitted": state.submitted,
        "operations": operations.collect::<Vec<_>>(),
        "stacks": with_insides.then(|| stacks.collect::<Vec<_>>()),
        "output": with_insides.then_some(&state.output),
    }))
}

fn doing(state: &RankState) -> &'static str {
    match state.doing() {
        Doing::Unknown => "unknown",
        Doing::Running => "running",
        Doing::Sleeping => "sleeping",
        Doing::Uninterruptible => "uninterruptible",
        Doing::Stopped => "stopped",
        Doing::Gone => "gone",
        Doing::Absent => "absent",
        Doing::Left => "left",
    }
}

fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::InFlight => "in-flight",
        Outcome::Done => "done",
        Outcome::Failed => "failed",
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::pb::{RecentOperation, ThreadStack};

    use super::*;

    fn explanation() -> Explanation {
        let recent = RecentOperation {
            name: "w".into(),
            call: "allreduce".into(),
            age_ms: 1500,
            outcome: Outcome::InFlight.into(),
            site: "train.py:12 in step".into(),
        };
        let frames = vec!["train.py:12 in step".to_owned()];
        let state = RankState {
            rank: 3,
            pid: 77,
            doing: Doing::Sleeping.into(),
            cpu: 0.5,
            answered: true,
            recent: vec![recent],
            threads: vec![ThreadStack { name: "main".into(), frames }],
            submitted: 9,
            host: "b".into(),
            output: vec!["loss 0.5".into()],
            ..RankState::default()
        };
        Explanation { ranks: vec![state], ..Explanation::default() }
    }

    #[test]
    fn stacks_are_only_for_those_who_may_see_them() {
        let seen = of(&explanation(), 3, true).unwrap();
        assert_eq!(
            seen,
            json!({
                "rank": 3, "host": "b", "pid": 77, "doing": "sleeping", "cpu": 0.5,
                "kernel_call": null, "answered": true, "submitted": 9,
                "operations": [{
                    "name": "w", "call": "allreduce", "age_seconds": 1.5, "outcome": "in-flight",
                }],
                "stacks": [{"name": "main", "frames": ["train.py:12 in step"]}],
                "output": ["loss 0.5"],
            })
        );
        let guest = of(&explanation(), 3, false).unwrap();
        assert_eq!((&guest["stacks"], &guest["output"]), (&Value::Null, &Value::Null));
        assert!(!guest.to_string().contains("train.py"), "TRUST");
        assert_eq!(of(&explanation(), 4, true), None);
    }
}
