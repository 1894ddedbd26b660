//! Shared memory of huge pages from the kernel's pool, when the pool is small or empty: an error,
//! never a signal.

#[expect(dead_code, reason = "other tests use the rest of it")]
mod fake;

use std::{
    fs::{self, File},
    thread,
};

use fake::FakeDaemon;
use gradwire_worker::{AllreduceOptions, ArenaError, GradwireError, HugePages, SegmentError};

const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// The system's pool of huge pages, which this test changes. Restored on drop.
struct Pool {
    before: u64,
    /// Other tests that change the pool wait for this one.
    _alone: File,
}

fn number(path: &str) -> u64 {
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

fn of_pool(file: &str) -> u64 {
    number(&format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{file}"))
}

impl Pool {
    fn take() -> Result<Self, String> {
        let failed = |error| format!("{POOL} can't be changed: {error}");
        let alone = File::options().write(true).open(POOL).map_err(failed)?;
        alone.lock().map_err(failed)?;
        let pool = Self { before: number(POOL), _alone: alone };
        if of_pool("nr_overcommit_hugepages") > 0 {
            return Err("this system makes huge pages beyond its pool".to_owned());
        }
        Ok(pool)
    }

    /// Makes this many pages free.
    fn set_free(&self, pages: u64) -> Result<(), String> {
        let used = of_pool("nr_hugepages") - of_pool("free_hugepages") + of_pool("resv_hugepages");
        fs::write(POOL, (used + pages).to_string()).map_err(|error| error.to_string())?;
        let free = of_pool("free_hugepages") - of_pool("resv_hugepages");
        if free == pages { Ok(()) } else { Err(format!("{free} of {pages} huge pages are free")) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        fs::write(POOL, self.before.to_string()).unwrap();
    }
}

#[test]
fn a_full_pool_of_huge_pages_is_an_error() {
    let ended = Pool::take().and_then(|pool| {
        pool.set_free(2)?;
        works_to_the_end();
        for pages in [3, 1, 0] {
            pool.set_free(pages)?;
            is_refused(pages);
        }
        Ok(())
    });
    if let Err(reason) = ended {
        println!("skipped: {reason}");
    }
}

/// Elements of a tensor in the first segment, which is one page.
const ELEMENTS: usize = 1000;

/// A segment fits. Its tensors can be used after the daemon was lost within an operation, too.
fn works_to_the_end() {
    let daemon = FakeDaemon::start(1);
    let session = daemon.rank(0).huge_pages(HugePages::Require).attach().unwrap();
    let mut other = session.zeros::<f32>(&[ELEMENTS]).unwrap();
    let mut tensor = session.zeros::<f32>(&[ELEMENTS]).unwrap();
    let is_full = session.zeros::<f32>(&[1 << 20]).unwrap_err().to_string();
    assert!(is_full.contains("4 huge pages of 2 MiB"), "{is_full}");
    thread::scope(|scope| {
        let waits = scope
            .spawn(|| session.allreduce(&mut tensor, AllreduceOptions::named("hold")).unwrap_err());
        daemon.lent(0, "hold");
        session.allreduce_slice(&mut [0.0f32], AllreduceOptions::named("die")).unwrap_err();
        let error = waits.join().unwrap();
        assert!(error.to_string().contains("gradwired"), "{error}");
    });
    assert_eq!(tensor[..], [0.0; ELEMENTS]);
    for tensor in [&mut tensor, &mut other] {
        tensor.fill(1.0);
        assert_eq!(tensor[..], [1.0; ELEMENTS]);
    }
}

/// With this many free pages a segment of two pages does not fit. The session continues.
fn is_refused(free: u64) {
    let daemon = FakeDaemon::start(1);
    let session = daemon.rank(0).huge_pages(HugePages::Require).attach().unwrap();
    let error = session.zeros::<f32>(&[1 << 20]).unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(
            error,
            GradwireError::Arena(ArenaError::Segment(SegmentError::NoHugePages { .. }))
        ),
        "{text}"
    );
    assert!(text.contains(&format!("needs 4 huge pages of 2 MiB, and {free} are free")), "{text}");
    assert!(text.contains("vm.nr_hugepages") && text.contains("worker.huge_pages"), "{text}");
    session.shutdown().unwrap();
}
