//! The model and compute time of a training step, for `run` and `plan`.

use gradwire_bench::shapes;
use gradwire_launcher::error::CommandError;
use gradwire_proto::Priority;
use gradwire_simulator::training::{Gradient, Model};
use gradwire_worker::optimizer;

/// The values of `--model`.
pub(super) const MODELS: &str = "resnet50, vgg16, bert-large, gpt2, or a file with lines \
                                 `name dim dim …`, front layer first";

/// The help of `--compute-ms`.
pub(super) const COMPUTE: &str = "How long a node computes in a step, in milliseconds. Gradients \
                                  become ready one after the other in that time, last layer first";

/// The number given for an option, in its unit.
pub(super) fn number(text: &str, least: f64, most: f64, unit: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| format!("must be from {least} to {most}{unit}"))
}

/// Parses `--compute-ms`, with a lower bound in milliseconds.
pub(super) fn parse_compute(text: &str, least: f64) -> Result<f64, String> {
    number(text, least, 3_600_000.0, " milliseconds")
}

/// The model named by `--model`, with its compute time.
pub(super) fn model(name: &str, compute_ms: f64) -> Result<Model, CommandError> {
    let gradients = shapes::load("--model", name)?;
    let names = gradients.iter().map(|gradient| gradient.name.as_str());
    let planned = optimizer::plan("", names)
        .map_err(|error| CommandError::usage(format!("--model {name}: {error}")))?;
    let gradients = gradients.iter().zip(planned).map(|(gradient, planned)| Gradient {
        name: planned.name,
        elements: gradient.elements(),
        priority: Priority(planned.priority),
    });
    Ok(Model { gradients: gradients.collect(), compute: compute_ms / 1e3 })
}
