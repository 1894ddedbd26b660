//! Random requests, and the right results of their collectives, computed directly from the inputs.

use gradwire_kernels::{Combine, Finish, Store};
use gradwire_proto::{Collective, DType, Part, Rank, ReduceOp, Request, Shape};
use gradwire_shm::{
    control::Place,
    segment::{HugePages, Segment},
};

use crate::model::memory::{self, Span, WorkerMemory};

/// The bytes of one rank, in a segment of its own.
pub(super) struct Bytes {
    memory: WorkerMemory,
    bytes: u64,
}

impl Bytes {
    pub(super) fn new(content: &[u8]) -> Self {
        let bytes = content.len() as u64;
        let (segment, _fd) = Segment::create("test", bytes.max(4096), HugePages::Never).unwrap();
        let memory = WorkerMemory::default();
        memory.add(0, segment);
        let new = Self { memory, bytes };
        let finish = Finish::none(DType::U8);
        let store = Store::Cached;
        memory::publish(&finish, content, &[(&new.span(), 0)], store);
        new
    }

    pub(super) fn span(&self) -> Span {
        self.memory.resolve(Place { segment: 0, offset: 0 }, self.bytes, 1).unwrap()
    }

    fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes as usize];
        let combine = Combine { dtype: DType::U8, op: ReduceOp::Sum };
        memory::reduce(combine, 1.0, &mut bytes, &[(&self.span(), 0)], None);
        bytes
    }
}

/// Element `i` of a rank's tensor: small, so that sums are exact in every type.
pub(super) fn value(rank: Rank, part: usize, i: u64) -> u64 {
    (i * 7 + u64::from(rank.0) * 3 + part as u64) % 16
}

pub(super) fn encode(dtype: DType, number: f64) -> Vec<u8> {
    match dtype {
        DType::F32 => (number as f32).to_le_bytes().to_vec(),
        DType::I64 => (number as i64).to_le_bytes().to_vec(),
        _ => vec![number as u8],
    }
}

/// One rank's part in the collective.
pub(super) struct Taker {
    pub(super) rank: Rank,
    pub(super) request: Request,
    pub(super) inputs: Vec<Bytes>,
    pub(super) outputs: Vec<Bytes>,
}

/// One collective of random ranks.
pub(super) struct Case {
    pub(super) collective: Collective,
    pub(super) op: ReduceOp,
    pub(super) takers: Vec<Taker>,
}

impl Case {
    fn input(&self, from: usize, part: usize) -> Vec<f64> {
        let taker = &self.takers[from];
        let elements = taker.request.shape_of(part).elements();
        (0..elements).map(|i| value(taker.rank, part, i) as f64).collect()
    }

    fn reduced(&self, part: usize) -> Vec<f64> {
        let all: Vec<Vec<f64>> = (0..self.takers.len()).map(|t| self.input(t, part)).collect();
        let fold = |i: usize| {
            let column = all.iter().map(|input| input[i]);
            match self.op {
                ReduceOp::Max => column.fold(0.0, f64::max),
                ReduceOp::Average => f64::from(column.sum::<f64>() as f32 / all.len() as f32),
                _ => column.sum(),
            }
        };
        (0..all[0].len()).map(fold).collect()
    }

    /// The split of an input's rows.
    fn split(&self, from: usize) -> Vec<usize> {
        let request = &self.takers[from].request;
        let n = self.takers.len();
        if request.list.is_empty() {
            return vec![request.shape.rows() as usize / n; n];
        }
        request.list.iter().map(|&rows| rows as usize).collect()
    }

    fn block(&self, from: usize, to: usize) -> Vec<f64> {
        let row = self.takers[from].request.shape.row_elements() as usize;
        let split = self.split(from);
        let start: usize = split[..to].iter().sum();
        self.input(from, 0)[start * row..(start + split[to]) * row].to_vec()
    }

    /// The right result of a rank.
    fn expected(&self, to: usize, part: usize) -> Vec<f64> {
        let n = self.takers.len();
        let root = self.takers[0].request.root;
        let is_root = self.takers[to].rank == root;
        let root = self.takers.iter().position(|taker| taker.rank == root).unwrap_or_default();
        let concatenated = || (0..n).flat_map(|from| self.input(from, part)).collect();
        match self.collective {
            Collective::Allreduce => self.reduced(part),
            Collective::Reduce if is_root => self.reduced(part),
            Collective::Broadcast => self.input(root, part),
            Collective::Allgather => concatenated(),
            Collective::Gather if is_root => concatenated(),
            Collective::Scatter => self.block(root, to),
            Collective::ReduceScatter => {
                let shape = self.takers[to].request.shape_of(part);
                let (rows, row) = (shape.rows() as usize, shape.row_elements() as usize);
                let share = |at: usize| rows / n + usize::from(at < rows % n);
                let start: usize = (0..to).map(share).sum();
                self.reduced(part)[start * row..(start + share(to)) * row].to_vec()
            }
            Collective::Alltoall => (0..n).flat_map(|from| self.block(from, to)).collect(),
            Collective::SendReceive
                if self.takers[0].request.list[0] == u64::from(self.takers[to].rank.0) =>
            {
                self.input(root, part)
            }
            _ => Vec::new(),
        }
    }

    pub(super) fn check(&self) {
        for (to, taker) in self.takers.iter().enumerate() {
            for (part, output) in taker.outputs.iter().enumerate() {
                let dtype = taker.request.dtype_of(part);
                let expected: Vec<u8> =
                    self.expected(to, part).into_iter().flat_map(|n| encode(dtype, n)).collect();
                let is = output.read();
                let wrong = is.iter().zip(&expected).position(|(is, expected)| is != expected);
                assert!(
                    is.len() >= expected.len() && wrong.is_none(),
                    "{} rank {} part {part} of {} bytes: the first that is wrong is {wrong:?}",
                    self.collective,
                    taker.rank,
                    expected.len(),
                );
            }
        }
    }
}

pub(super) const KINDS: [Collective; 10] = [
    Collective::Allreduce,
    Collective::Reduce,
    Collective::Broadcast,
    Collective::Allgather,
    Collective::Gather,
    Collective::Scatter,
    Collective::ReduceScatter,
    Collective::Alltoall,
    Collective::SendReceive,
    Collective::Barrier,
];

fn dtype(at: u8) -> DType {
    [DType::F32, DType::I64, DType::U8][at as usize % 3]
}

/// The requests of `takers`: equal where they must be, and otherwise chosen by `dice`.
pub(super) fn requests(
    collective: Collective,
    op: ReduceOp,
    takers: &[Rank],
    dice: &[u8],
) -> Vec<Request> {
    let n = takers.len();
    let die = |at: usize| u64::from(dice[at % dice.len()]);
    let root = takers[die(1) as usize % n];
    let grouped = matches!(
        collective,
        Collective::Allreduce | Collective::Allgather | Collective::ReduceScatter
    );
    let more = if grouped { die(2) as usize % 3 } else { 0 };
    let typed = |at: u8| if op == ReduceOp::Average { DType::F32 } else { dtype(at) };
    let request = |at: usize| {
        let rows = |part: usize| match collective {
            Collective::Allgather | Collective::Gather => die(3 + at + part) % 50,
            Collective::Barrier => 0,
            _ => die(4 + part) % 60,
        };
        let shape = |part: usize| match collective {
            Collective::Barrier => Shape::new(&[0]).unwrap(),
            _ => Shape::new(&[rows(part), 1 + die(5 + part) % 4]).unwrap(),
        };
        let plain = Request {
            reduce_op: op,
            ..Request::plain(
                collective,
                if collective == Collective::Barrier { DType::U8 } else { typed(dice[0]) },
                shape(0),
            )
        };
        match collective {
            Collective::Alltoall | Collective::Scatter => {
                let list: Vec<u64> = (0..n).map(|to| die(6 + at * 7 + to) % 9).collect();
                let rows = list.iter().sum::<u64>() + die(at) % 3;
                let shape = plain.shape.with_rows(rows).unwrap();
                let root = if collective == Collective::Scatter { root } else { Rank(0) };
                let is_root = takers[at] == root;
                if collective == Collective::Scatter && !is_root {
                    // Its expected shape may be right or wrong.
                    let shape = plain.shape.with_rows(die(7) % 9).unwrap();
                    return Request { root, shape, reduce_op: ReduceOp::Sum, ..plain };
                }
                Request { root, shape, list, reduce_op: ReduceOp::Sum, ..plain }
            }
            Collective::SendReceive => {
                let to = takers[n - 1 - takers.iter().position(|t| *t == root).unwrap() % n];
                let wrong = die(8).is_multiple_of(2) && takers[at] != root;
                let shape = if wrong { Shape::new(&[1]).unwrap() } else { plain.shape.clone() };
                Request { root, list: vec![to.0.into()], shape, reduce_op: ReduceOp::Sum, ..plain }
            }
            Collective::Broadcast | Collective::Gather => {
                Request { root, reduce_op: ReduceOp::Sum, ..plain }
            }
            Collective::Reduce => Request { root, ..plain },
            Collective::Allgather | Collective::Barrier => Request {
                reduce_op: ReduceOp::Sum,
                more: (1..=more)
                    .map(|part| Part { dtype: typed(dice[part % dice.len()]), shape: shape(part) })
                    .filter(|_| collective == Collective::Allgather)
                    .collect(),
                ..plain
            },
            _ => Request {
                more: (1..=more)
                    .map(|part| Part { dtype: typed(dice[part % dice.len()]), shape: shape(part) })
                    .collect(),
                ..plain
            },
        }
    };
    (0..n).map(request).collect()
}
