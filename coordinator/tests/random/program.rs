//! The program of a random job: all ranks know it, and each has its own part and order.

use gradwire_proto::{Collective, DType, Part, Rank, ReduceOp, Request, Shape};
use proptest::prelude::*;
use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng, SeedableRng},
};

/// A phase of the program. Its numbers are seeds from which the details follow.
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    /// Creates a process set of the ranks whose bit is set.
    Create { mask: u8 },
    /// Each rank submits all tensors in its own order, `times` times.
    Work { tensors: Vec<Tensor>, orders: u64, times: usize },
    /// Each rank of a set submits as many tensors as it has data for, then joins. `waits` says
    /// whether it waits for each before the next.
    Join { set: u8, tensors: Vec<Tensor>, counts: u64, waits: bool },
    /// Removes the newest process set.
    Remove,
}

#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) set: u8,
    pub(crate) collective: Collective,
    dtype: DType,
    rows: u8,
    width: u8,
    more: u8,
    pub(crate) priority: i32,
    seed: u64,
}

/// A deterministic pseudo-random number.
pub(crate) fn mix(seed: u64, salt: u64) -> u64 {
    SplitMix64::seed_from_u64(seed ^ salt.rotate_left(32)).next_u64()
}

fn tensor(collectives: &[Collective]) -> impl Strategy<Value = Tensor> + use<> {
    let collectives = prop::sample::select(collectives.to_vec());
    let dtypes = prop::sample::select(vec![DType::F32, DType::Bf16, DType::I64, DType::C128]);
    let size = (prop_oneof![Just(0), 1..40u8], 1..6u8);
    (0..4u8, collectives, dtypes, size, 0..3u8, -1..2i32, any::<u64>()).prop_map(
        |(set, collective, dtype, (rows, width), more, priority, seed)| Tensor {
            set,
            collective,
            dtype,
            rows,
            width,
            more,
            priority,
            seed,
        },
    )
}

/// The collectives that work without joined ranks.
const JOINABLE: [Collective; 6] = [
    Collective::Allreduce,
    Collective::Reduce,
    Collective::Broadcast,
    Collective::Allgather,
    Collective::Gather,
    Collective::Barrier,
];

const REST: [Collective; 4] =
    [Collective::Scatter, Collective::ReduceScatter, Collective::Alltoall, Collective::SendReceive];

pub(crate) fn phases() -> impl Strategy<Value = Vec<Phase>> {
    let work = prop::collection::vec(tensor(&[&JOINABLE[..], &REST].concat()), 1..10);
    let work = (work, any::<u64>(), 1..4usize).prop_map(|(tensors, orders, times)| Phase::Work {
        tensors,
        orders,
        times,
    });
    let join = (0..4u8, prop::collection::vec(tensor(&JOINABLE), 0..6), any::<(u64, bool)>())
        .prop_map(|(set, tensors, (counts, waits))| Phase::Join { set, tensors, counts, waits });
    let create = (1..=255u8).prop_map(|mask| Phase::Create { mask });
    let phase = prop_oneof![3 => work, 2 => join, 2 => create, 1 => Just(Phase::Remove)];
    prop::collection::vec(phase, 1..8)
}

impl Tensor {
    /// The name of the `number`-th tensor of a phase. Names are reused for other requests, but the
    /// name of a transfer contains its ranks.
    pub(crate) fn name(&self, number: usize, members: &[Rank]) -> String {
        match self.collective {
            Collective::SendReceive => {
                let (from, to) = self.peers(members);
                format!("t{number}.{from}-{to}")
            }
            _ => format!("t{number}"),
        }
    }

    fn peers(&self, members: &[Rank]) -> (Rank, Rank) {
        let pick = |salt| members[(mix(self.seed, salt) % members.len() as u64) as usize];
        (pick(1), pick(2))
    }

    /// The ranks that submit it.
    pub(crate) fn ranks(&self, members: &[Rank]) -> Vec<Rank> {
        match self.collective {
            Collective::SendReceive => {
                let (from, to) = self.peers(members);
                members.iter().copied().filter(|&rank| rank == from || rank == to).collect()
            }
            _ => members.to_vec(),
        }
    }

    /// The request of `rank`. `root` replaces the random root.
    pub(crate) fn request(&self, members: &[Rank], rank: Rank, root: Option<Rank>) -> Request {
        let n = members.len() as u64;
        let (rows, width) = (u64::from(self.rows), u64::from(self.width));
        let shape = |rows: u64, width: u64| Shape::new(&[rows, width]).unwrap();
        let own = |salt: u64| mix(self.seed, u64::from(rank.0) * 64 + salt) % 4;
        let mut request = Request::plain(self.collective, self.dtype, shape(rows, width));
        let (from, to) = self.peers(members);
        let root = root.unwrap_or(from);
        let group = |rows: &dyn Fn(u64) -> u64| {
            let dtype = |part: u64| if part % 2 == 1 { DType::F16 } else { self.dtype };
            let part = |part: u64| Part { dtype: dtype(part), shape: shape(rows(part), part + 1) };
            (1..=u64::from(self.more)).map(part).collect::<Vec<_>>()
        };
        match self.collective {
            Collective::Allreduce => {
                request.reduce_op = ReduceOp::Sum;
                request.more = group(&|part| part + rows);
            }
            Collective::ReduceScatter => request.more = group(&|part| part + rows),
            Collective::Allgather => {
                request.shape = shape(own(0), width);
                request.more = group(&own);
            }
            Collective::Gather => {
                request.shape = shape(own(0), width);
                request.root = root;
            }
            Collective::Scatter => {
                request.root = root;
                let list: Vec<u64> = (0..n).map(|to| mix(self.seed, 100 + to) % 3).collect();
                if rank != root {
                    request.shape = shape(0, width);
                } else if self.more == 0 {
                    request.shape = shape(rows * n, width);
                } else {
                    request.shape = shape(list.iter().sum::<u64>() + own(0), width);
                    request.list = list;
                }
            }
            Collective::Alltoall if self.more == 0 => request.shape = shape(rows * n, width),
            Collective::Alltoall => {
                let list: Vec<u64> = (0..n).map(|to| own(1 + to)).collect();
                request.shape = shape(list.iter().sum::<u64>() + own(0), width);
                request.list = list;
            }
            Collective::SendReceive => {
                request.root = from;
                request.list = vec![u64::from(to.0)];
                if rank != from {
                    request.shape = shape(0, width);
                }
            }
            Collective::Barrier => request = Request::barrier(),
            _ => request.root = root,
        }
        if !matches!(
            self.collective,
            Collective::Broadcast
                | Collective::Reduce
                | Collective::Gather
                | Collective::Scatter
                | Collective::SendReceive
        ) {
            request.root = Rank(0);
        }
        request.validate().expect("the program makes valid requests");
        request
    }
}
