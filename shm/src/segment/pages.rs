//! The pages that a segment is made of.

/// Whether a segment is made of huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Small pages only.
    Never,
    /// Huge pages where the kernel offers them for shared memory
    /// (`/sys/kernel/mm/transparent_hugepage/shmem_enabled` set to `advise` or more).
    #[default]
    Advise,
    /// 2 MiB pages from the kernel's pool (`vm.nr_hugepages`), or an error. An arena takes each
    /// page twice: once for the segment, and once for the copy that replaces it if the daemon can't
    /// be asked to stop.
    Require,
}

/// A huge page of x86-64 and aarch64, in bytes.
pub const HUGE_PAGE: u64 = 2 << 20;

impl HugePages {
    /// The size of a page, in bytes.
    pub(super) fn page(self) -> u64 {
        match self {
            Self::Require => HUGE_PAGE,
            Self::Never | Self::Advise => rustix::param::page_size() as u64,
        }
    }
}
