//! What the ranks of this node say about their threads, when they are asked. Each is asked with a
//! number, and only answers to the newest one count.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    time::{Duration, Instant},
};

use gradwire_proto::pb;
use parking_lot::{Condvar, Mutex};

/// The most threads of a rank and frames of a thread, and the longest frame in characters (BOUND).
const MAX_THREADS: usize = 64;
const MAX_FRAMES: usize = 64;
const MAX_TEXT: usize = 256;

/// The answers of one rank's threads.
pub(crate) type Threads = Vec<pb::ThreadStack>;

#[derive(Debug, Default)]
struct State {
    number: u64,
    answers: BTreeMap<u32, Threads>,
}

/// The answers of the ranks of this node.
#[derive(Debug, Default)]
pub(crate) struct Observations {
    state: Mutex<State>,
    news: Condvar,
    /// Whether a thread waits for answers.
    is_busy: AtomicBool,
}

impl Observations {
    /// Notes that a thread waits for answers. Returns false if another one does.
    pub(crate) fn occupy(&self) -> bool {
        !self.is_busy.swap(true, SeqCst)
    }

    /// That thread is done.
    pub(crate) fn vacate(&self) {
        self.is_busy.store(false, SeqCst);
    }

    /// The ranks are asked again, with this number.
    pub(crate) fn begin(&self, number: u64) {
        *self.state.lock() = State { number, ..State::default() };
    }

    /// A rank has answered (TRUST: its texts are cut).
    pub(crate) fn answered(&self, local_rank: u32, observed: pb::Observed) {
        let mut state = self.state.lock();
        if observed.number == state.number {
            state.answers.insert(local_rank, brief(observed.threads));
            self.news.notify_all();
        }
    }

    /// Waits until these ranks have answered, at most until `deadline` (WAIT). Returns the answers.
    pub(crate) fn wait(
        &self,
        number: u64,
        ranks: &[u32],
        deadline: Instant,
    ) -> BTreeMap<u32, Threads> {
        let mut state = self.state.lock();
        let is_complete = |state: &State| {
            state.number != number || ranks.iter().all(|rank| state.answers.contains_key(rank))
        };
        while !is_complete(&state) && deadline > Instant::now() {
            self.news.wait_until(&mut state, deadline);
        }
        if state.number == number { std::mem::take(&mut state.answers) } else { BTreeMap::new() }
    }
}

/// The threads of a rank within all limits.
fn brief(mut threads: Threads) -> Threads {
    threads.truncate(MAX_THREADS);
    for thread in &mut threads {
        thread.frames.truncate(MAX_FRAMES);
        cut(&mut thread.name);
        thread.frames.iter_mut().for_each(cut);
    }
    threads
}

/// Cuts a text at its beginning, where a path is least interesting.
fn cut(text: &mut String) {
    let more = text.chars().count().saturating_sub(MAX_TEXT);
    if more > 0
        && let Some((at, _)) = text.char_indices().nth(more)
    {
        text.replace_range(..at, "…");
    }
}

/// How long the ranks may take to answer.
pub(crate) const ANSWER: Duration = Duration::from_millis(1200);

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(number: u64, frame: &str) -> pb::Observed {
        let frames = vec![frame.to_owned(); 200];
        let threads = vec![pb::ThreadStack { name: "main thread".into(), frames }; 200];
        pb::Observed { number, threads }
    }

    #[test]
    fn only_answers_to_the_newest_question_count() {
        let observations = Observations::default();
        observations.begin(1);
        observations.begin(2);
        observations.answered(0, observed(1, "old"));
        observations.answered(1, observed(2, &"x".repeat(5_000)));
        let now = Instant::now();
        let answers = observations.wait(2, &[0, 1], now + Duration::from_millis(20));
        assert_eq!(answers.keys().collect::<Vec<_>>(), [&1]);
        let threads = &answers[&1];
        assert!(threads.len() == MAX_THREADS && threads[0].frames.len() == MAX_FRAMES, "BOUND");
        assert_eq!(threads[0].frames[0].chars().count(), MAX_TEXT + 1, "BOUND");
        observations.begin(3);
        observations.answered(0, observed(3, "new"));
        assert_eq!(observations.wait(3, &[0], now + Duration::from_secs(60)).len(), 1);
    }
}
