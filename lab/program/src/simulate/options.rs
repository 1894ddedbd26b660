//! The options of `gradwire simulate run`: the file, and replacements for its values.

use std::path::PathBuf;

use clap::Args;
use gradwire_bench::size::parse_bytes;
use gradwire_cli::cluster::Collective;
use gradwire_collectives::Spec;
use gradwire_launcher::error::CommandError;
use gradwire_simulator::input::Input;

use super::model::{COMPUTE, MODELS, parse_compute};
use crate::cluster_file::read;

/// The most bytes of a piece.
const MAX_BYTES: u64 = 1_000_000_000_000;

/// A cluster, a job, and faults.
#[derive(Debug, Args)]
pub struct RunOptions {
    /// The description of the cluster, in TOML, such as a file written by gradwire probe --out.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The collective, instead of the file's.
    #[arg(long, value_enum)]
    pub collective: Option<Collective>,
    /// The bytes of a piece, instead of the file's, with K, M or G.
    #[arg(long, value_name = "BYTES", value_parser = parse_piece)]
    pub bytes: Option<u64>,
    /// The number of pieces, instead of the file's.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub pieces: Option<u32>,
    /// The number of consecutive calls, each of all pieces. The time is the median of the calls.
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub calls: u32,
    /// The model of a training step to simulate instead of pieces.
    #[arg(long, value_name = "MODEL|FILE", conflicts_with_all = ["collective", "bytes", "pieces"],
          help = format!(
              "A training step instead of pieces: {MODELS}. The coordinator cuts and orders its \
               gradients, with the algorithm of its choice (auto) and then with each --spec"
          ))]
    pub model: Option<String>,
    /// How long a node computes in the step, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 0.0, requires = "model",
          help = format!("{COMPUTE}. 0: all at once"),
          value_parser = |text: &str| parse_compute(text, 0.0))]
    pub compute_ms: f64,
    /// An algorithm, such as circulant(radix=4), instead of the file's. Can be repeated. Without
    /// any, all that the cost model chooses from.
    #[arg(long = "spec", value_name = "SPEC", value_parser = Spec::parse)]
    pub specs: Vec<Spec>,
    /// The seed of random choices.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Also write times, links and critical paths as CSV to DIR, a chart of the times as SVG and
    /// PNG, and all figures as result.json.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// The memory limit, with K, M or G: a run that needs more is refused before it starts.
    #[arg(long, value_name = "BYTES", default_value = "4G", value_parser = parse_bytes)]
    pub memory: u64,
}

fn parse_piece(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text)?;
    if !(4..=MAX_BYTES).contains(&bytes) || !bytes.is_multiple_of(4) {
        return Err(format!(
            "must be a multiple of 4, an element's bytes, and at most {MAX_BYTES}"
        ));
    }
    Ok(bytes)
}

impl RunOptions {
    /// Reads the file, and replaces values by the options.
    ///
    /// # Errors
    /// [`CommandError`] with the file, the line and the accepted values.
    pub(super) fn read(&self) -> Result<Input, CommandError> {
        let mut input = read(&self.file)?;
        input.kind = self.collective.map_or(input.kind, Collective::kind);
        input.bytes = self.bytes.unwrap_or(input.bytes);
        input.pieces = self.pieces.unwrap_or(input.pieces);
        Ok(input)
    }
}

/// The median; of two middle values the later one.
pub(super) fn median(times: &[f64]) -> Option<f64> {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied()
}
