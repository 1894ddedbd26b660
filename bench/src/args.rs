//! The options of `gradwire bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use gradwire_proto::{DType, ReduceOp};

use super::{
    operation::{Memory, Operation},
    shapes,
    size::{self, Rate},
};
use gradwire_launcher::{
    args::{JobOptions, MAX_RANKS},
    error::CommandError,
};

/// What the ranks of a job measure.
#[derive(Debug, Clone, Subcommand)]
pub enum Bench {
    /// A collective on tensors of increasing size.
    #[command(flatten)]
    Sweep(Collective),
    /// A barrier, which no rank passes before all have arrived.
    Barrier {
        /// The options of all measurements.
        #[command(flatten)]
        common: Common,
    },
    /// The gradients of a network in the order of a backward pass: last layer first, front layers
    /// most urgent.
    Model {
        /// The network: resnet50, vgg16, bert-large, gpt2, or a file with a line `name dim dim …`
        /// for each tensor, front layer first.
        #[arg(long, value_name = "MODEL|FILE")]
        shapes: String,
        /// Milliseconds of computing the gradients. Each gradient is submitted after its share of
        /// that time. Meanwhile the processor is idle, as beside a GPU.
        #[arg(long, value_name = "MS", default_value_t = 0.0, value_parser = parse_compute)]
        compute_ms: f64,
        /// The reduction of the gradients.
        #[arg(short, long, default_value = "average", value_parser = parse_op)]
        op: ReduceOp,
        /// The options of tensors.
        #[command(flatten)]
        data: Data,
    },
}

/// A collective with a size.
#[derive(Debug, Clone, Subcommand)]
pub enum Collective {
    /// Every rank gets the reduction of all ranks' tensors.
    Allreduce(Reducing),
    /// One rank gets the reduction of all ranks' tensors.
    Reduce {
        /// The root.
        #[command(flatten)]
        root: Root,
        /// The reduction, and the sizes.
        #[command(flatten)]
        reducing: Reducing,
    },
    /// Every rank gets one rank's tensor.
    Broadcast(Rooted),
    /// Every rank gets all ranks' tensors.
    Allgather(Sweep),
    /// One rank gets all ranks' tensors.
    Gather(Rooted),
    /// Every rank gets a share of one rank's tensor.
    Scatter(Rooted),
    /// Every rank gets a share of the reduction of all ranks' tensors.
    Reducescatter(Reducing),
    /// Every rank gets a share of every rank's tensor.
    Alltoall(Sweep),
    /// Every rank sends a tensor to the next rank, and receives one from the rank before.
    SendReceive(Sweep),
}

/// The options of reductions.
#[derive(Debug, Clone, Args)]
pub struct Reducing {
    /// The reduction: sum, average, min, max, product, bit-and, bit-or or bit-xor.
    #[arg(short, long, default_value = "sum", value_parser = parse_op)]
    pub op: ReduceOp,
    /// The sizes and other options.
    #[command(flatten)]
    pub sweep: Sweep,
}

/// The options of collectives with a root.
#[derive(Debug, Clone, Args)]
pub struct Rooted {
    /// The root.
    #[command(flatten)]
    pub root: Root,
    /// The sizes and other options.
    #[command(flatten)]
    pub sweep: Sweep,
}

/// The root of a collective.
#[derive(Debug, Clone, Args)]
pub struct Root {
    /// The rank that sends to or receives from all others.
    #[arg(short, long, default_value_t = 0)]
    pub root: u32,
}

impl Collective {
    /// The operation of each iteration, and the options of its sizes.
    pub fn parts(&self) -> (Operation, &Sweep) {
        match self {
            Self::Allreduce(Reducing { op, sweep }) => (Operation::Allreduce(*op), sweep),
            Self::Reduce { root, reducing: Reducing { op, sweep } } => {
                (Operation::Reduce { op: *op, root: root.root }, sweep)
            }
            Self::Broadcast(Rooted { root, sweep }) => {
                (Operation::Broadcast { root: root.root }, sweep)
            }
            Self::Allgather(sweep) => (Operation::Allgather, sweep),
            Self::Gather(Rooted { root, sweep }) => (Operation::Gather { root: root.root }, sweep),
            Self::Scatter(Rooted { root, sweep }) => {
                (Operation::Scatter { root: root.root }, sweep)
            }
            Self::Reducescatter(Reducing { op, sweep }) => (Operation::ReduceScatter(*op), sweep),
            Self::Alltoall(sweep) => (Operation::Alltoall, sweep),
            Self::SendReceive(sweep) => (Operation::SendReceive, sweep),
        }
    }
}

/// A series of sizes.
#[derive(Debug, Clone, Args)]
pub struct Sweep {
    /// The first size, in bytes, with K, M or G.
    #[arg(short, long, value_name = "BYTES", default_value = "4", value_parser = size::parse_bytes)]
    pub begin: u64,
    /// The last size.
    #[arg(short, long, value_name = "BYTES", default_value = "256M",
          value_parser = size::parse_bytes)]
    pub end: u64,
    /// The ratio of each size to the previous one.
    #[arg(short, long, default_value_t = 4)]
    pub factor: u64,
    /// The options of tensors.
    #[command(flatten)]
    pub data: Data,
}

/// The options of tensors.
#[derive(Debug, Clone, Args)]
pub struct Data {
    /// The element type: f32, f64, f16, bf16, f8e4m3, f8e5m2, i8, u8, i16, u16, i32, u32, i64, u64,
    /// bool, c64 or c128.
    #[arg(short, long, default_value = "f32", value_parser = parse_dtype)]
    pub dtype: DType,
    /// The memory of tensors.
    #[arg(short, long, value_enum, default_value_t = Memory::Arena)]
    pub memory: Memory,
    /// Check the result of every N-th iteration, and always the first [default: every one up to
    /// 16 MiB, every 10th above].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub check: Option<u32>,
    /// The rate of the line between nodes, such as 10Gbit: the baseline if there are several nodes.
    #[arg(long, value_name = "RATE", value_parser = size::parse_rate)]
    pub line_rate: Option<Rate>,
    /// The options of all measurements.
    #[command(flatten)]
    pub common: Common,
}

/// The options of all measurements.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// The number of warm-up iterations.
    #[arg(short, long, value_name = "N", default_value_t = 5)]
    pub warmup: u32,
    /// The number of measured iterations.
    #[arg(short, long, value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub iters: u32,
    /// Run a barrier before each iteration. By default, iterations follow each other directly.
    #[arg(long)]
    pub barrier: bool,
    /// Also write the machine, the version, the settings and the results to a file, by rank 0 on
    /// its host.
    #[arg(short, long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// The algorithm between nodes [default: negotiation.algorithm].
    #[arg(short, long, value_name = "NAME")]
    pub algorithm: Option<String>,
    /// The number of ranks on each host, instead of its slots.
    #[arg(long, value_name = "N", visible_alias = "ppn",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_RANKS)))]
    pub ranks_per_node: Option<u32>,
    /// This process is a rank that `gradwire bench` started, with these changed settings (JSON).
    #[arg(long, hide = true)]
    pub started: Option<String>,
    /// Where the ranks run; not inside `gradwire run`.
    #[command(flatten)]
    pub at: JobOptions,
}

/// Above this size in bytes, only some iterations are checked by default.
const CHECK_ALL: u64 = 16 << 20;

impl Data {
    /// The interval, in iterations, at which the result is checked.
    pub fn check_every(&self, bytes: u64) -> u32 {
        self.check.unwrap_or(if bytes > CHECK_ALL { 10 } else { 1 })
    }
}

impl Bench {
    /// The options of all measurements.
    pub fn common(&self) -> &Common {
        match self {
            Self::Barrier { common } => common,
            Self::Sweep(collective) => &collective.parts().1.data.common,
            Self::Model { data, .. } => &data.common,
        }
    }

    /// The options of tensors, if the measurement has any.
    pub fn data(&self) -> Option<&Data> {
        match self {
            Self::Barrier { .. } => None,
            Self::Sweep(collective) => Some(&collective.parts().1.data),
            Self::Model { data, .. } => Some(data),
        }
    }

    /// The operation of each iteration. A model has many operations of the same kind.
    pub fn operation(&self) -> Operation {
        match self {
            Self::Barrier { .. } => Operation::Barrier,
            Self::Sweep(collective) => collective.parts().0,
            Self::Model { op, .. } => Operation::Allreduce(*op),
        }
    }

    /// Checks the combination of options, before anything is started.
    ///
    /// # Errors
    /// [`CommandError`] that names the options.
    pub fn check(&self) -> Result<(), CommandError> {
        if let (Some(op), Some(data)) = (self.operation().reduction(), self.data())
            && let Some(why) = op.refuses(data.dtype)
        {
            return Err(CommandError::usage(format!("--op {op} of --dtype {}: {why}", data.dtype)));
        }
        match self {
            Self::Barrier { .. } => Ok(()),
            Self::Sweep(collective) => collective.parts().1.sizes().map(drop),
            Self::Model { shapes, .. } => shapes::load("--shapes", shapes).map(drop),
        }
    }

    /// Checks the options against the number of ranks.
    ///
    /// # Errors
    /// [`CommandError`] if there are too few ranks.
    pub fn check_size(&self, ranks: u32) -> Result<(), CommandError> {
        let operation = self.operation();
        if let Some(root) = operation.root().filter(|root| *root >= ranks) {
            let what = format!("--root {root} is not a rank: the job has {ranks} ranks");
            return Err(
                CommandError::usage(what).hint("ranks are counted from 0: choose another --root")
            );
        }
        if operation == Operation::SendReceive && ranks < 2 {
            let what = "send-receive needs two ranks: the job has 1";
            return Err(CommandError::usage(what).hint("start more with -np"));
        }
        Ok(())
    }
}

impl Sweep {
    /// The sizes, in bytes.
    ///
    /// # Errors
    /// [`CommandError`] if the options do not give a valid series.
    pub fn sizes(&self) -> Result<Vec<u64>, CommandError> {
        let element = self.data.dtype.size() as u64;
        size::series(self.begin, self.end, self.factor, element).map_err(CommandError::usage)
    }
}

fn parse_dtype(text: &str) -> Result<DType, String> {
    named(DType::ALL, text, DType::name)
}

fn parse_op(text: &str) -> Result<ReduceOp, String> {
    named(ReduceOp::ALL, text, ReduceOp::name)
}

fn named<T: Copy>(all: &[T], text: &str, name: fn(T) -> &'static str) -> Result<T, String> {
    all.iter().copied().find(|value| name(*value) == text).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|value| name(*value)).collect();
        format!("must be one of {}", names.join(", "))
    })
}

fn parse_compute(text: &str) -> Result<f64, String> {
    let ms: Option<f64> = text.parse().ok().filter(|ms| (0.0..=3_600_000.0).contains(ms));
    ms.ok_or_else(|| "must be from 0 to 3600000 milliseconds".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(subcommand)]
        bench: Bench,
    }

    fn parse(line: &str) -> Result<Bench, String> {
        let words = ["bench"].into_iter().chain(line.split(' '));
        let bench = Line::try_parse_from(words).map_err(|error| error.to_string())?.bench;
        bench.check().map_err(|error| error.to_string()).map(|()| bench)
    }

    #[test]
    fn the_options_of_nccl_tests_are_known() {
        let line =
            "allreduce -b 4 -e 256M -f 4 -d bf16 -o max -w 2 -i 7 -c 3 --np 4 -H a:2,b:2 -a ring";
        let Bench::Sweep(Collective::Allreduce(Reducing { op, sweep })) = parse(line).unwrap()
        else {
            panic!("no allreduce")
        };
        assert_eq!((op, sweep.data.dtype), (ReduceOp::Max, DType::Bf16));
        assert_eq!(sweep.sizes().unwrap().len(), 14);
        let common = &sweep.data.common;
        assert_eq!((common.warmup, common.iters, common.at.np), (2, 7, Some(4)));
        assert_eq!(sweep.data.check_every(1 << 30), 3);
        let default = Data { check: None, ..sweep.data };
        assert_eq!((default.check_every(16 << 20), default.check_every((16 << 20) + 1)), (1, 10));
        assert_eq!(default.memory, Memory::Arena);
    }

    #[test]
    fn every_collective_has_its_words() {
        let (op, root) = (ReduceOp::BitXor, 1);
        for (line, operation) in [
            ("allreduce -o bit-xor -d u16", Operation::Allreduce(op)),
            ("reduce -o bit-xor -r 1 -d bool", Operation::Reduce { op, root }),
            ("broadcast -r 1 -d c128 -b 16", Operation::Broadcast { root }),
            ("allgather -d f8e4m3", Operation::Allgather),
            ("gather --root 1", Operation::Gather { root }),
            ("scatter --root 1", Operation::Scatter { root }),
            ("reducescatter -o bit-xor -d i64 -b 8", Operation::ReduceScatter(op)),
            ("alltoall", Operation::Alltoall),
            ("send-receive", Operation::SendReceive),
            ("barrier", Operation::Barrier),
            ("model --shapes gpt2 -o sum", Operation::Allreduce(ReduceOp::Sum)),
        ] {
            let bench = parse(line).unwrap();
            assert_eq!(bench.operation(), operation, "{line}");
            assert_eq!(
                bench.check_size(1).is_ok(),
                operation.root() != Some(1) && operation != Operation::SendReceive
            );
            assert!(bench.check_size(2).is_ok(), "{line}");
        }
    }

    #[test]
    fn invalid_options_are_refused_with_a_reason() {
        for (line, expected) in [
            ("allreduce -b 12X", "'12X' for '--begin <BYTES>': not a size"),
            ("allreduce -b 8 -e 4", "-b 8 is more than -e 4"),
            ("allreduce -f 1", "-f must be at least 2, not 1"),
            ("allreduce -f 0.5", "invalid value '0.5'"),
            ("allreduce -d f8", "must be one of f32, f64, f16, bf16, i8, u8, i32, i64, i16,"),
            ("allreduce -d f8", "bool, f8e4m3, f8e5m2, c64, c128"),
            ("allreduce -o mean", "max, product, bit-and, bit-or, bit-xor"),
            ("reduce -o bit-or", "--op bit-or of --dtype f32: only integers and bool have bits"),
            ("reducescatter -o max -d c64", "--op max of --dtype c64: complex numbers can only"),
            ("allreduce -o average -d bool", "--op average of --dtype bool: booleans have"),
            ("allgather -o sum", "unexpected argument"),
            ("allgather --root 1", "unexpected argument"),
            ("broadcast -b 4 -d f64", "less than one element"),
            ("allreduce --iters 0", "0 is not in 1.."),
            ("allreduce --check 0", "0 is not in 1.."),
            ("allreduce --memory disk", "arena, ordinary"),
            ("allreduce --line-rate 10GB", "such as 10Gbit"),
            ("model", "--shapes"),
            ("model --shapes resnet50 --compute-ms=-1", "from 0 to 3600000"),
            ("model --shapes resnet50 --compute-ms nan", "from 0 to 3600000"),
            ("model --shapes resnet51", "resnet51"),
            ("barrier -b 4", "unexpected argument"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
