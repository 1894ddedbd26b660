//! The explanation of a wait as text, for people: the tensors, the ranks that wait for them, the
//! ranks that have not submitted them, and what those do. Pure.
//!
//! Outliers come first, and what is the same on several ranks is written once. The sentences are
//! made of [`phrases`].

mod phrases;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    time::Duration,
};

use gradwire_proto::{Rank, pb};

use self::phrases::{
    MAX_GROUPS, does, is_own, mutual, named, of_each_other, recent, stand, state, waited,
};
use crate::model::text;

/// The most waits and ranks in a text (BOUND).
const MAX_WAITS: usize = 8;
const MAX_RANKS: usize = 8;

/// The most frames of a stack, unless all are wanted.
const MAX_FRAMES: usize = 6;

/// A shorter wait is normal, in milliseconds.
const SHORT_MS: u64 = 500;

/// How much of an explanation is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detail {
    /// What is missing.
    Report,
    /// Also what the other ranks do.
    All,
    /// Also all stacks of all threads.
    Stacks,
    /// What all ranks do, in a job that stands still.
    Standstill,
}

/// An explanation as lines of text, for a viewer. `stacks`: with the whole stacks of all ranks.
pub fn explanation_text(explanation: &pb::Explanation, stacks: bool) -> String {
    text(explanation, if stacks { Detail::Stacks } else { Detail::All })
}

/// An explanation as lines of text.
pub(crate) fn text(explanation: &pb::Explanation, detail: Detail) -> String {
    let mut lines = Lines { explanation, text: String::new() };
    lines.waits(detail);
    lines.positions();
    lines.paused();
    let missing: BTreeSet<u32> =
        explanation.waits.iter().flat_map(|wait| &wait.missing).copied().collect();
    lines.ranks(&missing, detail);
    match detail {
        Detail::Report => {}
        Detail::Standstill => lines.all(&missing),
        Detail::All | Detail::Stacks => lines.others(&missing, detail),
    }
    for host in &explanation.silent_hosts {
        lines.line(0, format!("host {host} did not answer"));
    }
    lines.text
}

struct Lines<'a> {
    explanation: &'a pb::Explanation,
    text: String,
}

impl Lines<'_> {
    fn line(&mut self, depth: usize, text: impl AsRef<str>) {
        // Writing to a string can't fail.
        let _ = writeln!(self.text, "{:1$}{2}", "", 2 * depth, text.as_ref());
    }

    /// One line for all tensors that wait for the same ranks.
    fn waits(&mut self, detail: Detail) {
        let explanation = self.explanation;
        let mut alike: BTreeMap<(u32, &[u32]), Vec<&pb::Wait>> = BTreeMap::new();
        let lasts = |wait: &&pb::Wait| detail == Detail::Report || wait.waiting_ms >= SHORT_MS;
        for wait in explanation.waits.iter().filter(lasts) {
            alike.entry((wait.process_set, &wait.missing)).or_default().push(wait);
        }
        let mut alike: Vec<_> = alike.into_iter().collect();
        alike.sort_by_key(|(_, waits)| {
            std::cmp::Reverse(waits.iter().map(|it| it.waiting_ms).max())
        });
        let more = alike.len().saturating_sub(MAX_WAITS);
        for ((set, missing), waits) in alike.iter().take(MAX_WAITS) {
            self.line(0, waited(explanation, *set, missing, waits));
        }
        if more > 0 {
            self.line(0, format!("and {} more", text::count(more, "wait")));
        }
        if alike.is_empty() && matches!(detail, Detail::All | Detail::Stacks) {
            self.line(0, "no operation has waited for a rank for long");
        }
        for (one, other) in mutual(&explanation.waits) {
            self.line(0, of_each_other(one, other));
        }
    }

    /// Which ranks are where, if they are not all at the same operation.
    fn positions(&mut self) {
        let mut at: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
        for rank in &self.explanation.ranks {
            if let Some(last) = rank.recent.first() {
                at.entry(&last.name).or_default().push(rank.rank);
            }
        }
        let mut at: Vec<_> = at.into_iter().collect();
        at.sort_by_key(|(name, ranks)| (std::cmp::Reverse(ranks.len()), *name));
        if at.len() < 2 {
            return;
        }
        let more = at.len().saturating_sub(MAX_GROUPS);
        let mut parts: Vec<String> = Vec::new();
        for (name, ranks) in at.into_iter().take(MAX_GROUPS) {
            let who = match (parts.is_empty(), ranks.len()) {
                // The largest group is the norm, so only its size matters.
                (true, 3..) => format!("{} ranks are", ranks.len()),
                (true, 1) => format!("{} is", named(&ranks)),
                (true, _) => format!("{} are", named(&ranks)),
                (false, _) => named(&ranks),
            };
            parts.push(format!("{who} at '{name}'"));
        }
        let more = if more > 0 { format!("; and {more} other places") } else { String::new() };
        let all = parts.join("; ");
        self.line(0, format!("{all}{more}"));
    }

    /// Which ranks make no steps on purpose.
    fn paused(&mut self) {
        let mut pauses: BTreeMap<&str, (u64, Vec<u32>)> = BTreeMap::new();
        for rank in self.explanation.ranks.iter().filter(|rank| !rank.paused.is_empty()) {
            let (longest, ranks) = pauses.entry(&rank.paused).or_default();
            *longest = rank.paused_ms.max(*longest);
            ranks.push(rank.rank);
        }
        for (what, (longest, ranks)) in pauses.into_iter().take(MAX_GROUPS) {
            let time = text::seconds(Duration::from_millis(longest));
            self.line(0, format!("paused: {what} since {time} ({})", named(&ranks)));
        }
    }

    /// What all ranks do that are not missing: those with the same stack in one group.
    fn all(&mut self, missing: &BTreeSet<u32>) {
        let mut groups: BTreeMap<&[String], Vec<&pb::RankState>> = BTreeMap::new();
        for rank in self.explanation.ranks.iter().filter(|rank| !missing.contains(&rank.rank)) {
            let stack = rank.threads.first().map_or(&[][..], |thread| &thread.frames);
            groups.entry(stack).or_default().push(rank);
        }
        let mut groups: Vec<_> = groups.into_values().collect();
        groups.sort_by_key(|ranks| (ranks.len(), ranks[0].rank));
        let more: usize = groups.iter().skip(MAX_GROUPS).map(Vec::len).sum();
        for ranks in groups.iter().take(MAX_GROUPS) {
            let first = ranks[0];
            if let [only] = ranks[..] {
                self.line(0, state(self.explanation, only));
            } else {
                let numbers: Vec<u32> = ranks.iter().map(|rank| rank.rank).collect();
                let all = named(&numbers);
                let does = does(first, 1);
                self.line(0, format!("{all} are in the same place; rank {} {does}", first.rank));
            }
            if let Some(recent) = recent(first) {
                self.line(1, recent);
            }
            self.stacks(first, Detail::Standstill);
        }
        if more > 0 {
            self.line(0, format!("and {} in other places", text::count(more, "rank")));
        }
    }

    /// What the missing ranks do.
    fn ranks(&mut self, missing: &BTreeSet<u32>, detail: Detail) {
        let explanation = self.explanation;
        let known: Vec<_> =
            explanation.ranks.iter().filter(|rank| missing.contains(&rank.rank)).collect();
        let mut shown: BTreeMap<&[String], u32> = BTreeMap::new();
        for rank in known.iter().take(MAX_RANKS) {
            self.line(0, state(explanation, rank));
            if let Some(recent) = recent(rank) {
                self.line(1, recent);
            }
            let stack: &[String] = rank.threads.first().map_or(&[], |thread| &thread.frames);
            match shown.get(stack) {
                Some(other) if !stack.is_empty() => {
                    self.line(1, format!("in the same place as rank {other}"));
                }
                _ => self.stacks(rank, detail),
            }
            shown.entry(stack).or_insert(rank.rank);
            // Reports stand between the output of the ranks.
            let is_asked = matches!(detail, Detail::All | Detail::Stacks);
            if let Some(line) = rank.output.last().filter(|_| is_asked) {
                self.line(1, format!("it wrote last: {line}"));
            }
        }
        let more = known.len().saturating_sub(MAX_RANKS);
        if more > 0 {
            let rest: Vec<u32> = known[MAX_RANKS..].iter().map(|rank| rank.rank).collect();
            self.line(0, format!("also missing: {}", named(&rest)));
        }
    }

    /// The stacks of a rank: the innermost lines of its main thread, or everything.
    fn stacks(&mut self, rank: &pb::RankState, detail: Detail) {
        let all = detail == Detail::Stacks;
        for thread in rank.threads.iter().take(if all { usize::MAX } else { 1 }) {
            self.line(1, format!("{}:", thread.name));
            let most = if all { usize::MAX } else { MAX_FRAMES };
            for frame in thread.frames.iter().take(most) {
                self.line(2, frame);
            }
            let rest = thread.frames.get(most..).unwrap_or_default();
            if let Some(own) = rest.iter().find(|frame| is_own(frame))
                && !thread.frames[..most].iter().any(|frame| is_own(frame))
            {
                self.line(2, format!("… {own}"));
            } else if !rest.is_empty() {
                self.line(2, format!("… and {} more", rest.len()));
            }
        }
    }

    /// Where the other ranks are, in one line for all at the same place.
    fn others(&mut self, missing: &BTreeSet<u32>, detail: Detail) {
        let others = || self.explanation.ranks.iter().filter(|rank| !missing.contains(&rank.rank));
        if detail == Detail::Stacks {
            let others: Vec<_> = others().collect();
            for rank in others {
                self.line(0, state(self.explanation, rank));
                self.stacks(rank, detail);
            }
            return;
        }
        let mut places: BTreeMap<String, Vec<&pb::RankState>> = BTreeMap::new();
        for rank in others() {
            places.entry(stand(rank, 1)).or_default().push(rank);
        }
        let mut places: Vec<_> = places.into_iter().collect();
        places.sort_by_key(|(place, ranks)| (ranks.len(), place.clone()));
        for (_, ranks) in places.into_iter().take(MAX_GROUPS) {
            let (count, place) = (text::count(ranks.len(), "rank"), stand(ranks[0], ranks.len()));
            let ranks: Vec<Rank> = ranks.into_iter().map(|rank| Rank(rank.rank)).collect();
            let ranks = text::named_ranks(&ranks);
            self.line(0, format!("{count} {place}: {ranks}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::EPOCH_MEETING;

    use super::*;

    fn wait(name: &str, waiting: &[u32], missing: &[u32]) -> pb::Wait {
        pb::Wait {
            process_set: 0,
            name: name.into(),
            waiting_ms: 5_000,
            waiting: waiting.to_vec(),
            missing: missing.to_vec(),
        }
    }

    fn rank(rank: u32, doing: pb::Doing, last: &str, frames: &[&str]) -> pb::RankState {
        let thread = pb::ThreadStack {
            name: "main thread".into(),
            frames: frames.iter().map(ToString::to_string).collect(),
        };
        let waits = doing == pb::Doing::Sleeping;
        let outcome = if waits { pb::Outcome::InFlight } else { pb::Outcome::Done };
        let last = pb::RecentOperation {
            name: last.into(),
            call: "allreduce".into(),
            age_ms: 5_200,
            outcome: outcome.into(),
            site: "train.py:6 in step".into(),
        };
        pb::RankState {
            rank,
            pid: 100 + rank,
            doing: doing.into(),
            cpu: 0.98,
            answered: true,
            recent: vec![last],
            threads: vec![thread],
            submitted: 3,
            output: vec!["step 7".into(), "step 8".into()],
            ..pb::RankState::default()
        }
    }

    fn job(waits: Vec<pb::Wait>, ranks: Vec<pb::RankState>) -> pb::Explanation {
        pb::Explanation {
            wait_count: waits.len() as u64,
            waits,
            ranks,
            hosts: vec!["a".into(), "b".into()],
            first_ranks: vec![0, 2],
            ..pb::Explanation::default()
        }
    }

    #[test]
    fn the_missing_ranks_come_first() {
        let done = pb::Doing::Running;
        let waiting =
            ["gradwire/_ops.py:9 in wait", "train.py:7 in step", "train.py:20 in <module>"];
        let looping = ["train.py:12 in odd", "train.py:20 in <module>"];
        let explained = job(
            vec![wait("step.8", &[0, 1, 3], &[2])],
            vec![
                rank(0, pb::Doing::Sleeping, "step.8", &waiting),
                rank(1, pb::Doing::Sleeping, "step.8", &waiting),
                rank(2, done, "step.7", &looping),
                rank(3, pb::Doing::Sleeping, "step.8", &waiting),
            ],
        );
        assert_eq!(
            text(&explained, Detail::All),
            "tensor 'step.8' has waited 5.0 s for rank 2 on host b; ranks 0-1,3 have submitted it \
             at train.py:6 in step\n\
             3 ranks are at 'step.8'; rank 2 at 'step.7'\n\
             rank 2 on host b (pid 102) is running, 98 % of a core\n  \
               its last operations: allreduce 'step.7' (done, submitted 5.2 s ago at train.py:6 in \
               step)\n  \
               main thread:\n    \
                 train.py:12 in odd\n    \
                 train.py:20 in <module>\n  \
               it wrote last: step 8\n\
             3 ranks in train.py:7 in step: ranks 0-1,3\n"
        );
        let report = text(&explained, Detail::Report);
        assert!(!report.contains("3 ranks in") && !report.contains("step 8\n"), "{report}");
    }

    #[test]
    fn ranks_without_a_stack_have_a_verb() {
        let of = |number, frames: &[&str]| rank(number, pb::Doing::Sleeping, "a", frames);
        let gone = |number| pb::RankState {
            threads: Vec::new(),
            ..rank(number, pb::Doing::Gone, "a", &[])
        };
        let ranks = vec![
            of(0, &["sleeping in futex_do_wait"]),
            of(1, &["sleeping in futex_do_wait"]),
            of(2, &["running"]),
            gone(3),
            gone(4),
            of(5, &["x.py:1 in f"]),
        ];
        let lines = text(&job(Vec::new(), ranks), Detail::All);
        for line in [
            "1 rank in x.py:1 in f: rank 5\n",
            "1 rank is running: rank 2\n",
            "2 ranks are sleeping in futex_do_wait: ranks 0-1\n",
            "2 ranks have ended: ranks 3-4\n",
        ] {
            assert!(lines.contains(line), "{lines}");
        }
    }

    #[test]
    fn a_survivor_that_has_not_come_has_joined() {
        let of =
            |name| job(vec![wait(name, &[0], &[1])], vec![rank(1, pb::Doing::Absent, "", &[])]);
        let late = text(&of(EPOCH_MEETING), Detail::Report);
        assert!(late.contains("rank 1 on host a (pid 101) has not come to this epoch"), "{late}");
        assert!(text(&of("x"), Detail::Report).contains("has not called init()"));
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_named() {
        let sleeping = pb::Doing::Sleeping;
        let waits = vec![wait("a", &[0], &[1]), wait("b", &[1], &[0])];
        let ranks = vec![rank(0, sleeping, "a", &["x.py:1 in f"]), rank(1, sleeping, "b", &[])];
        let text = text(&job(waits, ranks), Detail::Report);
        let line = "they wait for each other under different names: rank 0 for 'a', rank 1 for 'b'";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("rank 0 is at 'a'; rank 1 at 'b'"), "{text}");
    }

    #[test]
    fn ranks_that_left_a_process_set_are_named() {
        let removal = wait("remove-process-set.#1", &[1, 2], &[0]);
        let line = "ranks 1-2 left a process set (remove_process_set, destroy_process_group or the \
                    end of the program), but 'a' of rank 0 still waits there";
        for waits in [[wait("a", &[0], &[1]), removal.clone()], [removal, wait("a", &[0], &[2])]] {
            let text = text(&job(waits.to_vec(), vec![]), Detail::Report);
            assert!(text.contains(line) && !text.contains("different names"), "{text}");
        }
    }

    #[test]
    fn equal_stacks_are_written_once() {
        let frames = ["x.py:1 in f"];
        let ranks = [1, 3].map(|it| rank(it, pb::Doing::Stopped, "a", &frames)).to_vec();
        let text = text(&job(vec![wait("b", &[0, 2], &[1, 3])], ranks), Detail::Report);
        assert!(text.contains("for rank 1 on host a, rank 3 on host b"), "{text}");
        assert!(text.contains("in the same place as rank 1"), "{text}");
        assert_eq!(text.matches("x.py:1 in f").count(), 1, "{text}");
        assert!(text.contains("is stopped, by a signal or a debugger"), "{text}");
    }

    #[test]
    fn a_deep_stack_shows_the_programs_own_line() {
        let mut frames = vec!["/x/site-packages/torch/nn.py:1 in call"; 9];
        frames.push("train.py:5 in main");
        let ranks = vec![rank(1, pb::Doing::Running, "a", &frames)];
        let text = text(&job(vec![wait("b", &[0], &[1])], ranks), Detail::Report);
        assert!(text.contains("… train.py:5 in main"), "{text}");
    }

    #[test]
    fn all_ranks_of_a_job_at_a_standstill_are_shown() {
        let sleeping = pb::Doing::Stopped;
        let ranks: Vec<_> = (0..4)
            .map(|it| {
                rank(it, sleeping, "a", if it == 1 { &["x.py:1 in f"] } else { &["y.py:2 in g"] })
            })
            .map(|rank| pb::RankState { paused: "evaluation".into(), paused_ms: 12_000, ..rank })
            .collect();
        let text = text(&job(Vec::new(), ranks), Detail::Standstill);
        assert!(
            text.starts_with("paused: evaluation since 12.0 s (ranks 0-3)\nrank 1 on"),
            "{text}"
        );
        assert!(text.contains("ranks 0,2-3 are in the same place; rank 0 is stopped"), "{text}");
        assert_eq!((text.matches("y.py:2 in g").count(), text.matches("x.py:1").count()), (1, 1));
    }

    #[test]
    fn hosts_without_an_answer_are_named() {
        let explained =
            pb::Explanation { silent_hosts: vec!["b".into()], ..job(Vec::new(), Vec::new()) };
        let all = text(&explained, Detail::All);
        assert_eq!(all, "no operation has waited for a rank for long\nhost b did not answer\n");
    }
}
