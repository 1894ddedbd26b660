//! The random parts of a random job.

use gradwire_collectives::Algorithm;
use gradwire_proto::{Collective, DType, Part, Rank, ReduceOp, Request, Shape};

use crate::{
    calls::{self, Call, Form, has_groups, is_rooted, reduces},
    cluster::Plan,
};
use gradwire_reference::{Dice, Values};

const MAX_RANKS: u32 = 8;
const SMALLEST_PIECE: u64 = 64 << 10;

pub(super) fn plan(dice: &mut Dice) -> Plan {
    let nodes = 1 + dice.below(4) as usize;
    let mut slots = vec![1; nodes];
    for _ in 0..dice.below(u64::from(MAX_RANKS) - nodes as u64 + 1) {
        slots[dice.below(nodes as u64) as usize] += 1;
    }
    if dice.one_in(4) {
        // Servers have no ranks.
        slots.extend(vec![0; 1 + dice.below(2) as usize]);
    }
    let others = ["auto", "servers", "ring(way=around)", "circulant(radix=3)", "k-nomial(radix=3)"];
    let mut algorithms: Vec<&str> = Algorithm::ALL.iter().map(|known| known.name()).collect();
    algorithms.extend(others);
    let algorithm = if dice.one_in(4) { "auto" } else { dice.pick(&algorithms) };
    let piece = dice.pick(&[SMALLEST_PIECE, SMALLEST_PIECE + 8, 100_000, 256 << 10, 4 << 20]);
    let chunk = dice.pick(&[4 << 10, 64 << 10, 256 << 10]).min(piece);
    let plan = Plan::nodes(&slots)
        .set(format!("negotiation.algorithm={algorithm}"))
        .set(format!("negotiation.piece_bytes={piece}"))
        .set(format!("negotiation.credit_pieces={}", 1 + dice.below(8)))
        .set(format!("data.lanes={}", 1 + dice.below(3)))
        .set(format!("data.chunk_bytes={chunk}"));
    let labels = dice.pick(&[["a", "b", ""], ["p/a", "p/b", "q/a"]]);
    let racks: Vec<&str> = slots.iter().map(|_| dice.pick(&labels)).collect();
    if racks.iter().all(|rack| !rack.is_empty()) || algorithm == "hierarchical" {
        return plan.racks(&racks);
    }
    plan
}

/// Some of the ranks, at least one.
pub(super) fn members(dice: &mut Dice, size: u32) -> Vec<u32> {
    let least = dice.below(size.into()) as u32;
    (0..size).filter(|rank| *rank == least || dice.one_in(2)).collect()
}

/// A number of elements: none, one, an odd number, about a piece, or several pieces.
fn count(dice: &mut Dice, dtype: DType, most_bytes: u64) -> u64 {
    let (size, most) = (dtype.size() as u64, most_bytes / dtype.size() as u64);
    let count = match dice.below(10) {
        0 => 0,
        1 | 2 => 1,
        3..=6 => 2 * dice.below(1000) + 3,
        7 => SMALLEST_PIECE / size + dice.below(3) - 1,
        _ => dice.below(most),
    };
    count.min(most)
}

/// The dimensions after the first one.
fn inner(dice: &mut Dice) -> Vec<u64> {
    dice.pick(&[&[][..], &[], &[], &[1], &[3], &[2, 2], &[0], &[5, 1, 2]]).to_vec()
}

fn shape(rows: u64, inner: &[u64]) -> Shape {
    let dims: Vec<u64> = std::iter::once(rows).chain(inner.iter().copied()).collect();
    Shape::new(&dims).expect("a shape")
}

/// A split of rows: a number for each member, with a sum of at most all rows.
fn splits(dice: &mut Dice, rows: u64, ranks: usize) -> Vec<u64> {
    let mut left = rows;
    let mut splits: Vec<u64> = (0..ranks)
        .map(|_| {
            let some = if dice.one_in(4) { 0 } else { dice.below(left + 1) };
            left -= some;
            some
        })
        .collect();
    if dice.one_in(2) {
        splits[ranks - 1] += left;
    }
    dice.shuffle(&mut splits);
    splits
}

/// A random call, number `index`, of some of the ranks in `set`.
pub(super) fn call(
    dice: &mut Dice,
    among: &[Collective],
    index: usize,
    set: &[u32],
    most_bytes: u64,
) -> Call {
    let mut collective = dice.pick(among);
    if collective == Collective::SendReceive && set.len() < 2 {
        collective = Collective::Allreduce;
    }
    let mut ranks = set.to_vec();
    if collective == Collective::SendReceive {
        dice.shuffle(&mut ranks);
        ranks.truncate(2);
        ranks.sort_unstable();
    }
    let group = has_groups(collective) && dice.one_in(3);
    let parts = if group { 2 + dice.below(4) as usize } else { 1 };
    // Half of the groups have only one type.
    let kinds: Vec<DType> = match dice.pick(DType::ALL) {
        one if dice.one_in(2) => vec![one; parts],
        _ => (0..parts).map(|_| dice.pick(DType::ALL)).collect(),
    };
    let op = match reduces(collective) {
        true => op(dice, &kinds),
        false => ReduceOp::Sum,
    };
    let root = dice.pick(&ranks);
    let requests = requests(dice, collective, &ranks, root, &kinds, most_bytes / parts as u64);
    let (prescale, postscale) = factors(dice, collective, op, &kinds);
    let finish = |request: Request| Request { reduce_op: op, prescale, postscale, ..request };
    let unnamed = dice.one_in(4) || collective == Collective::SendReceive;
    Call {
        name: (!unnamed).then(|| format!("call.{index}")),
        priority: dice.below(7) as i32 - 3,
        ranks,
        requests: requests.into_iter().map(finish).collect(),
        tag: dice.below(3) as u32,
        form: Form::Handle,
        apart: dice.one_in(2),
        values: dice.pick(&[Values::Exact, Values::Usual, Values::Usual, Values::Wild]),
        seed: 0,
    }
}

/// A reduction that all of these types support.
fn op(dice: &mut Dice, kinds: &[DType]) -> ReduceOp {
    let has = |op: &ReduceOp| kinds.iter().all(|dtype| op.refuses(*dtype).is_none());
    let ops: Vec<ReduceOp> = ReduceOp::ALL.iter().copied().filter(has).collect();
    dice.pick(&ops)
}

fn factors(dice: &mut Dice, of: Collective, op: ReduceOp, kinds: &[DType]) -> (f64, f64) {
    let scales = kinds.iter().all(|dtype| op.refuses_factors(*dtype).is_none());
    if !scales || !reduces(of) || dice.one_in(2) {
        return (1.0, 1.0);
    }
    // The factors of a product accumulate, and exceed the range of a small float.
    let one = op == ReduceOp::Product;
    let prescale = if one { 1.0 } else { dice.pick(&[1.0, 0.5, -2.0, 1.0 / 3.0]) };
    (prescale, dice.pick(&[1.0, 1.0 / 3.0, -1.5]))
}

/// The requests of each of the ranks.
fn requests(
    dice: &mut Dice,
    collective: Collective,
    ranks: &[u32],
    root: u32,
    kinds: &[DType],
    most_bytes: u64,
) -> Vec<Request> {
    let n = ranks.len();
    let dtype = kinds[0];
    let inner: Vec<Vec<u64>> = kinds.iter().map(|_| inner(dice)).collect();
    let row = inner[0].iter().product::<u64>().max(1);
    let rows = count(dice, dtype, most_bytes) / row;
    let empty = Shape::new(&[0]).expect("a shape");
    match collective {
        Collective::Barrier => vec![Request::barrier(); n],
        Collective::Allreduce | Collective::Reduce | Collective::Broadcast
            if kinds.len() == 1 && dice.one_in(8) =>
        {
            vec![calls::request(collective, dtype, &[], root); n]
        }
        Collective::Allgather | Collective::Gather => {
            let (even, scalars) = (dice.one_in(3), dice.one_in(8));
            let request = |dice: &mut Dice| {
                let shape = |dice: &mut Dice, part: usize| {
                    let some = (2 * rows / (n as u64 * kinds.len() as u64)).max(1) + 1;
                    match () {
                        () if scalars => Shape::default(),
                        () if even => shape(some, &inner[part]),
                        () if dice.one_in(4) => shape(0, &inner[part]),
                        () => shape(dice.below(some), &inner[part]),
                    }
                };
                let mut all: Vec<Shape> = (0..kinds.len()).map(|part| shape(dice, part)).collect();
                of_shapes(collective, root, kinds, &mut all)
            };
            (0..n).map(|_| request(dice)).collect()
        }
        Collective::Scatter => {
            let rows = if dice.one_in(2) { rows / n as u64 * n as u64 } else { rows };
            let even = rows.is_multiple_of(n as u64) && dice.one_in(2);
            let list = if even { Vec::new() } else { splits(dice, rows, n) };
            let whole = of_shapes(collective, root, kinds, &mut [shape(rows, &inner[0])]);
            let others = Request { shape: empty, ..whole.clone() };
            let request = |rank: &u32| match *rank == root {
                true => Request { list: list.clone(), ..whole.clone() },
                false => others.clone(),
            };
            ranks.iter().map(request).collect()
        }
        Collective::Alltoall => {
            let even = dice.one_in(3);
            let request = |dice: &mut Dice| {
                let most = if even { rows } else { dice.below(rows + 1) };
                let rows = if even { most / n as u64 * n as u64 } else { most };
                let list = if even { Vec::new() } else { splits(dice, rows, n) };
                let request = of_shapes(collective, root, kinds, &mut [shape(rows, &inner[0])]);
                Request { list, ..request }
            };
            (0..n).map(|_| request(dice)).collect()
        }
        Collective::SendReceive => {
            let to = ranks.iter().find(|rank| **rank != root).copied().unwrap_or(root);
            let shape = if dice.one_in(8) { Shape::default() } else { shape(rows, &inner[0]) };
            let request = of_shapes(collective, root, kinds, &mut [shape]);
            vec![Request { list: vec![to.into()], root: Rank(root), ..request }; 2]
        }
        _ => {
            let mut shapes: Vec<Shape> = inner.iter().map(|inner| shape(rows, inner)).collect();
            for part in 1..shapes.len() {
                let row = inner[part].iter().product::<u64>().max(1);
                shapes[part] = shape(count(dice, kinds[part], most_bytes) / row, &inner[part]);
            }
            vec![of_shapes(collective, root, kinds, &mut shapes); n]
        }
    }
}

fn of_shapes(of: Collective, root: u32, kinds: &[DType], shapes: &mut [Shape]) -> Request {
    let part =
        |(dtype, shape): (&DType, &mut Shape)| Part { dtype: *dtype, shape: std::mem::take(shape) };
    let mut parts = kinds.iter().zip(shapes).map(part);
    let first = parts.next().expect("at least one tensor");
    let root = Rank(if is_rooted(of) { root } else { 0 });
    let more = parts.collect();
    Request { root, more, ..Request::plain(of, first.dtype, first.shape) }
}
