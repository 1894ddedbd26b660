//! Leaves the job at the very end of the process, when the exit code is known. Python's own
//! `atexit` can't distinguish `sys.exit(3)` from success.
//!
//! The C library passes the code to functions registered with `on_exit`, after the interpreter has
//! ended.

use std::{
    ffi::{c_int, c_void},
    sync::{Mutex, PoisonError},
    thread::sleep,
    time::{Duration, Instant},
};

use gradwire_worker::Session;
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::handle::Running;

/// How long services may take to exit if this rank has not left cleanly.
const GRACE: Duration = Duration::from_secs(5);

/// How long the last operations may take. A rank that still waits for this one in another operation
/// learns only afterwards that it has left, so this is shorter than `negotiation.stall_warning_ms`.
const LAST: Duration = Duration::from_secs(2);

/// The pause between two checks of a service.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The work to do when the process ends.
struct Departure {
    session: Session,
    /// The processes that serve the job until no rank needs them.
    services: Vec<i32>,
    /// Operations that need all ranks, without which this one can't leave cleanly.
    last: Vec<Box<dyn Running>>,
}

static DEPARTURE: Mutex<Option<Departure>> = Mutex::new(None);

unsafe extern "C" {
    fn on_exit(
        function: extern "C" fn(status: c_int, argument: *mut c_void),
        argument: *mut c_void,
    ) -> c_int;
}

/// Leaves the job when the process ends, cleanly if its exit code is 0. Then waits for `services`,
/// child processes that exit with the job. Before it leaves cleanly, it waits a while for the
/// `last` operations. Returns false if the C library rejects the registration.
pub(crate) fn leave(session: Session, services: Vec<i32>, last: Vec<Box<dyn Running>>) -> bool {
    let departure = Departure { session, services, last };
    *DEPARTURE.lock().unwrap_or_else(PoisonError::into_inner) = Some(departure);
    // SAFETY: the function has the signature that the C library expects, lives as long as the
    // process because Python never unloads modules, and does not use its argument.
    unsafe { on_exit(finish, std::ptr::null_mut()) == 0 }
}

extern "C" fn finish(status: c_int, _: *mut c_void) {
    let Some(departure) = DEPARTURE.lock().unwrap_or_else(PoisonError::into_inner).take() else {
        return;
    };
    // The system keeps only these bits. Forked children also get here; their session does nothing.
    let code = status & 0xff;
    let left = if code == 0 {
        let deadline = Instant::now() + LAST;
        for operation in departure.last {
            // Whether it has succeeded does not matter any more.
            drop(operation.wait(deadline.saturating_duration_since(Instant::now())));
        }
        departure.session.shutdown().is_ok()
    } else {
        // A program may catch an error and end with a code of its own.
        let cause = departure.session.last_failure();
        departure.session.abort_after(&format!("it ended with exit code {code}"), cause.as_ref());
        false
    };
    let deadline = (!left).then(|| Instant::now() + GRACE);
    for service in departure.services.into_iter().filter_map(Pid::from_raw) {
        // An error means that the service is gone, or is not a child of this forked process.
        while let Ok(None) = waitpid(Some(service), WaitOptions::NOHANG) {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return; // the service ends with this process
            }
            sleep(POLL_INTERVAL);
        }
    }
}
