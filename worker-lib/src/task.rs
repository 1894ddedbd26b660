//! Operations of several parts: collectives that consist of other collectives. The parts run one
//! after the other, in the caller's thread or in a separate thread. So progress does not depend on
//! when a rank waits for its handle.
//!
//! TELL: once a part was submitted, the other ranks wait for the next one. So a rank that can't
//! continue for a local reason gives up, and all ranks receive the reason.

use std::{collections::HashMap, sync::Arc, thread};

use gradwire_proto::{Failure, FailureKind, ProcessSetId, TensorName};
use gradwire_shm::control::Origin;

use crate::{
    call_site::CallSite,
    epoch::Membership,
    error::{GradwireError, Result},
    handle::Handle,
    options::Common,
    outcome::Outcome,
    process_set::Members,
    session::Session,
    shared::Shared,
    tickets::Key,
    waiters::InParts,
    watch,
};

/// The most such operations in flight in a session (BOUND): each may have a thread.
const MAX_TASKS: usize = 256;

/// The longest suffix of a part's name, with its slash, in bytes.
const MAX_PART: usize = 16;

/// The failure that all ranks receive after a panic.
fn panicked(name: &TensorName) -> Failure {
    let what = format!("the operation on tensor '{name}' panicked");
    Failure::new(FailureKind::Internal, what)
}

/// Sets the outcome if the thread panics.
struct Ending<R> {
    outcome: Arc<Outcome<R>>,
    name: TensorName,
}

impl<R> Drop for Ending<R> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.outcome.set(Err(panicked(&self.name).into()));
        }
    }
}

/// Gives up if a blocking call panics: the other ranks wait for its next part (TELL), and the
/// memory that it has borrowed must be taken back.
pub(crate) struct Unwinding<'a> {
    shared: &'a Shared,
    name: &'a TensorName,
}

impl<'a> Unwinding<'a> {
    pub(crate) fn new(shared: &'a Shared, name: &'a TensorName) -> Self {
        Self { shared, name }
    }

    pub(crate) fn did_not_happen(self) {
        std::mem::forget(self);
    }
}

impl Drop for Unwinding<'_> {
    fn drop(&mut self) {
        self.shared.give_up(panicked(self.name));
    }
}

/// Registers an operation of several parts as in flight, until this is dropped.
struct Place {
    shared: Arc<Shared>,
    key: Key,
}

impl Place {
    /// Registers an operation; without a name it is named by its number.
    fn take(
        membership: &Membership,
        set: &Members,
        name: Option<String>,
        kind: &'static str,
        any_thread: bool,
    ) -> Result<Self> {
        let shared = membership.shared.clone();
        let number = set.number();
        let unnamed = || membership.unnamed(number, kind, any_thread);
        let numbered = name.is_none().then(unnamed).transpose()?;
        let name = numbered.as_ref().map(|numbered| numbered.name.clone()).or(name);
        let mut tasks = shared.tasks.lock();
        let checked = Self::free(&tasks, number, &name.unwrap_or_default(), kind);
        if let Ok(key) = &checked {
            tasks.insert(key.clone(), kind);
        }
        drop(tasks);
        // A refused call is not counted.
        if let Some(numbered) = &numbered {
            membership.settle(number, numbered, checked.is_ok());
        }
        Ok(Self { shared, key: checked? })
    }

    /// Checks that there is room (BOUND), and that a name is valid and not in flight.
    fn free(
        tasks: &HashMap<Key, &'static str>,
        set: ProcessSetId,
        name: &str,
        kind: &'static str,
    ) -> Result<Key> {
        if tasks.len() >= MAX_TASKS {
            return Err(GradwireError::Invalid(format!(
                "{MAX_TASKS} operations of several parts (objects, sparse allreduces, Adasum, \
                 large slices) are in flight, which is the limit; wait for some of them first"
            )));
        }
        let name = TensorName::new(name)?;
        let (given, max) = (name.as_str().len(), TensorName::MAX_BYTES - MAX_PART);
        if given > max {
            return Err(GradwireError::Invalid(format!(
                "the name of an operation of several parts may have {max} bytes, because each part \
                 adds to it, but has {given}"
            )));
        }
        let key = (set, name);
        if let Some(first) = tasks.get(&key) {
            let name = &key.1;
            return Err(GradwireError::Invalid(format!(
                "'{name}' is already in flight on this rank: {first} was started and has not \
                 ended, and now {kind} has the same name; wait for the first one, or use \
                 different names"
            )));
        }
        Ok(key)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.tasks.lock().remove(&self.key);
    }
}

/// An operation of several parts: its process set and the options of its parts. It is in flight
/// until the last clone of this is dropped.
#[derive(Clone)]
pub(crate) struct Parts {
    /// The epoch of all parts.
    membership: Arc<Membership>,
    place: Arc<Place>,
    pub(crate) set: Arc<Members>,
    common: Common,
    /// Where the program has called the whole operation.
    site: CallSite,
}

impl Parts {
    /// The name of the whole operation.
    pub(crate) fn name(&self) -> &TensorName {
        &self.place.key.1
    }

    /// The same rank in the epoch of all parts, for calls that come from where the whole operation
    /// was called.
    pub(crate) fn session(&self, rank: &Session) -> Session {
        rank.pinned_to(self.membership.clone()).called_at(self.site)
    }

    /// The options of a part.
    pub(crate) fn part(&self, ending: &str) -> Common {
        debug_assert!(ending.len() < MAX_PART);
        Common { name: Some(format!("{}/{ending}", self.name())), ..self.common.clone() }
    }

    /// The options of the first part, which exchanges numbers under the whole operation's name.
    pub(crate) fn whole(&self) -> Common {
        let name = Some(self.name().as_str().to_owned());
        Common { name, origin: Origin::Count, ..self.common.clone() }
    }

    /// The options of a part that exchanges numbers.
    pub(crate) fn counts(&self, ending: &str) -> Common {
        self.part_of(ending, Origin::Count)
    }

    /// The options of a part with another origin.
    pub(crate) fn part_of(&self, ending: &str, origin: Origin) -> Common {
        Common { origin, ..self.part(ending) }
    }

    /// Replaces the name of a part, which the program does not know, by that of the operation.
    fn as_whole(&self, error: GradwireError) -> GradwireError {
        let is_part = |tensor: &str| {
            tensor.strip_prefix(self.name().as_str()).is_some_and(|rest| rest.starts_with('/'))
        };
        match error {
            GradwireError::Failed(failure) if is_part(&failure.tensor) => {
                GradwireError::Failed(self.named(failure))
            }
            GradwireError::Recoverable(failure) if is_part(&failure.tensor) => {
                GradwireError::Recoverable(self.named(failure))
            }
            other => other,
        }
    }

    /// Adds the name of the whole operation to a failure that each rank finds by itself.
    pub(crate) fn named(&self, failure: Failure) -> Failure {
        failure.tensor(self.name().as_str())
    }
}

impl Session {
    /// Begins an operation of several parts. Without a name it is named by its number, such as
    /// `kind.#1`.
    #[track_caller]
    pub(crate) fn parts(
        &self,
        common: Common,
        kind: &'static str,
        origin: Origin,
    ) -> Result<Parts> {
        let site = self.site();
        self.check_process()?;
        let membership = self.membership();
        let Membership { shared, sets, .. } = &*membership;
        shared.check()?;
        let Common { name, priority, process_set, .. } = common;
        let set = sets.lock().of_member(process_set.as_ref())?;
        let place = Place::take(&membership, &set, name, kind, self.limits().any_thread);
        let place = Arc::new(shared.noted(place)?);
        let common = Common { name: None, priority, process_set, origin, kind: None };
        Ok(Parts { membership, place, set, common, site })
    }

    /// Runs parts in the caller's thread.
    pub(crate) fn run_parts<R>(
        &self,
        parts: &Parts,
        work: impl FnOnce(&Self) -> Result<R>,
    ) -> Result<R> {
        let session = parts.session(self);
        parts.membership.shared.noted(session.or_give_up(parts, work))
    }

    /// Runs parts in a separate thread.
    pub(crate) fn spawn_parts<R: Send + 'static>(
        &self,
        parts: Parts,
        work: impl FnOnce(&Self) -> Result<R> + Send + 'static,
    ) -> Result<Handle<R>> {
        let outcome = Arc::new(Outcome::default());
        let (session, name) = (parts.session(self), parts.name().clone());
        let ending = Ending { outcome: outcome.clone(), name: name.clone() };
        let of_handle = session.clone();
        watch::spawn("gw-task", move || {
            let ending = ending;
            let result = session.or_give_up(&parts, work);
            // Dropped first, because the outcome allows the caller to start the next operation or
            // to drop the session.
            drop((parts, session));
            ending.outcome.set(result);
        })?;
        Ok(Handle::task(of_handle, name, outcome))
    }

    /// The number of operations of several parts in flight.
    pub(crate) fn tasks(&self) -> usize {
        self.shared().tasks.lock().len()
    }

    /// The number of them in a process set.
    pub(crate) fn tasks_of(&self, set: ProcessSetId) -> usize {
        self.shared().tasks.lock().keys().filter(|(of, _)| *of == set).count()
    }

    fn or_give_up<R>(&self, parts: &Parts, work: impl FnOnce(&Self) -> Result<R>) -> Result<R> {
        let shared = &parts.membership.shared;
        let unwinding = Unwinding::new(shared, parts.name());
        let _in_parts = InParts::new();
        let result = work(self).map_err(|error| parts.as_whole(error));
        unwinding.did_not_happen();
        if let Err(error) = &result {
            match error {
                // All ranks receive the same error.
                GradwireError::Failed(_)
                | GradwireError::Recoverable(_)
                | GradwireError::Closed
                | GradwireError::Forked { .. } => {}
                error => {
                    let what = format!("it could not continue '{}': {error}", parts.name());
                    let kind = match error {
                        GradwireError::Arena(_) | GradwireError::System { .. } => {
                            FailureKind::Resource
                        }
                        _ => FailureKind::Internal,
                    };
                    shared.give_up(Failure::new(kind, what));
                }
            }
        }
        result
    }
}
