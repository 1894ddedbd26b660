//! Distributed training with tch: [`DistributedOptimizer`], which wraps one of its optimizers, and
//! [`broadcast_parameters`].
//!
//! Gradients live in shared memory. The exchange of each gradient starts as soon as the backward
//! pass has computed it, so most of the exchange overlaps with the pass. tch has no hooks for that,
//! so a small part of this crate is C++ (`shim.cpp`).
//!
//! A fresh gradient is copied to its place once. Computing it in place would be slower: autograd
//! adds to existing gradients, which takes two reads and a write after clearing them. (100 MB of
//! f32 on one core: backward pass and copies out and back 54 ms, clearing and backward pass in
//! place 56 ms.) The result is not copied: its place is the parameter's gradient.
//!
//! ```no_run
//! # fn main() -> Result<(), gradwire_tch::Error> {
//! use gradwire_tch::{DistributedOptimizer, broadcast_parameters};
//! use gradwire_worker::Session;
//! use tch::{Device, Kind, Tensor, nn::{self, Module, OptimizerConfig}};
//!
//! let session = Session::from_env()?;
//! let parameters = nn::VarStore::new(Device::Cpu);
//! let layer = nn::linear(parameters.root(), 8, 1, Default::default());
//! broadcast_parameters(&session, &parameters, 0)?;
//! let optimizer = nn::Sgd::default().build(&parameters, 0.1)?;
//! let mut optimizer =
//!     DistributedOptimizer::new(&session, optimizer, &parameters, Default::default())?;
//! let loss = layer.forward(&Tensor::rand([4, 8], (Kind::Float, Device::Cpu))).mean(Kind::Float);
//! optimizer.backward_step(&loss)?; // the average of all ranks' gradients
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]

use std::{
    collections::HashMap,
    num::NonZeroU32,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use gradwire_worker::{
    BroadcastOptions, CallSite, GradwireError, ReduceOp, Session,
    optimizer::{Accumulation, Due, PlanError, plan},
};
use tch::{
    TchError, Tensor,
    nn::{Optimizer, VarStore},
};

mod gradient;
mod mirror;
mod shim;

use gradient::{Common, Gradient};
use mirror::{Exchange, Mirror};

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The session refused the call, or the exchange failed.
    #[error(transparent)]
    Gradwire(#[from] GradwireError),
    /// The names of the parameters are not unique or not valid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// libtorch refused something.
    #[error("libtorch: {0}")]
    Torch(#[from] TchError),
    /// A thread of the backward pass panicked while it started an exchange.
    #[error("the exchange of '{name}' panicked: create a new optimizer")]
    Panicked {
        /// The name of the exchange.
        name: String,
    },
}

/// The result of this crate's calls.
pub type Result<T> = std::result::Result<T, Error>;

/// How gradients are exchanged.
#[derive(Debug, Clone)]
pub struct OptimizerOptions {
    /// The reduction of the ranks' gradients.
    pub op: ReduceOp,
    /// The number of backward passes that are added up before a step.
    pub accumulate: NonZeroU32,
    /// The prefix of the gradients' names. Two optimizers need different prefixes.
    pub prefix: String,
}

impl Default for OptimizerOptions {
    /// The average, a step after every pass, and the prefix `gradient.`.
    fn default() -> Self {
        Self { op: ReduceOp::Average, accumulate: NonZeroU32::MIN, prefix: "gradient.".into() }
    }
}

/// A tch optimizer whose steps use the gradients of all ranks. All ranks must make the same steps.
#[derive(Debug)]
pub struct DistributedOptimizer {
    common: Arc<Common>,
    inner: Optimizer,
    /// Front layers first.
    gradients: Vec<Gradient>,
    accumulation: Accumulation,
}

impl DistributedOptimizer {
    /// Wraps the optimizer of these parameters. The order in which the parameters were created
    /// should be the order of the layers. Parameters that are created later are not exchanged.
    ///
    /// # Errors
    /// If the element type of a parameter is not supported, or memory can't be allocated.
    pub fn new(
        session: &Session,
        inner: Optimizer,
        parameters: &VarStore,
        options: OptimizerOptions,
    ) -> Result<Self> {
        let named = trainable(parameters);
        let plan = plan(&options.prefix, named.iter().map(|(name, _)| name.as_str()))?;
        let common =
            Arc::new(Common { session: session.clone(), op: options.op, site: Mutex::default() });
        let gradients = named
            .into_iter()
            .zip(plan)
            .map(|((parameter, variable), planned)| {
                let name = planned.name.as_str();
                Gradient::new(common.clone(), &parameter, name, planned.priority, variable)
            })
            .collect::<Result<_>>()?;
        let accumulation = Accumulation::new(options.accumulate);
        Ok(Self { common, inner, gradients, accumulation })
    }

    /// Computes the loss's gradients and, if a step is due, exchanges them and steps. Returns
    /// whether it stepped. Gradients are cleared before the first pass after a step; several passes
    /// add up, as without ranks, and the last pass starts the exchanges.
    ///
    /// A parameter that the passes did not use contributes zeros. A frozen parameter
    /// (`set_requires_grad(false)`) also contributes zeros and keeps its values; freeze parameters
    /// on all ranks.
    ///
    /// # Errors
    /// Errors of libtorch, or a failed exchange, with the gradient's name. Then no step was made,
    /// and the passes before it don't count.
    #[track_caller]
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<bool> {
        self.calls(CallSite::here());
        if self.accumulation.starts() {
            self.inner.zero_grad();
        }
        if self.accumulation.completes() {
            self.gradients.iter_mut().try_for_each(Gradient::arm)?;
        }
        if let Err(error) = loss.f_backward() {
            // Some exchanges may be in flight, and some gradients may include a part of this pass.
            let end = Instant::now() + AFTER_FAILURE;
            self.gradients.iter().for_each(|gradient| gradient.abandon(end));
            self.accumulation.step_now();
            return Err(error.into());
        }
        match self.accumulation.passed() {
            Due::Nothing => Ok(false),
            Due::Step => self.exchange_and_step().map(|()| true),
        }
    }

    /// Steps early with the gradients that were added up so far, for example at the end of an
    /// epoch. Returns false if there are none.
    ///
    /// # Errors
    /// As for [`DistributedOptimizer::backward_step`].
    #[track_caller]
    pub fn step(&mut self) -> Result<bool> {
        if !self.accumulation.step_now() {
            return Ok(false);
        }
        self.calls(CallSite::here());
        self.exchange_and_step().map(|()| true)
    }

    /// The wrapped optimizer, for example to change its learning rate. Its own steps use only this
    /// rank's gradients.
    pub fn inner_mut(&mut self) -> &mut Optimizer {
        &mut self.inner
    }

    /// The session of the optimizer.
    pub fn session(&self) -> &Session {
        &self.common.session
    }

    /// Notes the line of the program from which the next exchanges come.
    fn calls(&self, site: CallSite) {
        *self.common.site.lock().unwrap_or_else(PoisonError::into_inner) = site;
    }

    fn exchange_and_step(&mut self) -> Result<()> {
        let mut failure = self.gradients.iter().try_for_each(Gradient::start).err();
        let mut end = Instant::now() + AFTER_FAILURE;
        for gradient in &self.gradients {
            if failure.is_some() {
                gradient.abandon(end);
            } else if let Err(error) = gradient.finish() {
                failure = Some(error);
                end = Instant::now() + AFTER_FAILURE;
            }
        }
        if let Some(error) = failure {
            return Err(error);
        }
        self.inner.step();
        self.common.session.mark_step();
        Ok(())
    }
}

/// How long other exchanges may take to end after one has failed (WAIT): if ranks differ, some may
/// never start.
const AFTER_FAILURE: Duration = Duration::from_secs(5);

/// The trainable variables in the order of their creation, with their names.
fn trainable(parameters: &VarStore) -> Vec<(String, Tensor)> {
    // tch keeps the order without names and the names without order; the storage connects them.
    // Empty tensors may share an address: these are ordered by name, the same on all ranks.
    let mut names: HashMap<usize, Vec<String>> = HashMap::new();
    for (name, tensor) in parameters.variables() {
        names.entry(tensor.data_ptr().addr()).or_default().push(name);
    }
    for names in names.values_mut() {
        names.sort_by(|a, b| b.cmp(a));
    }
    parameters
        .trainable_variables()
        .into_iter()
        .filter(Tensor::requires_grad)
        .enumerate()
        .map(|(index, tensor)| {
            let name = names.get_mut(&tensor.data_ptr().addr()).and_then(Vec::pop);
            (name.unwrap_or_else(|| format!("#{index}")), tensor)
        })
        .collect()
}

/// Gives every rank the root's parameters, trainable or not.
///
/// # Errors
/// If an element type is not supported, memory can't be allocated, or a broadcast fails, with the
/// parameter's name. Then some parameters may have the root's values and others not.
#[track_caller]
pub fn broadcast_parameters(session: &Session, parameters: &VarStore, root: u32) -> Result<()> {
    let session = &session.called_at(CallSite::here());
    let mut variables: Vec<(String, Tensor)> = parameters.variables().into_iter().collect();
    variables.sort_by(|a, b| a.0.cmp(&b.0));
    let start = |name: &str, variable: &Tensor| -> Result<Exchange> {
        let mut memory = Mirror::new(session, name, variable)?;
        memory.load(variable)?;
        let options = BroadcastOptions::from_rank(root).name(format!("parameter.{name}"));
        memory.exchange(|buffer| session.broadcast_async(buffer, options))
    };
    let mut exchanges = Vec::new();
    let mut result: Result<()> = variables.iter().try_for_each(|(name, variable)| {
        exchanges.push(start(name, variable)?);
        Ok(())
    });
    let mut end = Instant::now() + AFTER_FAILURE;
    for ((_, variable), exchange) in variables.iter_mut().zip(exchanges) {
        if result.is_err() {
            // If all ranks have started the same exchanges, no name stays in flight, and the caller
            // may try again.
            exchange.wait_until(end);
            continue;
        }
        result = exchange.wait().and_then(|memory| memory.store(variable));
        end = Instant::now() + AFTER_FAILURE;
    }
    result
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, nn};

    use super::*;

    #[test]
    fn trainable_variables_keep_order_and_names() {
        let parameters = nn::VarStore::new(Device::Cpu);
        let root = parameters.root();
        let _ = root.zeros("z_first", &[2]);
        let _ = root.zeros_no_train("running_mean", &[2]);
        let _ = root.sub("a").zeros("empty", &[0]);
        let _ = root.zeros("a_last", &[3]);
        let found = trainable(&parameters);
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["z_first", "a.empty", "a_last"]);
        assert_eq!(found[2].1.kind(), Kind::Float);
    }
}
