//! What `run` and `plan` are told of a training step: its model, and how long a node computes.

use gradwire_bench::shapes;
use gradwire_launcher::error::CommandError;
use gradwire_proto::Priority;
use gradwire_simulator::training::{Gradient, Model};
use gradwire_worker::optimizer;

/// What `--model` may be.
pub(super) const MODELS: &str = "resnet50, vgg16, bert-large, gpt2, or a file with `name dim dim \
                                 …` in each line, front layer first";

/// What `--compute-ms` is.
pub(super) const COMPUTE: &str = "How long a node computes in a step, in milliseconds. Gradients \
                                  become ready one after the other in that time, last layer first";

/// A number of an option, in its unit.
pub(super) fn number(text: &str, least: f64, most: f64, unit: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| format!("must be from {least} to {most}{unit}"))
}

/// A value of `--compute-ms`, at least so many milliseconds.
pub(super) fn parse_compute(text: &str, least: f64) -> Result<f64, String> {
    number(text, least, 3_600_000.0, " milliseconds")
}

/// A model that `--model` names, with so many milliseconds of computing.
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
