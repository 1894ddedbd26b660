//! How a rank introduces itself to the others, as elements of a reduction.

use gradwire_worker::formation::{Answer, Hello, KnownSet, VoteId};

/// The words of an introduction.
pub(super) const WORDS: usize = 32;

/// Writes an introduction: the number of bytes, and the bytes.
pub(super) fn write_hello(hello: &Hello, words: &mut [u64]) {
    let vote = |vote: &VoteId| (vote.epoch, vote.number);
    let answer = hello.answer.as_ref().map(|one| (vote(&one.vote), one.since, one.yes));
    let sets: Vec<_> = hello.sets.iter().map(|set| (set.epoch, set.id, &set.workers)).collect();
    let last = (hello.last, hello.formed, hello.lacks_state);
    let all = (hello.worker, last, hello.asked.as_ref().map(vote), answer, sets);
    let bytes = serde_json::to_vec(&all).expect("plain data");
    assert!(bytes.len() <= (WORDS - 1) * 8, "{} bytes", bytes.len());
    words[0] = bytes.len() as u64;
    for (word, bytes) in words[1..].iter_mut().zip(bytes.chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(whole);
    }
}

/// Reads an introduction.
pub(super) fn read_hello(words: &[u64]) -> Hello {
    type Vote = (u64, u64);
    type Told = (u32, (u64, u64, bool), Option<Vote>, Option<(Vote, u64, bool)>, Vec<Set>);
    type Set = (u64, u32, Vec<u32>);
    let bytes: Vec<u8> = words[1..].iter().flat_map(|word| word.to_le_bytes()).collect();
    let told = serde_json::from_slice(&bytes[..words[0] as usize]).expect("what was written");
    let (worker, (last, formed, lacks_state), asked, answer, sets): Told = told;
    let vote = |(epoch, number)| VoteId { epoch, number };
    Hello {
        worker,
        last,
        formed,
        lacks_state,
        asked: asked.map(vote),
        answer: answer.map(|(one, since, yes)| Answer { vote: vote(one), since, yes }),
        sets: sets
            .into_iter()
            .map(|(epoch, id, workers)| KnownSet { epoch, id, workers })
            .collect(),
    }
}
