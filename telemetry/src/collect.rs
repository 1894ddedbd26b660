//! Values that are read from the system only when the metrics are scraped.
//!
//! They cost nothing between two scrapes. They are read on the thread that answers (`gw-http`), so
//! no other thread waits for them.

use std::{
    fmt::Debug,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;

/// Reads values and sets metrics to them.
pub trait Collect: Debug + Send + Sync {
    /// Called before the metrics are read, perhaps on two threads at once.
    fn collect(&self);
}

static COLLECTORS: Mutex<Vec<Weak<dyn Collect>>> = Mutex::new(Vec::new());

/// Registers a collector, to be called before each scrape as long as it lives.
pub fn on_scrape<T: Collect + 'static>(collector: &Arc<T>) {
    let collector: Weak<T> = Arc::downgrade(collector);
    COLLECTORS.lock().push(collector);
}

/// Calls all collectors, without holding the lock.
pub(crate) fn collect() {
    let mut living = Vec::new();
    COLLECTORS.lock().retain(|collector| {
        let collector = collector.upgrade();
        let lives = collector.is_some();
        living.extend(collector);
        lives
    });
    living.iter().for_each(|collector| collector.collect());
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[derive(Debug, Default)]
    struct Calls(AtomicU32);

    impl Collect for Calls {
        fn collect(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_collector_is_called_as_long_as_it_lives() {
        let [first, second] = [(); 2].map(|()| Arc::new(Calls::default()));
        on_scrape(&first);
        on_scrape(&second);
        let calls = || [&first, &second].map(|calls| calls.0.load(Ordering::Relaxed));
        let before = calls();
        collect();
        let after = calls();
        assert!(after[0] > before[0] && after[1] > before[1], "{before:?} {after:?}");
        let weak = Arc::downgrade(&first);
        drop(first);
        collect();
        assert!(weak.upgrade().is_none());
        assert!(second.0.load(Ordering::Relaxed) > after[1]);
    }
}
