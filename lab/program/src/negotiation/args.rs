//! The options of `gradwire bench negotiation`.

use std::path::PathBuf;

use clap::Args;

use gradwire_bench::shapes::{self, Gradient};
use gradwire_launcher::{args::SettingsOptions, error::CommandError};

/// The largest number of nodes that the coordinator accepts.
const MAX_NODES: i64 = 4096;

/// The cost of agreeing on a step's tensors, without moving any of them.
#[derive(Debug, Clone, Args)]
pub struct Negotiation {
    /// The number of nodes; several numbers are measured in sequence.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "2,16,256",
          value_parser = clap::value_parser!(u32).range(1..=MAX_NODES))]
    pub nodes: Vec<u32>,
    /// The network: resnet50, vgg16, bert-large, gpt2, or a file with a line `name dim dim …` for
    /// each tensor, front layer first.
    #[arg(long, value_name = "MODEL|FILE", default_value = "resnet50")]
    pub shapes: String,
    /// The number of messages in which each node announces the tensors of a step.
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub ready: u32,
    /// Report the end of each operation in its own message, as for slow operations.
    #[arg(long)]
    pub done_each: bool,
    /// The number of warm-up steps. One more step, in which tensors have no ids yet, comes before.
    #[arg(short, long, value_name = "N", default_value_t = 10)]
    pub warmup: u32,
    /// The number of measured steps.
    #[arg(short, long, value_name = "N", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub iters: u32,
    /// Also write the machine, the version, the settings and the results to a file.
    #[arg(short, long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// The settings of the coordinator.
    #[command(flatten)]
    pub settings: SettingsOptions,
}

impl Negotiation {
    /// The tensors, front layer first.
    ///
    /// # Errors
    /// [`CommandError`] without tensors, or with fewer tensors than messages.
    pub fn tensors(&self) -> Result<Vec<Gradient>, CommandError> {
        let tensors = shapes::load("--shapes", &self.shapes)?;
        if self.ready as usize > tensors.len() {
            let what = format!(
                "--ready {} is more than the {} tensors of {}",
                self.ready,
                tensors.len(),
                self.shapes
            );
            return Err(
                CommandError::usage(what).hint("each message announces at least one tensor")
            );
        }
        Ok(tensors)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Negotiation,
    }

    fn parse(line: &str) -> Result<Negotiation, String> {
        let words = ["bench"].into_iter().chain(line.split_whitespace());
        Ok(Line::try_parse_from(words).map_err(|error| error.to_string())?.options)
    }

    #[test]
    fn the_limits_of_a_job_apply() {
        let default = parse("").unwrap();
        assert_eq!((&default.nodes[..], default.ready), (&[2, 16, 256][..], 1));
        assert_eq!(default.tensors().unwrap().len(), 161);
        assert_eq!(parse("--nodes 1,4096").unwrap().nodes, [1, 4096]);
        for (line, expected) in [
            ("--nodes 0", "0 is not in 1..=4096"),
            ("--nodes 2,4097", "4097 is not in 1..=4096"),
            ("--nodes two", "invalid value 'two'"),
            ("--ready 0", "0 is not in 1.."),
            ("--iters 0", "0 is not in 1.."),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
        assert!(parse("--ready 161").unwrap().tensors().is_ok());
        let error = parse("--ready 162").unwrap().tensors().unwrap_err();
        assert_eq!(error.what, "--ready 162 is more than the 161 tensors of resnet50");
    }
}
