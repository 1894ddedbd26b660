//! Leaving the job at the very end of the process. Only there is its exit code known, which says
//! whether the rank has done its work: Python's own `atexit` can't tell `sys.exit(3)` from a good
//! end.
//!
//! The C library tells the code to whom it has been asked to (`on_exit`), when the interpreter is
//! gone. The only room of this crate besides `dlpack` with `unsafe`.

use std::{
    ffi::{c_int, c_void},
    sync::{Mutex, PoisonError},
    thread::sleep,
    time::{Duration, Instant},
};

use gradwire_worker::Session;
use rustix::process::{Pid, WaitOptions, waitpid};

/// How long services may take to end where this rank has not left in good order.
const FAREWELL: Duration = Duration::from_secs(5);

const LOOK: Duration = Duration::from_millis(10);

/// What is left to be done.
struct Last {
    session: Session,
    /// The processes that serve the job for as long as others need them.
    services: Vec<i32>,
}

static LAST: Mutex<Option<Last>> = Mutex::new(None);

unsafe extern "C" {
    fn on_exit(
        function: extern "C" fn(status: c_int, argument: *mut c_void),
        argument: *mut c_void,
    ) -> c_int;
}

/// Leaves the job when the process ends, in good order if its exit code is 0. Then waits for
/// `services`, children of this process, which end with the job. False if that can't be arranged.
pub(crate) fn leave(session: Session, services: Vec<i32>) -> bool {
    let last = Last { session, services };
    *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
    // SAFETY: the function is of the kind that the C library calls, lives as long as the process,
    // as modules of Python's are never unloaded, and does not look at its argument.
    unsafe { on_exit(finish, std::ptr::null_mut()) == 0 }
}

extern "C" fn finish(status: c_int, _: *mut c_void) {
    let Some(last) = LAST.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
    // What the system keeps of it. A forked child comes here too, where the session does nothing.
    let code = status & 0xff;
    let left = if code == 0 {
        last.session.shutdown().is_ok()
    } else {
        last.session.abort(&format!("it ended with exit code {code}"));
        false
    };
    let deadline = (!left).then(|| Instant::now() + FAREWELL);
    for service in last.services.into_iter().filter_map(Pid::from_raw) {
        // An error means that it is not there any more, or not ours: that of a parent that forked.
        while let Ok(None) = waitpid(Some(service), WaitOptions::NOHANG) {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return; // it ends with this process
            }
            sleep(LOOK);
        }
    }
}
