//! The options of `gradwire bench resources`.

use clap::Args;
use gradwire_bench::{args::Common, operation::Memory, size};

/// The options of `resources`.
#[derive(Debug, Clone, Args)]
pub struct Resources {
    /// The tensor that is reduced in each step, of f32.
    #[arg(short, long, value_name = "BYTES", default_value = "1M", value_parser = parse_whole)]
    pub bytes: u64,
    /// The memory of the tensor.
    #[arg(short, long, value_enum, default_value_t = Memory::Arena)]
    pub memory: Memory,
    /// How long the ranks sleep at first, in seconds.
    #[arg(long, value_name = "S", default_value_t = 20.0, value_parser = parse_idle)]
    pub idle: f64,
    /// The number of steps after that.
    #[arg(long, value_name = "N", default_value_t = 10_000,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: u32,
    /// The number of additional steps in which perf counts system calls; 0: none.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub calls: u32,
    /// The options of all measurements; `--iters` has no meaning here.
    #[command(flatten)]
    pub common: Common,
}

/// A size of whole elements of f32.
fn parse_whole(text: &str) -> Result<u64, String> {
    let bytes = size::parse_bytes(text)?;
    if bytes == 0 || !bytes.is_multiple_of(4) {
        return Err("must be a multiple of 4, the size of an element".to_owned());
    }
    Ok(bytes)
}

fn parse_idle(text: &str) -> Result<f64, String> {
    let seconds: Option<f64> = text.parse().ok().filter(|s| (0.1..=86_400.0).contains(s));
    seconds.ok_or_else(|| "must be from 0.1 to 86400 seconds".to_owned())
}
