//! Starting operations in compiled programs, and waiting for them.
//!
//! `start` copies its tensor to shared memory, submits the operation and returns a token: the
//! number under which this module keeps it. `done` takes the tokens of all starts of a call. It
//! returns at once, too, with a promise: a thread of its own waits, copies the results to where XLA
//! wants them, and keeps the promise. So no thread of XLA ever blocks, and no order in which XLA
//! starts operations on different ranks is a deadlock.
//!
//! Keeping a promise may run the rest of the program, so the thread is not shared with other calls.
//!
//! Nothing fails in `start`: the token of an operation that was not started stands for the error,
//! which `done` reports. So an error always ends the call as a whole.

use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use gradwire_worker::{
    AllgatherOptions, AllreduceOptions, AlltoallOptions, BarrierOptions, BroadcastOptions,
    CallSite, GradwireError, ProcessSet, ReduceOp, ReduceScatterOptions, Session, SharedBuffer,
};

use super::abi::{Call, Handlers, Operand, Promise};
use crate::{
    dlpack,
    error::PythonError,
    handle::{IntoValue, Running, Value},
    options::{Common, apply, parse},
};

/// What XLA's calls do.
pub(crate) struct Exchange;

impl Handlers for Exchange {
    fn start(call: &mut Call<'_>) -> Result<(), String> {
        start(call)
    }

    fn done(call: &mut Call<'_>) -> Result<(), String> {
        done(call)
    }
}

/// The most operations that were started and not waited for (BOUND). A program that fails between
/// its starts and its end leaves some.
const MAX_STARTED: usize = 65_536;

/// A wait with a limit does not claim that the process is stuck: XLA's threads may do anything.
const SLICE: Duration = Duration::from_secs(60);

/// An operation that was started, or why it was not.
type Started = Result<Box<dyn Running>, PythonError>;

/// A start and the name of its operation.
type Named = (String, Started);

/// What compiled programs use.
#[derive(Default)]
struct Job {
    session: Option<Session>,
    /// By their numbers; without the set of all ranks.
    sets: HashMap<u32, ProcessSet>,
    /// By their tokens.
    started: HashMap<u64, Named>,
    last_token: u64,
    last_error: Option<PythonError>,
}

static JOB: LazyLock<Mutex<Job>> = LazyLock::new(Mutex::default);

fn job() -> MutexGuard<'static, Job> {
    JOB.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on compiled programs use this session, or none.
pub(crate) fn bind(session: Option<Session>) {
    let old = {
        let mut job = job();
        let old = Job { session, last_token: job.last_token, ..Job::default() };
        std::mem::replace(&mut *job, old)
    };
    drop(old); // without the lock
}

/// From now on compiled programs can use this process set.
pub(crate) fn know(set: &ProcessSet) {
    job().sets.insert(set.id(), set.clone());
}

/// The error with which the last call in a compiled program has failed.
pub(crate) fn last_error() -> Option<PythonError> {
    job().last_error.clone()
}

/// Submits an operation, and gives its token to XLA as the last result.
fn start(call: &Call<'_>) -> Result<(), String> {
    let started = begin(call);
    let token = {
        let mut job = job();
        if job.started.len() >= MAX_STARTED {
            return Err(format!("{MAX_STARTED} operations were started and never waited for"));
        }
        job.last_token += 1;
        let token = job.last_token;
        job.started.insert(token, (call.text("name").to_owned(), started));
        token
    };
    call.write_token(token)
}

fn begin(call: &Call<'_>) -> Started {
    let id: u32 = number(call, "process_set")?;
    let (session, set) = {
        let job = job();
        let session = job.session.clone().ok_or(GradwireError::Closed)?;
        let unknown = || PythonError::invalid(format!("process set {id} was removed"));
        let set = match id {
            0 => None,
            _ => Some(job.sets.get(&id).cloned().ok_or_else(unknown)?),
        };
        let site = call.text("site");
        let site = if site.is_empty() { CallSite::UNKNOWN } else { CallSite::new(site) };
        (session.called_at(site), set)
    };
    let common = Common { name: Some(call.text("name").to_owned()), set };
    let tensor = || tensor(&session, call);
    let op = || parse::<ReduceOp>("reduction", call.text("op"), ReduceOp::NAMES);
    match call.text("collective") {
        "allreduce" => {
            let options = apply!(common, AllreduceOptions::default()).op(op()?);
            let options = options.prescale(number::<f64>(call, "prescale")?);
            let options = options.postscale(number::<f64>(call, "postscale")?);
            running(session.allreduce_async(tensor()?, options))
        }
        "reducescatter" => {
            let options = apply!(common, ReduceScatterOptions::default()).op(op()?);
            let options = options.prescale(number::<f64>(call, "prescale")?);
            let options = options.postscale(number::<f64>(call, "postscale")?);
            running(session.reducescatter_async(tensor()?, options))
        }
        "broadcast" => {
            let root = BroadcastOptions::from_rank(number::<u32>(call, "root")?);
            running(session.broadcast_async(tensor()?, apply!(common, root)))
        }
        "allgather" => {
            let options = apply!(common, AllgatherOptions::default());
            running(session.allgather_async(tensor()?, options))
        }
        "alltoall" => {
            let options = apply!(common, AlltoallOptions::default());
            running(session.alltoall_async(tensor()?, options))
        }
        "barrier" => {
            let options = apply!(common, BarrierOptions::default());
            running(session.barrier_with_async(options))
        }
        other => Err(PythonError::invalid(format!("unknown collective '{other}'"))),
    }
}

fn running<P: IntoValue, E: Into<PythonError>>(
    started: Result<gradwire_worker::Handle<P>, E>,
) -> Started {
    Ok(Box::new(started.map_err(Into::into)?))
}

/// A number among the attributes of a call.
fn number<T: std::str::FromStr>(call: &Call<'_>, name: &str) -> Result<T, PythonError> {
    let text = call.text(name);
    text.parse().map_err(|_| PythonError::invalid(format!("{name}={text:?} is not a number")))
}

/// A copy of the first argument in shared memory.
fn tensor(session: &Session, call: &Call<'_>) -> Result<SharedBuffer, PythonError> {
    let given = call.arguments.first();
    let given = given.ok_or_else(|| PythonError::invalid("a start without a tensor"))?;
    let unknown = || PythonError::invalid("the element type of this array can't be exchanged");
    let dtype = given.dtype.ok_or_else(unknown)?;
    let buffer = session.buffer_unfilled(dtype, &given.shape)?.into_shared();
    if buffer.byte_len() > 0 {
        dlpack::copy_from(&buffer, given.address);
    }
    buffer.mark_copied();
    Ok(buffer)
}

/// The operations of a call, and where XLA wants their results.
struct Waiting {
    operations: Vec<Named>,
    results: Vec<Operand>,
    /// The session of a call that is a training step.
    step: Option<Session>,
}

/// Waits for operations without blocking: the call ends later.
fn done(call: &mut Call<'_>) -> Result<(), String> {
    let tokens = call.tokens(number(call, "tokens").unwrap_or_default())?;
    let waiting = {
        let mut job = job();
        // The session under which it was started has ended.
        let lost = || (String::new(), Err(GradwireError::Closed.into()));
        let take = |token| job.started.remove(&token).unwrap_or_else(lost);
        let operations = tokens.into_iter().map(take).collect();
        let step = job.session.clone().filter(|_| call.text("step") == "1");
        Waiting { operations, results: call.results.clone(), step }
    };
    let has_ended = |(_, started): &Named| started.as_ref().map_or(true, |running| running.poll());
    if waiting.operations.iter().all(has_ended) {
        return waiting.finish();
    }
    let promise = call.promise()?;
    let finish = move || keep(promise, waiting.finish());
    // If the system refuses the thread, the promise is dropped, so the call fails.
    let thread = thread::Builder::new().name("gw-xla".to_owned()).spawn(finish);
    if let Err(error) = thread {
        job().last_error = Some(GradwireError::System { what: "a thread", source: error }.into());
    }
    Ok(())
}

fn keep(promise: Promise, ended: Result<(), String>) {
    match ended {
        Ok(()) => promise.keep(),
        Err(why) => promise.fail(&why),
    }
}

impl Waiting {
    /// Waits for all operations, and gives XLA their results. Fails with the text of the error.
    fn finish(self) -> Result<(), String> {
        let Self { operations, results, step } = self;
        let mut results = results.into_iter();
        let ended = operations.into_iter().try_for_each(|(name, started)| {
            let value = wait(started?)?;
            deliver(&name, &value, &mut results)
        });
        let noted = ended.map_err(|error| {
            let text = error.text().to_owned();
            job().last_error = Some(error);
            text
        });
        if let (Ok(()), Some(session)) = (&noted, step) {
            session.mark_step();
        }
        noted
    }
}

fn wait(mut running: Box<dyn Running>) -> Result<Value, PythonError> {
    loop {
        match running.wait(SLICE) {
            Ok(outcome) => return outcome,
            Err(still) => running = still,
        }
    }
}

/// Copies the result of an operation, if it has one, to the next place that XLA gives.
fn deliver(
    name: &str,
    value: &Value,
    places: &mut impl Iterator<Item = Operand>,
) -> Result<(), PythonError> {
    let (buffer, rows) = match value {
        Value::Buffers(all) => (all.first(), None),
        Value::Gathered(all) => (all.first().map(|(buffer, _)| buffer), all.first()),
        Value::Nothing | Value::Flag(_) | Value::Number(_) | Value::Set(_) => return Ok(()),
    };
    let lost = || PythonError::invalid(format!("'{name}' has no place for a result"));
    let (buffer, place) = buffer.zip(places.next()).ok_or_else(lost)?;
    // All ranks see the same rows, so all of them fail.
    let unequal = rows.is_some_and(|(_, rows)| rows.iter().any(|count| *count != rows[0]));
    if unequal || buffer.byte_len() != place.bytes() {
        let rows = rows.map(|(_, rows)| rows.as_slice()).unwrap_or_default();
        return Err(PythonError::invalid(format!(
            "'{name}': the ranks gave {rows:?} rows, but the sizes of results are fixed when a \
             program is compiled: all ranks must give the same number of rows"
        )));
    }
    if buffer.byte_len() > 0 {
        dlpack::copy_to(buffer, place.address);
    }
    Ok(())
}
