//! Descriptors 0 to 2 belong to the standard streams, even in a process that has closed them: what
//! some library prints must not go into a socket of this one.

use std::{
    fs::File,
    os::fd::{AsRawFd, IntoRawFd},
};

/// Opens `/dev/null` in place of each standard stream that is closed. It stays open.
pub(crate) fn hold() {
    // A new descriptor is the lowest that is free.
    while let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        if null.as_raw_fd() > 2 {
            return;
        }
        let _ = null.into_raw_fd();
    }
}
