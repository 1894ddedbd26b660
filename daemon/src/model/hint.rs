//! Hints for errors of the system.

use std::io;

use rustix::io::Errno;

/// What to do if the system has refused a descriptor, memory or a thread; otherwise empty.
#[must_use]
pub(crate) fn resource_hint(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE | Errno::NFILE) => "; raise gradwired's limit of open files (ulimit -n)",
        Some(Errno::AGAIN | Errno::NOMEM) => {
            "; raise gradwired's limits of memory and processes (ulimit -v -u)"
        }
        _ => "",
    }
}
