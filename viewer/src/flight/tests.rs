use std::{
    collections::BTreeSet,
    hash::{BuildHasher as _, RandomState},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use gradwire_proto::{Collective, DType, Failure, FailureKind, Rank};
use gradwire_trace::flight::{Damaged, Flight, Image, MAX_RANKS, Outcome, Submitted, words};
use serde_json::Value;

use super::{file, merge::Job, story, torch, waits};

const S: u64 = 1_000_000_000;

/// A node with two ranks, which it numbers from twice its own number.
struct Node {
    memory: Vec<AtomicU64>,
    number: u32,
    /// How far its clock is behind the coordinator's.
    behind: u64,
}

impl Node {
    fn new(number: u32, behind: u64) -> Self {
        let memory: Vec<AtomicU64> = (0..words(2)).map(|_| AtomicU64::new(0)).collect();
        let flight = Flight::begin(&memory, 2, "job", ["a", "b"][number as usize], number);
        flight.formed(2 * number, 4, 2, 0, number);
        flight.clock(behind as i64, 1000);
        (0..2).for_each(|local| flight.attached(local, 70 + local, 1));
        flight.saved(20 * S - behind);
        Self { memory, number, behind }
    }

    fn flight(&self) -> Flight<'_> {
        Flight::of(&self.memory)
    }

    /// A submission at this time of the coordinator's clock.
    fn submits(&self, local: u32, at_ns: u64, it: Submitted<'_>) {
        self.flight().submitted(local, at_ns - self.behind, &it);
    }

    /// An operation that has ended.
    fn does(&self, local: u32, at_ns: u64, it: Submitted<'_>, sequence: u64) {
        self.submits(local, at_ns, it);
        let (flight, at_ns) = (self.flight(), at_ns - self.behind);
        flight.announced(local, it.ticket, at_ns + 1);
        flight.ordered(local, it.ticket, at_ns + 2, Some(sequence));
        flight.begun(local, it.ticket, at_ns + 3);
        flight.ended(local, it.ticket, at_ns + 4, Outcome::Done);
    }

    fn bytes(&self) -> Vec<u8> {
        self.memory.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect()
    }

    fn image(&self) -> Image {
        let image = Image::parse(&self.bytes()).unwrap();
        assert_eq!(image.node, self.number);
        image
    }
}

fn allreduce(ticket: u64, name: &str) -> Submitted<'_> {
    Submitted {
        ticket,
        name,
        site: "train.py:3 in step",
        collective: Collective::Allreduce as u8,
        dtype: DType::F32 as u8,
        reduce_op: 1,
        process_set: 0,
        root: 0,
        receiver: 0,
        bytes: 24,
        tensors: 1,
        dims: &[2, 3],
    }
}

fn merged(nodes: &[Node]) -> Job {
    Job::merge(nodes.iter().map(Node::image).collect()).unwrap()
}

/// Two nodes after one operation of all ranks. Their clocks differ by much.
fn begun() -> [Node; 2] {
    let nodes = [Node::new(0, 0), Node::new(1, 5 * S)];
    for node in &nodes {
        (0..2).for_each(|local| node.does(local, 10 * S, allreduce(1, "w.0"), 7));
    }
    nodes
}

#[test]
fn a_missing_rank_has_its_last_operation() {
    let nodes = begun();
    for (node, local) in [(0, 0), (0, 1), (1, 1)] {
        nodes[node].submits(local, 12 * S + u64::from(local), allreduce(2, "w.1"));
    }
    let failure = Failure::new(FailureKind::WorkerLost, "its process was killed\nby SIGKILL");
    let json = serde_json::to_string(&failure.rank(Rank(2)).host("b").hint("look")).unwrap();
    nodes[1].flight().failed(14 * S, &json);
    nodes[1].flight().gone(0, 14 * S);
    let job = merged(&nodes);
    let story = story::story(&job);
    assert_eq!(
        story.end,
        "Job job failed at 00:00:19.000 UTC: rank 2 on host b: its process was killed."
    );
    assert_eq!(
        story.missing,
        "Rank 2 was missing: it had not submitted 'w.1'; it had last submitted 'w.0' at \
         train.py:3 in step, 10.000 s before the end (done); its connection ended 1.000 s before \
         the end."
    );
    assert_eq!(
        story.waited,
        "Ranks 0-1,3 waited for 'w.1' (allreduce of f32 [2, 3]) at train.py:3 in step, since \
         8.000 s before the end."
    );
    let text = story::text(&job);
    assert!(text.contains("\nrank 2 on host b (pid 70) had submitted 1 operations:\n"), "{text}");
    assert!(text.contains("recorded: 2 of 2 nodes, 4 of 4 ranks"), "{text}");
}

#[test]
fn ranks_that_wait_for_each_other_are_named() {
    let nodes = begun();
    for (node, local, name) in [(0, 0, "a"), (0, 1, "a"), (1, 0, "b"), (1, 1, "a")] {
        nodes[node].submits(local, 12 * S, allreduce(2, name));
    }
    let story = story::story(&merged(&nodes));
    let expected =
        "Ranks waited for each other under different names: ranks 0-1,3 for 'a', rank 2 for 'b'.";
    assert_eq!(story.missing, expected);
    assert!(story.end.starts_with("Job job had not failed when this was recorded, at 00:00:20"));
}

#[test]
fn a_transfer_that_stands_names_its_host() {
    let nodes = begun();
    for node in &nodes {
        (0..2).for_each(|local| node.submits(local, 12 * S, allreduce(2, "w.1")));
    }
    assert_eq!(
        story::story(&merged(&nodes)).missing,
        "All ranks had submitted 'w.1', but no order for it had arrived."
    );
    let at = |node: &Node| 13 * S - node.behind;
    for node in &nodes {
        (0..2).for_each(|local| node.flight().ordered(local, 2, at(node), Some(8)));
    }
    (0..2).for_each(|local| nodes[0].flight().begun(local, 2, at(&nodes[0])));
    assert_eq!(
        story::story(&merged(&nodes)).missing,
        "All ranks had submitted 'w.1' (operation 8), but none of its bytes had moved on host b."
    );
    // Without the recording of a host, nobody is blamed.
    let job = Job::merge(vec![nodes[0].image()]).unwrap();
    assert_eq!((job.unrecorded_nodes(), job.size), (vec![1], 4));
    assert!(waits::waits(&job).iter().all(|wait| wait.missing.is_empty()));
}

#[test]
fn only_the_last_epoch_counts() {
    let nodes = begun();
    nodes[0].flight().formed(0, 2, 1, 3, 0);
    let job = merged(&nodes);
    assert_eq!((job.epoch, job.hosts.len(), job.left_out), (3, 1, vec!["b".to_owned()]));
    assert!(Job::merge(Vec::new()).is_none());
}

#[test]
fn an_operation_has_one_number_on_all_ranks() {
    let nodes = begun();
    // Ranks of one node submit in another order; rank 2 lacks the last operation.
    for (local, names) in [(0, ["x", "y"]), (1, ["y", "x"])] {
        for (ticket, name) in (2..).zip(names) {
            let sequence = if name == "x" { 8 } else { 9 };
            for node in &nodes {
                node.does(local, 11 * S, allreduce(ticket, name), sequence);
            }
        }
    }
    for (node, local) in [(0, 0), (0, 1), (1, 1)] {
        nodes[node].submits(local, 12 * S, allreduce(4, "w.1"));
    }
    let files = torch::files(&merged(&nodes));
    assert_eq!(files.len(), 4);
    assert!(files.iter().all(|(name, _)| name.starts_with(torch::PREFIX)));
    // A pickle has its texts as they are.
    let has = |file: usize, text: &str| {
        let bytes = &files[file].1;
        bytes.windows(text.len()).any(|part| part == text.as_bytes())
    };
    assert!(has(0, "scheduled") && !has(2, "scheduled") && has(2, "completed"));
}

#[test]
fn the_trace_shows_what_has_not_ended() {
    let nodes = begun();
    nodes[0].submits(0, 12 * S, allreduce(2, "w.1"));
    let lines: Vec<Value> = serde_json::from_slice(&file::text(&merged(&nodes))).unwrap();
    let at = |phase: &str, name: &str| {
        let found = lines.iter().find(|line| line["ph"] == phase && line["name"] == name);
        found.and_then(|line| line["ts"].as_f64()).unwrap()
    };
    assert_eq!(at("e", "gather w.1") - at("b", "gather w.1"), 8e6, "until the end");
    assert_eq!(lines.iter().filter(|line| line["name"] == "submit w.0").count(), 4);
}

/// Two nodes in the middle of a job: an operation waits for rank 2, another one is of a set.
fn hanging() -> [Node; 2] {
    let nodes = begun();
    for node in &nodes {
        node.flight().add_set(1, &[0, 2]);
        node.does(0, 11 * S, Submitted { process_set: 1, ..allreduce(2, "v.0") }, 8);
    }
    for (node, local) in [(0, 0), (0, 1), (1, 1)] {
        nodes[node].submits(local, 12 * S, allreduce(3, "w.1"));
    }
    nodes[1].flight().event(13 * S, 1, "it is late");
    let failure = Failure::new(FailureKind::WorkerLost, "its process was killed");
    nodes[1].flight().failed(14 * S, &serde_json::to_string(&failure).unwrap());
    nodes
}

/// Everything that `gradwire report` makes of a file beside a good one, if it is a recording.
fn report(bytes: &[u8], good: &Image) -> Result<(), Damaged> {
    let job = Job::merge(vec![Image::parse(bytes)?, good.clone()]).unwrap();
    assert!(job.size <= MAX_RANKS && job.nodes <= MAX_RANKS, "BOUND");
    let waits = waits::waits(&job);
    assert!(waits.iter().all(|it| it.missing.is_subset(&job.ranks.keys().copied().collect())));
    let most = 1 << 20;
    assert!(story::text(&job).len() < most, "BOUND");
    let trace = file::text(&job);
    assert!(trace.len() < most && serde_json::from_slice::<Value>(&trace).is_ok(), "BOUND");
    let files = torch::files(&job);
    assert!(files.len() <= 4 && files.iter().all(|(_, file)| file.len() < most), "BOUND");
    Ok(())
}

#[test]
fn any_byte_of_the_header_may_be_damaged() {
    let [one, other] = hanging();
    let (mut bytes, good) = (one.bytes(), other.image());
    report(&bytes, &good).unwrap();
    let mut refused = BTreeSet::new();
    // The numbers of the header, then the beginnings of its texts and of the table of sets.
    let starts = [0..17, 32..34, 64..66, 512..515].into_iter().flatten();
    for at in starts.flat_map(|word: usize| 8 * word..8 * word + 8) {
        let was = bytes[at];
        for now in [was ^ 0xff, was ^ 1, 0] {
            bytes[at] = now;
            if report(&bytes, &good).is_err() {
                refused.insert(at);
            }
        }
        bytes[at] = was;
    }
    // The magic, and each number that says how large something is; but any job has some nodes.
    assert!((0..8 * 6).all(|at| at == 8 * 4 || refused.contains(&at)), "{refused:?}");
    // It says that the job has the most nodes and ranks, the other file does not.
    one.flight().formed(MAX_RANKS - 2, MAX_RANKS, MAX_RANKS, 0, MAX_RANKS - 1);
    report(&one.bytes(), &good).unwrap();
}

#[test]
fn random_damage_of_a_recording_ends_nothing() {
    let seed = std::env::var("GWTEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let mut state: u64 = seed.unwrap_or_else(|| RandomState::new().hash_one(0));
    println!("GWTEST_SEED={state}");
    // SplitMix64.
    let mut dice = |below: usize| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % below as u64) as usize
    };
    let [one, other] = hanging();
    let (whole, good) = (one.bytes(), other.image());
    // Where something is written: the header, the first events, and the first slots of a rank.
    let first = 8 * words(0);
    let written = [0..5000, 8 * 4096..8 * 4096 + 2000, first..first + 4000];
    for _ in 0..300 {
        let mut bytes = whole.clone();
        for _ in 0..=dice(8) {
            let place = written[dice(3)].clone();
            bytes[place.start + dice(place.len())] = dice(256) as u8;
        }
        match dice(4) {
            0 => bytes.truncate(dice(whole.len())),
            // A part of another file.
            1 => {
                let (from, to) = (dice(whole.len() - 5000), dice(whole.len() - 5000));
                bytes.copy_within(from..from + 5000, to);
            }
            2 => (0..4000).for_each(|it| bytes[first + 512 + it] = dice(256) as u8),
            _ => {}
        }
        // Most of them are refused.
        let _ = report(&bytes, &good);
    }
}
