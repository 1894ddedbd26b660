//! The text of a panic, for the other ranks.

use std::{cell::RefCell, panic, sync::Once, thread};

thread_local! {
    /// The last panic of the thread.
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// From now on the text of each panic is kept, in addition to what the program does with it.
pub(crate) fn keep_texts() {
    static ONCE: Once = Once::new();
    // The hook can't be changed by a thread that panics.
    if thread::panicking() {
        return;
    }
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let payload = info.payload();
            let text = payload.downcast_ref::<&str>().copied();
            let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
            let place = info.location().map(|at| format!(" at {at}")).unwrap_or_default();
            let text = format!("it panicked{place}: {}", text.unwrap_or("without a text"));
            LAST.with(|last| *last.borrow_mut() = Some(text));
            before(info);
        }));
    });
}

/// What happened, if this thread panics.
pub(crate) fn current() -> Option<String> {
    let unknown = || "it panicked".to_owned();
    thread::panicking().then(|| LAST.with(|last| last.borrow().clone()).unwrap_or_else(unknown))
}
