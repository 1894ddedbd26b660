//! One process, or a rank of a job that `gradwire run` started. All differences between the two are
//! here.

use anyhow::Context;
use gradwire_tch::{DistributedOptimizer, OptimizerOptions, broadcast_parameters};
use gradwire_worker::{AllreduceOptions, GradwireError, ReduceOp, Session};
use tch::{Tensor, nn};

/// The processes that train.
#[derive(Debug)]
pub(crate) enum Ranks {
    /// Only this process.
    Alone,
    /// All ranks of a job.
    Together(Session),
}

impl Ranks {
    /// A rank of a job if the launcher's variables are set, otherwise alone.
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

    /// Leaves the job cleanly.
    pub(crate) fn leave(&self) -> Result<(), GradwireError> {
        match self {
            Self::Alone => Ok(()),
            Self::Together(session) => session.shutdown(),
        }
    }

    /// Copies the parameters of rank 0 to all ranks.
    pub(crate) fn agree_on(&self, parameters: &nn::VarStore) -> gradwire_tch::Result<()> {
        match self {
            Self::Alone => Ok(()),
            Self::Together(session) => broadcast_parameters(session, parameters, 0),
        }
    }

    /// A stepper with gradients that are summed over the ranks.
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

    /// Every rank's value, in rank order: a sum of vectors in which each rank fills its own place.
    pub(crate) fn gather(&self, name: &str, value: i64) -> Result<Vec<i64>, GradwireError> {
        let mut values = vec![0; self.size()];
        values[self.rank()] = value;
        if let Self::Together(session) = self {
            session
                .allreduce_slice(&mut values, AllreduceOptions::named(name).op(ReduceOp::Sum))?;
        }
        Ok(values)
    }

    /// The bytes of the tensors that this rank has given to collectives.
    pub(crate) fn bytes_given(&self) -> u64 {
        match self {
            Self::Alone => 0,
            Self::Together(session) => session.stats().bytes,
        }
    }
}

/// The optimizer.
#[derive(Debug)]
pub(crate) enum Stepper {
    /// Steps with the gradients of this process.
    Alone(nn::Optimizer),
    /// Steps with the sum of all ranks' gradients.
    Together(DistributedOptimizer),
}

impl Stepper {
    /// Computes the gradients of the loss and makes a step with them.
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
