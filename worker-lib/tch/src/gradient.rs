//! One parameter's gradient: it lives in shared memory, and its exchange starts in the backward
//! pass.
//!
//! libtorch drops gradients before a pass, and autograd creates new ones: a pass into existing
//! memory would have to clear it and add to it. So a parameter's hook copies a fresh gradient into
//! its place in shared memory, while it is still in the cache, makes the place the parameter's
//! gradient, and starts the exchange. The optimizer then reads the result there.
//!
//! ```text
//! idle -- arm --> armed -- the hook, or finish for a gradient without a pass --> in flight
//!   └---------------------------------- finish ------------------------------------┘
//! ```
//!
//! A program may keep a gradient for longer than the optimizer lives, so its tensor keeps the
//! memory allocated. If the program still has it when the next exchange starts, the gradient gets
//! another place, and the kept tensor does not change.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use gradwire_worker::{
    AllreduceOptions, CallSite, GradwireError, Handle, ReduceOp, Session, SharedBuffer,
};
use tch::{Device, Tensor, no_grad};

use crate::{
    Error, Result,
    mirror::buffer_like,
    shim::{Hook, is_alone, set_gradient, tensor_over},
};

/// The common part of all gradients of an optimizer.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) session: Session,
    pub(crate) op: ReduceOp,
    /// The program's line of the current pass: the hooks run far away from it.
    pub(crate) site: Mutex<CallSite>,
}

/// A parameter with the place of its gradient.
#[derive(Debug)]
pub(crate) struct Gradient {
    shared: Arc<Shared>,
    /// `None` while the parameter is frozen.
    hook: Option<Hook>,
}

#[derive(Debug)]
struct Shared {
    common: Arc<Common>,
    name: String,
    priority: i32,
    /// Held by the thread of the backward pass while it starts the exchange, and by the optimizer
    /// before and after the pass.
    state: Mutex<GradientState>,
}

#[derive(Debug)]
struct GradientState {
    variable: Tensor,
    /// Whether the next backward pass is the last before a step.
    armed: bool,
    /// A second pass changed the gradient during its exchange.
    again: bool,
    /// `None` while in flight, and after a failure.
    place: Option<Place>,
    flight: Option<Result<Flight>>,
}

/// Shared memory for a gradient.
#[derive(Debug)]
struct Place {
    memory: SharedBuffer,
    /// A tensor over the memory, which it keeps allocated. While it is the parameter's gradient,
    /// autograd and the program use it, too.
    view: Tensor,
}

/// An exchange in flight. The daemon reads and writes its memory.
#[derive(Debug)]
struct Flight {
    handle: Handle<SharedBuffer>,
    view: Tensor,
    /// Whether the parameter's gradient is elsewhere, for example on a GPU, and gets a copy of the
    /// result.
    copied_back: bool,
}

impl Gradient {
    /// Allocates memory for a gradient, which is exchanged as `name`, and registers its hook.
    ///
    /// # Errors
    /// If the element type is not supported, or memory can't be allocated.
    pub(crate) fn new(
        common: Arc<Common>,
        parameter: &str,
        name: &str,
        priority: i32,
        variable: Tensor,
    ) -> Result<Self> {
        let place = Some(Place::new(&common.session, parameter, &variable)?);
        let state = GradientState { variable, armed: false, again: false, place, flight: None };
        let state = Mutex::new(state);
        let shared = Arc::new(Shared { common, name: name.to_owned(), priority, state });
        let mut gradient = Self { shared, hook: None };
        gradient.watch()?;
        Ok(gradient)
    }

    /// Ensures that the parameter has a hook, if it takes gradients.
    fn watch(&mut self) -> Result<()> {
        let state = self.shared.lock()?;
        if !state.variable.requires_grad() {
            self.hook = None;
        } else if !self.hook.as_ref().is_some_and(|hook| hook.sees(&state.variable)) {
            // A graph that outlives the optimizer keeps the hook, but must not keep the session.
            let shared = Arc::downgrade(&self.shared);
            let ready = move || shared.upgrade().iter().for_each(|shared| shared.ready());
            self.hook = Some(Hook::new(&state.variable, ready)?);
        }
        Ok(())
    }

    /// From now on a backward pass starts the exchange.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub(crate) fn arm(&mut self) -> Result<()> {
        self.watch()?;
        self.shared.lock()?.armed = true;
        Ok(())
    }

    /// Starts the exchange, unless the backward pass has done so. If the pass has not reached the
    /// parameter, zeros are exchanged: all ranks must submit, and others may have a gradient.
    pub(crate) fn start(&self) -> Result<()> {
        let mut state = self.shared.lock()?;
        state.armed = false;
        if state.flight.is_none() {
            let started = self.shared.start(&mut state);
            state.flight = Some(started);
        }
        if matches!(state.flight, Some(Err(_))) {
            return state.flight.take().map_or(Ok(()), |failed| failed.map(drop));
        }
        Ok(())
    }

    /// Waits for the exchange. Afterwards the result is the parameter's gradient.
    ///
    /// # Errors
    /// If the exchange failed or was not started.
    pub(crate) fn finish(&self) -> Result<()> {
        let mut state = self.shared.lock()?;
        let (again, flight) = (std::mem::take(&mut state.again), state.flight.take());
        let Some(flight) = flight.transpose()? else { return Ok(()) };
        let memory = match flight.handle.wait() {
            Ok(memory) => memory,
            Err(error) => {
                // A failed exchange leaves undefined contents.
                set_gradient(&state.variable, None)?;
                return Err(error.into());
            }
        };
        if flight.copied_back {
            let mut gradient = state.variable.f_grad()?;
            no_grad(|| gradient.f_copy_(&flight.view))?;
        }
        state.place = Some(Place { memory, view: flight.view });
        if again {
            return Err(GradwireError::Invalid(format!(
                "'{}' was computed again while it was exchanged: two backward passes ran at the \
                 same time; let them end one after the other",
                self.shared.name
            ))
            .into());
        }
        Ok(())
    }

    /// Waits until `end` for an exchange whose result is not needed. If it has not ended by then,
    /// or has failed, its memory is no longer the parameter's gradient.
    pub(crate) fn abandon(&self, end: Instant) {
        let Ok(mut state) = self.shared.lock() else { return };
        (state.armed, state.again) = (false, false);
        let Some(Ok(flight)) = state.flight.take() else { return };
        let within = end.saturating_duration_since(Instant::now());
        match flight.handle.wait_timeout(within) {
            Ok(memory) => state.place = Some(Place { memory, view: flight.view }),
            // The caller reports an earlier failure.
            Err(_) => drop(set_gradient(&state.variable, None)),
        }
    }
}

impl Shared {
    fn lock(&self) -> Result<MutexGuard<'_, GradientState>> {
        self.state.lock().map_err(|_| Error::Panicked { name: self.name.clone() })
    }

    /// The hook: a backward pass has added to the gradient.
    fn ready(&self) {
        // The optimizer reports a poisoned lock.
        let Ok(mut state) = self.state.lock() else { return };
        if state.flight.is_some() {
            state.again = true;
        } else if state.armed {
            let started = self.start(&mut state);
            state.flight = Some(started);
        }
    }

    fn start(&self, state: &mut GradientState) -> Result<Flight> {
        let gradient = state.variable.f_grad()?;
        let (place, copied_back) = self.load(state.place.take(), &state.variable, &gradient)?;
        let options =
            AllreduceOptions::named(self.name.as_str()).op(self.common.op).priority(self.priority);
        let site = *self.common.site.lock().unwrap_or_else(PoisonError::into_inner);
        let session = self.common.session.called_at(site);
        let handle = session.allreduce_async(place.memory, options);
        let handle = handle.map_err(GradwireError::from)?;
        Ok(Flight { handle, view: place.view, copied_back })
    }

    /// Puts this rank's contribution into a place; returns whether the result must be copied back.
    fn load(
        &self,
        place: Option<Place>,
        variable: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Place, bool)> {
        let mut place = match place.filter(|place| place.fits(variable)) {
            Some(place) if place.holds(gradient) => return Ok((place, false)),
            Some(place) if is_alone(&place.view) => place,
            _ => Place::new(&self.common.session, &self.name, variable)?,
        };
        if gradient.defined() {
            no_grad(|| place.view.f_copy_(gradient))?;
            place.memory.mark_copied();
        } else {
            let _ = no_grad(|| place.view.f_zero_())?;
            if !variable.requires_grad() {
                return Ok((place, false)); // frozen: it gets no gradient and keeps its values
            }
        }
        let near = variable.device() == Device::Cpu;
        if near {
            set_gradient(variable, Some(&place.view))?;
        } else if !gradient.defined() {
            set_gradient(variable, Some(&no_grad(|| variable.f_zeros_like())?))?;
        }
        Ok((place, !near))
    }
}

impl Place {
    fn new(session: &Session, name: &str, like: &Tensor) -> Result<Self> {
        let memory = buffer_like(session, name, like)?.into_shared();
        let view = tensor_over(memory.clone(), like)?;
        Ok(Self { memory, view })
    }

    /// Whether a gradient of this parameter has the type and size of this place.
    fn fits(&self, variable: &Tensor) -> bool {
        (self.view.kind(), self.view.size()) == (variable.kind(), variable.size())
    }

    /// Whether a gradient is this memory.
    fn holds(&self, gradient: &Tensor) -> bool {
        gradient.defined()
            && gradient.device() == Device::Cpu
            && !gradient.is_sparse()
            && gradient.data_ptr() == self.view.data_ptr()
            && gradient.is_contiguous()
            && (gradient.kind(), gradient.size()) == (self.view.kind(), self.view.size())
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use gradwire_tests::cluster::{Cluster, Plan};
    use tch::{
        Kind,
        nn::{self, Init, OptimizerConfig},
    };

    use super::*;
    use crate::{DistributedOptimizer, OptimizerOptions};

    /// The backward pass of one rank waits in the middle until the other rank has the result of the
    /// last layer's exchange. It would wait forever if the exchange began after the pass.
    #[test]
    fn an_exchange_can_end_during_the_backward_pass() {
        let (has_result, result) = mpsc::channel();
        let (has_result, result) = (Mutex::new(has_result), Arc::new(Mutex::new(result)));
        let cluster = Cluster::start(&Plan::nodes(&[1, 1])).unwrap();
        let ended = cluster.ranks(move |session| {
            let options = |name: &str| AllreduceOptions::named(name).op(ReduceOp::Sum);
            if session.rank() == 1 {
                for name in ["gradient.last", "gradient.front"] {
                    let mut memory = session.tensor(&[5.0_f32; 3], &[3]).unwrap();
                    session.allreduce(&mut memory, options(name).priority(1)).unwrap();
                    has_result.lock().unwrap().send(memory.as_slice().to_vec()).unwrap();
                }
                return;
            }
            let store = nn::VarStore::new(Device::Cpu);
            let front = store.root().var("front", &[3], Init::Const(1.0));
            let last = store.root().var("last", &[3], Init::Const(1.0));
            let inner = nn::Sgd::default().build(&store, 1.0).unwrap();
            let with = OptimizerOptions { op: ReduceOp::Sum, ..Default::default() };
            let mut optimizer = DistributedOptimizer::new(session, inner, &store, with).unwrap();
            let (said, heard) = mpsc::channel();
            let said = Mutex::new(said);
            let result = result.clone();
            let in_the_pass = Hook::new(&front, move || {
                let got = result.lock().unwrap().recv_timeout(Duration::from_secs(60));
                said.lock().unwrap().send(got).unwrap();
            });
            let loss = ((&front * 2.0).tanh() + 1.0).dot(&(&last * 3.0));
            optimizer.backward_step(&loss).unwrap();
            let got = heard.try_recv().unwrap().expect("an exchange during the backward pass");
            let expected = 3.0 * (2.0_f32.tanh() + 1.0) + 5.0;
            assert!((got[0] - expected).abs() < 1e-5, "{got:?} {expected}");
            drop(in_the_pass);
        });
        ended.unwrap();
        cluster.finish().unwrap();
    }

    #[test]
    fn a_hook_contains_panics_and_can_be_dropped() {
        let store = nn::VarStore::new(Device::Cpu);
        let variable = store.root().var("x", &[2], Init::Const(1.0));
        let kept = Arc::new(());
        let (calls, inside) = (Arc::new(Mutex::new(0)), kept.clone());
        let count = calls.clone();
        let hook = Hook::new(&variable, move || {
            let _ = &inside;
            let mut count = count.lock().unwrap();
            *count += 1;
            panic!("on purpose");
        });
        let hook = hook.unwrap();
        assert!(hook.sees(&variable));
        (&variable * 2.0 + &variable).sum(Kind::Float).backward();
        assert!(calls.lock().is_err(), "it ran and panicked");
        assert_eq!(Arc::strong_count(&kept), 2);
        drop(hook);
        assert_eq!(Arc::strong_count(&kept), 1);
        variable.sum(Kind::Float).backward();
        let constant = Tensor::zeros([2], (Kind::Float, Device::Cpu));
        assert!(Hook::new(&constant, || {}).is_err());
    }

    /// A parameter is frozen and thawed while the program keeps the loss of an earlier step.
    #[test]
    fn an_old_graph_does_not_call_a_dropped_hook() {
        let store = nn::VarStore::new(Device::Cpu);
        let variable = store.root().var("x", &[2], Init::Const(1.0));
        let (told, calls) = mpsc::channel();
        let [first, second] = ["first", "second"].map(|name| {
            let told = Mutex::new(told.clone());
            move || told.lock().unwrap().send(name).unwrap()
        });
        let hook = Hook::new(&variable, first).unwrap();
        let kept = variable.sum(Kind::Float);
        drop(hook);
        let hook = Hook::new(&variable, second).unwrap();
        assert!(hook.sees(&variable));
        variable.sum(Kind::Float).backward();
        kept.backward();
        assert_eq!(calls.try_iter().collect::<Vec<_>>(), ["second"; 2]);
    }
}
