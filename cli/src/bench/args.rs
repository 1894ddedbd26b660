//! The options of `gradwire bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use gradwire_proto::{DType, ReduceOp};
use serde::Serialize;

use super::{
    operation::Operation,
    shapes,
    size::{self, Rate},
};
use crate::{args::Where, error::CliError};

/// What is measured.
#[derive(Debug, Clone, Subcommand)]
pub enum Bench {
    /// Every rank gets the reduction of all ranks' tensors.
    Allreduce {
        /// How they are reduced: sum, average, min, max or product.
        #[arg(short, long, default_value = "sum", value_parser = parse_op)]
        op: ReduceOp,
        /// Sizes and the rest.
        #[command(flatten)]
        sweep: Sweep,
    },
    /// Every rank gets one rank's tensor.
    Broadcast {
        /// Whose tensor.
        #[arg(short, long, default_value_t = 0)]
        root: u32,
        /// Sizes and the rest.
        #[command(flatten)]
        sweep: Sweep,
    },
    /// Nobody goes on before everybody has come.
    Barrier {
        /// What all measurements have.
        #[command(flatten)]
        common: Common,
    },
    /// A network's gradients, as a backward pass gives them: last layer first, front layers most urgent.
    Model {
        /// Whose: resnet50, vgg16, bert-large, gpt2, or a file with a line `name dim dim …` for each
        /// tensor, front layer first.
        #[arg(long, value_name = "MODEL|FILE")]
        shapes: String,
        /// How long computing the gradients takes, in milliseconds: each is submitted after its share
        /// of that time, in which the processor is idle as it is beside a GPU.
        #[arg(long, value_name = "MS", default_value_t = 0.0, value_parser = parse_compute)]
        compute_ms: f64,
        /// How the gradients are reduced.
        #[arg(short, long, default_value = "average", value_parser = parse_op)]
        op: ReduceOp,
        /// What tensors are made of.
        #[command(flatten)]
        data: Data,
    },
}

/// A series of sizes.
#[derive(Debug, Clone, Args)]
pub struct Sweep {
    /// The first size, in bytes, with K, M or G.
    #[arg(short, long, value_name = "BYTES", default_value = "4", value_parser = size::parse_bytes)]
    pub begin: u64,
    /// The last size.
    #[arg(short, long, value_name = "BYTES", default_value = "256M", value_parser = size::parse_bytes)]
    pub end: u64,
    /// How many times as large each next size is.
    #[arg(short, long, default_value_t = 4)]
    pub factor: u64,
    /// What tensors are made of.
    #[command(flatten)]
    pub data: Data,
}

/// What tensors are made of, and how they are watched.
#[derive(Debug, Clone, Args)]
pub struct Data {
    /// The element type: f32, f64, f16, bf16, i8, u8, i32 or i64.
    #[arg(short, long, default_value = "f32", value_parser = parse_dtype)]
    pub dtype: DType,
    /// Where tensors lie.
    #[arg(short, long, value_enum, default_value_t = Memory::Arena)]
    pub memory: Memory,
    /// Check the result of every N-th iteration, and always the first [default: every one up to
    /// 16 MiB, every 10th above].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub check: Option<u32>,
    /// The rate of the line between nodes, such as 10Gbit: the limit with more than one node.
    #[arg(long, value_name = "RATE", value_parser = size::parse_rate)]
    pub line_rate: Option<Rate>,
    /// What all measurements have.
    #[command(flatten)]
    pub common: Common,
}

/// What all measurements have.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// Iterations that are not counted.
    #[arg(short, long, value_name = "N", default_value_t = 5)]
    pub warmup: u32,
    /// Iterations that are.
    #[arg(short, long, value_name = "N", default_value_t = 20,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub iters: u32,
    /// A barrier before each iteration, in place of calls back to back.
    #[arg(long)]
    pub barrier: bool,
    /// Also write machine, version, settings and figures to a file, by rank 0 on its host.
    #[arg(short, long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// The algorithm between nodes [default: negotiation.algorithm].
    #[arg(short, long, value_name = "NAME")]
    pub algorithm: Option<String>,
    /// How many ranks each host has, whatever its slots are.
    #[arg(long, value_name = "N", visible_alias = "ppn",
          value_parser = clap::value_parser!(u32).range(1..=i64::from(crate::launch::hosts::MAX_RANKS)))]
    pub ranks_per_node: Option<u32>,
    /// The process is a rank that `gradwire bench` started; these settings were made (JSON).
    #[arg(long, hide = true)]
    pub started: Option<String>,
    /// Where the ranks run; not inside `gradwire run`.
    #[command(flatten)]
    pub at: Where,
}

/// Where tensors lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// In shared memory: they are not copied.
    Arena,
    /// In the process's own memory: they are copied into shared memory and back.
    Ordinary,
}

/// Above this size not every iteration is checked where nobody says, in bytes.
const CHECK_ALL: u64 = 16 << 20;

impl Data {
    /// At every how many iterations the result is checked.
    pub fn check_every(&self, bytes: u64) -> u32 {
        self.check.unwrap_or(if bytes > CHECK_ALL { 10 } else { 1 })
    }
}

impl Bench {
    /// What all measurements have.
    pub fn common(&self) -> &Common {
        match self {
            Self::Allreduce { sweep, .. } | Self::Broadcast { sweep, .. } => &sweep.data.common,
            Self::Barrier { common } => common,
            Self::Model { data, .. } => &data.common,
        }
    }

    /// What runs in each iteration; a model's many are of one kind.
    pub fn operation(&self) -> Operation {
        match self {
            Self::Allreduce { op, .. } | Self::Model { op, .. } => Operation::Allreduce(*op),
            Self::Broadcast { root, .. } => Operation::Broadcast { root: *root },
            Self::Barrier { .. } => Operation::Barrier,
        }
    }

    /// Checks what the options say together, before anything is started.
    ///
    /// # Errors
    /// [`CliError`] with the options.
    pub fn check(&self) -> Result<(), CliError> {
        match self {
            Self::Allreduce { sweep, .. } | Self::Broadcast { sweep, .. } => {
                sweep.sizes().map(drop)
            }
            Self::Barrier { .. } => Ok(()),
            Self::Model { shapes, .. } => shapes::load(shapes).map(drop),
        }
    }

    /// Checks them against the number of ranks.
    ///
    /// # Errors
    /// [`CliError`] if there are too few.
    pub fn check_size(&self, ranks: u32) -> Result<(), CliError> {
        match self {
            Self::Broadcast { root, .. } if *root >= ranks => {
                let what = format!("there is no rank {root}: the job has {ranks} ranks");
                Err(CliError::usage(what).hint("ranks are counted from 0: choose another --root"))
            }
            _ => Ok(()),
        }
    }
}

impl Sweep {
    /// The sizes, in bytes.
    ///
    /// # Errors
    /// [`CliError`] if they make no series.
    pub fn sizes(&self) -> Result<Vec<u64>, CliError> {
        let element = self.data.dtype.size() as u64;
        size::series(self.begin, self.end, self.factor, element).map_err(CliError::usage)
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
        let Bench::Allreduce { op, sweep } = parse(line).unwrap() else { panic!("no allreduce") };
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
    fn what_makes_no_sense_is_refused_with_its_reason() {
        for (line, told) in [
            ("allreduce -b 12X", "'12X' for '--begin <BYTES>': not a size"),
            ("allreduce -b 8 -e 4", "-b 8 is more than -e 4"),
            ("allreduce -f 1", "-f 1 leads nowhere"),
            ("allreduce -f 0.5", "invalid value '0.5'"),
            ("allreduce -d f8", "must be one of f32, f64, f16, bf16, i8, u8, i32, i64"),
            ("allreduce -o mean", "must be one of sum, average, min, max, product"),
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
            assert!(error.contains(told), "{line}: {error}");
        }
    }
}
