//! `negotiation.strict`: the results have the same bits in every run. Whatever the algorithm, the
//! size of the pieces and the order of submission, they are those of the canonical order of
//! additions, computed here sequentially (SAME).

use gradwire_reference::Dice;
use gradwire_tests::cluster::{Plan, run_job};
use gradwire_worker::{
    AllreduceOptions, Element, JoinOptions, ReduceOp, ReduceOptions, ReduceScatterOptions, Session,
    half::{bf16, f16},
};

const TENSORS: usize = 10;
const MOST: usize = 90_000;

/// Values of very different sizes, so that every order of additions has a different result.
fn contribution(tensor: usize, rank: u32, len: usize) -> Vec<f32> {
    let mut dice = Dice::of(&[tensor as u64, rank.into()]);
    let value = |dice: &mut Dice| {
        let fraction = dice.below(1 << 20) as f32 / (1 << 20) as f32 - 0.5;
        fraction * 2f32.powi(dice.below(24) as i32)
    };
    (0..len).map(|_| value(&mut dice)).collect()
}

fn len(tensor: usize) -> usize {
    // A few elements, up to many of the smallest pieces.
    [1, 3, 700, 20_000, MOST][tensor % 5] + tensor
}

/// Sums in the order of ranks on each node, and then of the nodes: in pairs until a power of two is
/// left, and along a tree of aligned groups.
fn canonical_sum(nodes: &[Vec<u32>], of: impl Fn(u32) -> f32) -> f32 {
    let node = |ranks: &Vec<u32>| ranks.iter().map(|rank| of(*rank)).reduce(|a, b| a + b).unwrap();
    let sums: Vec<f32> = nodes.iter().map(node).collect();
    let (pairs, single) = sums.split_at(2 * (sums.len() - (1 << sums.len().ilog2())));
    let mut sums: Vec<f32> = pairs.chunks(2).map(|pair| pair[0] + pair[1]).collect();
    sums.extend(single);
    while sums.len() > 1 {
        sums = sums.chunks(2).map(|pair| pair[0] + pair[1]).collect();
    }
    sums[0]
}

/// All results of a rank, as bits.
fn results(session: &Session, seed: u64) -> Vec<Vec<u32>> {
    let (rank, size) = (session.rank(), session.size());
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
    // Each rank submits in its own order.
    let mut order: Vec<usize> = (0..TENSORS).collect();
    let mut dice = Dice::of(&[seed, rank.into()]);
    for at in (1..TENSORS).rev() {
        order.swap(at, dice.below(at as u64 + 1) as usize);
    }
    let mut started: Vec<_> = order
        .into_iter()
        .map(|tensor| {
            let op = if tensor.is_multiple_of(2) { ReduceOp::Sum } else { ReduceOp::Average };
            let values = contribution(tensor, rank, len(tensor));
            let values = session.tensor(&values, &[values.len()]).unwrap();
            let options = AllreduceOptions::named(format!("t{tensor}")).op(op);
            (tensor, session.allreduce_async(values, options).unwrap())
        })
        .collect();
    started.sort_by_key(|(tensor, _)| *tensor);
    let mut results: Vec<Vec<u32>> =
        started.into_iter().map(|(_, handle)| bits(handle.wait().unwrap().as_slice())).collect();
    for root in 0..size {
        let values = contribution(3, rank, len(3));
        let mut values = session.tensor(&values, &[values.len()]).unwrap();
        session.reduce(&mut values, ReduceOptions::to_rank(root).op(ReduceOp::Sum)).unwrap();
        if root == rank {
            results.push(bits(values.as_slice()));
        }
    }
    let rows = contribution(4, rank, 1_000 * size as usize);
    let rows = session.tensor(&rows, &[size as usize, 1_000]).unwrap();
    let options = ReduceScatterOptions::default().op(ReduceOp::Sum);
    results.push(bits(session.reducescatter(&rows, options).unwrap().as_slice()));
    results
}

/// The expected [`results`] of each rank.
fn expected(nodes: &[Vec<u32>]) -> Vec<Vec<Vec<u32>>> {
    let size: u32 = nodes.iter().map(|ranks| ranks.len() as u32).sum();
    let sums = |tensor: usize, len: usize| -> Vec<f32> {
        let all: Vec<Vec<f32>> = (0..size).map(|rank| contribution(tensor, rank, len)).collect();
        (0..len).map(|at| canonical_sum(nodes, |rank| all[rank as usize][at])).collect()
    };
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
    let mut same: Vec<Vec<u32>> = (0..TENSORS)
        .map(|tensor| {
            let by = if tensor.is_multiple_of(2) { 1.0 } else { size as f32 };
            sums(tensor, len(tensor)).into_iter().map(|sum| (sum / by).to_bits()).collect()
        })
        .collect();
    same.push(bits(&sums(3, len(3))));
    let rows = sums(4, 1_000 * size as usize);
    rows.chunks(1_000).map(|row| [same.clone(), vec![bits(row)]].concat()).collect()
}

#[test]
fn results_do_not_depend_on_the_algorithm() {
    let seed = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    println!("seed {seed}");
    // Nodes with their ranks, in the order of addition: racks together.
    let in_racks = (["a", "b", "a", "b", "b"], [0, 2, 1, 3, 4]);
    let layouts: [(&[u32], _); 5] = [
        (&[2, 1], None),
        (&[1, 2, 1], None),
        (&[1, 1, 1, 1], None),
        (&[1, 1, 1, 2, 1], None),
        (&[1, 1, 1, 2, 1], Some(in_racks)),
    ];
    for (slots, racks) in layouts {
        let mut next = 0;
        let ranks: Vec<Vec<u32>> = slots
            .iter()
            .map(|&slots| {
                next += slots;
                (next - slots..next).collect()
            })
            .collect();
        let order = racks.map_or((0..slots.len()).collect(), |(_, order)| order.to_vec());
        let nodes: Vec<Vec<u32>> = order.iter().map(|&node: &usize| ranks[node].clone()).collect();
        let right = expected(&nodes);
        for (algorithm, piece_bytes) in [
            ("auto", "4MiB"),
            ("auto", "64KiB"),
            ("recursive-doubling", "96KiB"),
            ("halving-doubling", "64KiB"),
            ("rabenseifner", "128KiB"),
            ("0-8K=auto; 8K-=ring,halving-doubling", "64KiB"),
        ] {
            let mut plan = Plan::nodes(slots)
                .set("negotiation.strict=true")
                .set(format!("negotiation.algorithm={algorithm}"))
                .set(format!("negotiation.piece_bytes={piece_bytes}"))
                .set("data.chunk_bytes=8KiB");
            if let Some((racks, _)) = racks {
                plan = plan.racks(&racks);
            }
            let got = run_job(&plan, move |session| results(session, seed));
            assert_eq!(got.len(), right.len());
            for (rank, (got, right)) in got.iter().zip(&right).enumerate() {
                assert_eq!(got.len(), right.len());
                let wrong = got.iter().zip(right).position(|(got, right)| got != right);
                assert_eq!(wrong, None, "rank {rank} on {slots:?}, {algorithm}, {piece_bytes}");
            }
        }
    }
}

/// Without `strict` the orders differ, so the test above can fail.
#[test]
fn other_algorithms_have_different_bits() {
    let plan = Plan::nodes(&[1, 1, 1, 1]).set("negotiation.algorithm=ring");
    let nodes: Vec<Vec<u32>> = (0..4).map(|rank| vec![rank]).collect();
    let got = run_job(&plan, |session| results(session, 1));
    assert_ne!(got, expected(&nodes));
}

fn allreduced<T: Element>(session: &Session, values: &[T], options: AllreduceOptions) -> Vec<T> {
    let mut tensor = session.tensor(values, &[values.len()]).unwrap();
    session.allreduce(&mut tensor, options.op(ReduceOp::Sum)).unwrap();
    tensor.as_slice().to_vec()
}

/// Sums in a process set, of 16-bit floats, scaled, and without joined ranks; as bits.
fn special_results(session: &Session) -> Vec<Vec<u32>> {
    let rank = session.rank();
    let set = session.add_process_set(&[0, 2, 3, 5]).unwrap();
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let mut results = Vec::new();
    for tensor in 0..5 {
        let values = contribution(tensor, rank, len(tensor));
        let named = |what: &str| AllreduceOptions::named(format!("{what}.{tensor}"));
        if set.includes(rank) {
            results.push(bits(allreduced(session, &values, named("set").process_set(&set))));
        }
        let short: Vec<f16> = values.iter().map(|value| f16::from_f32(*value / 4096.0)).collect();
        let sums = allreduced(session, &short, named("f16"));
        results.push(sums.into_iter().map(|sum| sum.to_bits().into()).collect());
        let short: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
        let sums = allreduced(session, &short, named("bf16"));
        results.push(sums.into_iter().map(|sum| sum.to_bits().into()).collect());
        let scaled = named("scaled").prescale(0.3).postscale(7.1);
        results.push(bits(allreduced(session, &values, scaled)));
    }
    // Ranks 1 and 4 run out of data; rank 4 is a node by itself.
    if ![1, 4].contains(&rank) {
        for tensor in 5..8 {
            let values = contribution(tensor, rank, len(tensor));
            let named = AllreduceOptions::named(format!("joined.{tensor}"));
            results.push(bits(allreduced(session, &values, named)));
        }
    }
    session.join(JoinOptions::default()).unwrap();
    results
}

#[test]
fn special_results_have_the_same_bits() {
    let mut first: Option<Vec<Vec<Vec<u32>>>> = None;
    for (algorithm, piece_bytes) in [
        ("auto", "4MiB"),
        ("recursive-doubling", "96KiB"),
        ("halving-doubling", "64KiB"),
        ("rabenseifner", "128KiB"),
    ] {
        let plan = Plan::nodes(&[1, 1, 2, 1, 1])
            .set("negotiation.strict=true")
            .set(format!("negotiation.algorithm={algorithm}"))
            .set(format!("negotiation.piece_bytes={piece_bytes}"))
            .set("data.chunk_bytes=8KiB");
        let got = run_job(&plan, special_results);
        let first = first.get_or_insert_with(|| got.clone());
        for (rank, (got, first)) in got.iter().zip(first).enumerate() {
            let wrong = got.iter().zip(first.iter()).position(|(got, first)| got != first);
            assert_eq!(wrong, None, "rank {rank}, {algorithm}, pieces of {piece_bytes}");
        }
    }
}
