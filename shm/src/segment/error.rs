//! Why a segment could not be made or opened.

use std::io;

use rustix::io::Errno;

/// Why a segment could not be made or opened. Each text names the size and what to do.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// The size is zero, or not addressable.
    #[error("a segment of {bytes} bytes cannot be made: the size must be between 1 and 2^47 bytes")]
    Size {
        /// The requested size, in bytes.
        bytes: u64,
    },
    /// Not enough memory is available now.
    #[error(
        "shared memory of {bytes} bytes does not fit: {available} bytes are available ({limit}); \
         use fewer or smaller tensors, fewer ranks per node, or raise the limit"
    )]
    NoMemory {
        /// The requested size, in bytes.
        bytes: u64,
        /// The available bytes.
        available: u64,
        /// The limit that applies.
        limit: String,
    },
    /// Not enough huge pages are free.
    #[error(
        "shared memory of {bytes} bytes needs {pages} huge pages of 2 MiB, and {free} are free \
         (half of them are for its tensors, and half are kept to take these back from the daemon); \
         set vm.nr_hugepages to at least {more} more, or set worker.huge_pages=advise",
        more = .pages.saturating_sub(*.free)
    )]
    NoHugePages {
        /// The requested size, in bytes.
        bytes: u64,
        /// Huge pages that it needs, with those of its reserve.
        pages: u64,
        /// Huge pages that are free.
        free: u64,
    },
    /// The process may not make files this large; shared memory counts as a file.
    #[error(
        "shared memory of {bytes} bytes exceeds this process's file size limit of {limit} bytes; \
         raise it with ulimit -f"
    )]
    FileSizeLimit {
        /// The requested size, in bytes.
        bytes: u64,
        /// The limit (RLIMIT_FSIZE), in bytes.
        limit: u64,
    },
    /// The descriptor is not memory sealed against shrinking and growing.
    #[error(
        "the file descriptor is not memory sealed against shrinking and growing: {found}; only a \
         memfd with F_SEAL_SHRINK and F_SEAL_GROW is accepted"
    )]
    Unsealed {
        /// What it is instead.
        found: String,
    },
    /// The memory is empty or larger than allowed.
    #[error("a segment of {bytes} bytes was handed over, but 1 to {max} bytes are allowed")]
    OutOfRange {
        /// Its size, in bytes.
        bytes: u64,
        /// The limit, in bytes.
        max: u64,
    },
    /// It was opened before, or it accepts no more seals.
    #[error(
        "the segment cannot be sealed against holes, its seals are {found}: it was opened before, \
         or its maker has forbidden further seals; hand over memory that nobody has opened"
    )]
    NotOurs {
        /// Its seals.
        found: String,
    },
    /// The program's memory cannot be adopted.
    #[error(
        "memory of {bytes} bytes at {address:#x} cannot be adopted: it is not exactly the mapping \
         of file descriptor {fd}"
    )]
    NotAMapping {
        /// Its first byte.
        address: usize,
        /// Its size, in bytes.
        bytes: u64,
        /// The descriptor that should be mapped there.
        fd: i32,
    },
    /// The kernel refused a step.
    #[error("could not {step} for shared memory of {bytes} bytes: {source}{hint}")]
    System {
        /// The step.
        step: &'static str,
        /// The size, in bytes.
        bytes: u64,
        /// The kernel's error.
        source: io::Error,
        /// What to do, beginning with a semicolon; may be empty.
        hint: &'static str,
    },
}

impl SegmentError {
    /// Whether this process or its machine lacks something, such as memory or address space. Any
    /// other error is a mistake in the segment itself.
    pub fn is_shortage(&self) -> bool {
        match self {
            Self::NoMemory { .. }
            | Self::NoHugePages { .. }
            | Self::FileSizeLimit { .. }
            | Self::System { .. } => true,
            Self::Size { .. }
            | Self::Unsealed { .. }
            | Self::OutOfRange { .. }
            | Self::NotOurs { .. }
            | Self::NotAMapping { .. } => false,
        }
    }

    pub(crate) fn io(step: &'static str, bytes: u64, error: io::Error) -> Self {
        match Errno::from_io_error(&error) {
            Some(errno) => Self::system(step, bytes, errno),
            None => Self::System { step, bytes, source: error, hint: "" },
        }
    }

    pub(super) fn system(step: &'static str, bytes: u64, errno: Errno) -> Self {
        let hint = match errno {
            Errno::NOMEM if step == "map memory" => {
                "; raise the address space limit (ulimit -v) or use smaller segments"
            }
            Errno::NOMEM | Errno::NOSPC | Errno::FAULT => {
                "; free memory, use smaller segments, or raise the memory limit of the job"
            }
            Errno::MFILE => "; raise the limit of open files (ulimit -n)",
            Errno::NFILE => "; raise the system's limit of open files (fs.file-max)",
            Errno::NOSYS | Errno::PERM => {
                "; allow memfd_create, ftruncate and fcntl in the container's seccomp profile"
            }
            _ => "",
        };
        Self::System { step, bytes, source: errno.into(), hint }
    }
}
