//! One trainer or many: alone, or a rank of a job that `gradwire run` started. Everything that
//! differs between the two is here.

use anyhow::Context;
use gradwire_tch::{DistributedOptimizer, OptimizerOptions, broadcast_parameters};
use gradwire_worker::{AllreduceOptions, GradwireError, ReduceOp, Session};
use tch::{Tensor, nn};

/// Who trains.
#[derive(Debug)]
pub(crate) enum Ranks {
    /// This process and no other.
    Alone,
    /// All ranks of a job.
    Together(Session),
}

impl Ranks {
    /// A job's rank where the launcher's variables are there, alone otherwise.
    pub(crate) fn from_env() -> Result<Self, GradwireError> {
        match Session::from_env() {
            Ok(session) => Ok(Self::Together(session)),
            Err(GradwireError::NotLaunched { .. }) => Ok(Self::Alone),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn rank(&self) -> usize {
        match self {
            Self::Alone => 0,
            Self::Together(session) => session.rank() as usize,
        }
    }

    pub(crate) fn size(&self) -> usize {
        match self {
            Self::Alone => 1,
            Self::Together(session) => session.size() as usize,
        }
    }

    /// Leaves the job in good order.
    pub(crate) fn leave(&self) -> Result<(), GradwireError> {
        match self {
            Self::Alone => Ok(()),
            Self::Together(session) => session.shutdown(),
        }
    }

    /// Gives every rank rank 0's parameters.
    pub(crate) fn agree_on(&self, parameters: &nn::VarStore) -> gradwire_tch::Result<()> {
        match self {
            Self::Alone => Ok(()),
            Self::Together(session) => broadcast_parameters(session, parameters, 0),
        }
    }

    /// Steps with gradients that are summed over the ranks.
    pub(crate) fn stepper(
        &self,
        optimizer: nn::Optimizer,
        parameters: &nn::VarStore,
    ) -> gradwire_tch::Result<Stepper> {
        let Self::Together(session) = self else {
            return Ok(Stepper::Alone(optimizer));
        };
        let options = OptimizerOptions { op: ReduceOp::Sum, ..Default::default() };
        DistributedOptimizer::new(session, optimizer, parameters, options).map(Stepper::Together)
    }

    /// The sum of a number over the ranks.
    pub(crate) fn sum(&self, name: &str, number: f64) -> anyhow::Result<f64> {
        let Self::Together(session) = self else {
            return Ok(number);
        };
        let mut numbers = [number];
        session
            .allreduce_slice(&mut numbers, AllreduceOptions::named(name).op(ReduceOp::Sum))
            .with_context(|| format!("the sum of {name} over the ranks failed"))?;
        Ok(numbers[0])
    }

    /// Every rank's value, in rank order: each rank adds a vector with its own place filled.
    pub(crate) fn gather(&self, name: &str, value: i64) -> Result<Vec<i64>, GradwireError> {
        let mut values = vec![0; self.size()];
        values[self.rank()] = value;
        if let Self::Together(session) = self {
            session
                .allreduce_slice(&mut values, AllreduceOptions::named(name).op(ReduceOp::Sum))?;
        }
        Ok(values)
    }

    /// The bytes of the tensors that this rank has given to the collectives so far.
    pub(crate) fn bytes_given(&self) -> u64 {
        match self {
            Self::Alone => 0,
            Self::Together(session) => session.stats().bytes,
        }
    }
}

/// What a step is made with.
#[derive(Debug)]
pub(crate) enum Stepper {
    /// With the gradients of this process.
    Alone(nn::Optimizer),
    /// With the sum of all ranks' gradients.
    Together(DistributedOptimizer),
}

impl Stepper {
    /// Gradients of the loss, and a step with them.
    pub(crate) fn backward_step(&mut self, loss: &Tensor) -> gradwire_tch::Result<()> {
        match self {
            Self::Alone(optimizer) => optimizer.backward_step(loss),
            Self::Together(optimizer) => {
                optimizer.backward_step(loss)?;
            }
        }
        Ok(())
    }
}
