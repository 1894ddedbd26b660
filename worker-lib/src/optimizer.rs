//! The decisions of a distributed optimizer, for any framework: the names and the order of
//! gradients, and when a step is due.
//!
//! The backward pass computes the front layers' gradients last, and the next forward pass needs
//! them first. So they have larger priorities, and are submitted before the others (ByteScheduler,
//! Peng et al., SOSP 2019).

use std::{collections::HashSet, num::NonZeroU32};

use gradwire_proto::{TensorName, TypeError};

/// A gradient's name and priority.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// The name of the operation; unique in the plan.
    pub name: TensorName,
    /// Larger values go first.
    pub priority: i32,
}

/// Why parameters can't be planned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Two parameters have the same name.
    #[error("two parameters have the name '{name}': names must be unique")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// A name is invalid.
    #[error(transparent)]
    Name(#[from] TypeError),
}

/// Plans the gradients of `parameters`, given front layer first. Their names begin with `prefix`.
/// The plan is in the order of submission.
///
/// # Errors
/// [`PlanError`] with the name.
pub fn plan<'a>(
    prefix: &str,
    parameters: impl IntoIterator<Item = &'a str>,
) -> Result<Vec<Planned>, PlanError> {
    let mut known = HashSet::new();
    let mut plan = Vec::new();
    for parameter in parameters {
        if !known.insert(parameter) {
            return Err(PlanError::Duplicate { name: parameter.to_owned() });
        }
        plan.push(Planned { name: TensorName::new(&format!("{prefix}{parameter}"))?, priority: 0 });
    }
    // Above 0, so that gradients go before operations without a priority, such as the loss's.
    for (index, planned) in plan.iter_mut().rev().enumerate() {
        planned.priority = i32::try_from(index).unwrap_or(i32::MAX - 1) + 1;
    }
    Ok(plan)
}

/// Counts the backward passes before a step, which adds up their gradients.
#[derive(Debug, Clone)]
pub struct Accumulation {
    every: NonZeroU32,
    done: u32,
}

/// What to do after a backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// Nothing: more passes follow first.
    Nothing,
    /// Exchange the gradients and step.
    Step,
}

impl Accumulation {
    /// A step after every `every` passes.
    pub fn new(every: NonZeroU32) -> Self {
        Self { every, done: 0 }
    }

    /// Whether the next pass is the first since a step: gradients must be cleared before it.
    pub fn starts(&self) -> bool {
        self.done == 0
    }

    /// Whether the next pass makes a step due.
    pub fn completes(&self) -> bool {
        self.done + 1 >= self.every.get()
    }

    /// Notes a backward pass.
    pub fn passed(&mut self) -> Due {
        self.done += 1;
        if self.done < self.every.get() {
            return Due::Nothing;
        }
        self.done = 0;
        Due::Step
    }

    /// Notes an early step, such as at the end of a training epoch; false if there was no pass.
    pub fn step_now(&mut self) -> bool {
        std::mem::take(&mut self.done) > 0
    }

    /// The number of passes per step.
    pub fn every(&self) -> u32 {
        self.every.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_layers_go_first() {
        let plan = plan("grad.", ["conv1.weight", "conv2.weight", "fc.weight"]).unwrap();
        let names: Vec<_> = plan.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(names, ["grad.conv1.weight", "grad.conv2.weight", "grad.fc.weight"]);
        assert_eq!(plan.iter().map(|p| p.priority).collect::<Vec<_>>(), [3, 2, 1]);
    }

    #[test]
    fn a_name_is_planned_once() {
        let error = plan("", ["a", "b", "a"]).unwrap_err();
        assert_eq!(error, PlanError::Duplicate { name: "a".into() });
        assert!(matches!(plan("", [""]), Err(PlanError::Name(_))));
    }

    #[test]
    fn a_step_is_due_after_every_n_passes() {
        let mut three = Accumulation::new(NonZeroU32::new(3).unwrap());
        for _ in 0..2 {
            assert!(three.starts() && !three.completes());
            assert_eq!(three.passed(), Due::Nothing);
            assert!(!three.starts() && !three.completes());
            assert_eq!(three.passed(), Due::Nothing);
            assert!(three.completes());
            assert_eq!(three.passed(), Due::Step);
        }
        assert!(!three.step_now());
        assert_eq!(three.passed(), Due::Nothing);
        assert!(three.step_now());
        assert!(three.starts());
    }
}
