//! Inputs that are sent directly, without a copy in the buffer.

use gradwire_collectives::execution::Work;

use super::{super::running::Running, *};

/// A local reduction that no receiving step does in its own pass.
const EAGER: Work = Work::Reduce { lazily: false };

/// Elements: each of the two nodes owns one half of them.
const COUNT: u64 = 1024;

/// How many bytes of local reduction a piece has left when it starts, on node 0 of two with the
/// direct algorithm.
fn left(jobs: &[&Job], change: impl Fn(Piece) -> Piece) -> u64 {
    let topology = Topology::flat(2);
    let piece = change(piece(0, jobs, 0, 2, Algorithm::Direct, &topology));
    let Running { piece, progress, .. } = Running::new(piece, Vec::new());
    let waiting = (0..).zip(&piece.plan.steps).filter(|(_, step)| step.work == EAGER);
    waiting.map(|(index, step)| step.bytes - progress.done(index)).sum()
}

#[test]
fn only_unchanged_inputs_of_one_rank_skip_a_copy() {
    let alone = Job::new("t", 2, 1, COUNT, SUM);
    let together = Job::new("t", 2, 2, COUNT, SUM);
    let same = |piece: Piece| piece;
    let copied = COUNT * 4 / 2;
    assert_eq!(left(&[&alone], same), 0);
    assert_eq!(left(&[&together], same), copied, "there are two inputs to add");
    assert_eq!(left(&[&alone], |piece| Piece { prescale: 0.5, ..piece }), copied);
    let truth = Combine { dtype: DType::Bool, op: ReduceOp::Sum };
    assert_eq!(left(&[&alone], |piece| Piece { combine: truth, ..piece }), copied);
    let short = Combine { dtype: DType::Bf16, op: ReduceOp::Sum };
    let travels_as = |form| {
        let wire = Wire::Partial(form);
        left(&[&alone], move |piece| Piece { combine: short, wire, ..piece })
    };
    assert_eq!(travels_as(Form::Bf16), 0, "it travels in its own type");
    assert_eq!(travels_as(Form::F32), copied);
    // Node 0 sends the second half. With the short tensor last, it spans two tensors.
    let (long, short) = (Job::new("a", 2, 1, 624, SUM), Job::new("b", 2, 1, 400, SUM));
    assert_eq!(left(&[&short, &long], same), 0);
    assert_eq!(left(&[&long, &short], same), copied);
    // A result that this node publishes is computed in the buffer.
    let way = Way { source: Some(0), target: None };
    assert_eq!(left(&[&Job::new("t", 2, 1, COUNT, way)], same), COUNT * 4);
    // A result only for another node is not.
    let way = Way { source: Some(0), target: Some(3) };
    assert_eq!(left(&[&Job::new("t", 2, 2, COUNT, way)], same), 0);
}

/// SAME: if a rank changes its input meanwhile, the result is wrong, but the same on all ranks.
#[test]
fn changing_inputs_give_all_ranks_the_same_bits() {
    for turn in 0..8 {
        let cluster = Cluster::new(3, 1, 4096, Duration::from_secs(10));
        cluster.connect(1, Some(32 << 10));
        let topology = Topology::flat(3);
        // Results go to separate memory.
        let jobs: Vec<Job> = (0..2).map(|_| Job::new("t", 3, 1, 100_000, SUM)).collect();
        for node in 0..3 {
            let algorithm = if turn % 2 == 0 { Algorithm::Ring } else { Algorithm::Direct };
            let mut piece = piece(0, &[&jobs[0]], node, 3, algorithm, &topology);
            let part = |local: &LocalTensor| LocalTensor {
                local_rank: 0,
                ticket: 0,
                request: local.request.clone(),
                priority: 0,
                inputs: local.inputs.clone(),
                outputs: vec![jobs[1].buffers[node as usize][0].span()],
                allocated: OnceLock::new(),
                site: Arc::default(),
            };
            let parts = jobs[0].tensors[node as usize].locals().iter().map(part).collect();
            let key = jobs[0].tensors[node as usize].key.clone();
            let tensor = Arc::new(QueuedTensor::new(key, parts, Rank(node)));
            piece.segments[0].tensor = tensor.clone();
            piece.tensors = vec![(tensor, 100_000)];
            cluster.lanes[node as usize][0].send(Order::Start(piece));
        }
        for value in 0..10 {
            jobs[0].buffers.iter().flatten().for_each(|b| b.write(&vec![value as f32; 100_000]));
        }
        for node in 0..3 {
            let event = cluster.wait_for(node);
            assert!(matches!(event, Event::Finished), "{event:?}");
        }
        cluster.stop();
        let results: Vec<Vec<f32>> = jobs[1].buffers.iter().flatten().map(Buffer::read).collect();
        assert!(results[0] == results[1] && results[1] == results[2], "turn {turn}");
    }
}
