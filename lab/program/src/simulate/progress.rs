//! What a long command does, in one line that is rewritten. Nothing is shown unless standard error
//! is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// How often the elapsed time is shown.
const TICK: Duration = Duration::from_millis(200);

/// The line; it disappears with this value.
#[derive(Debug)]
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// An empty line, which shows the elapsed time.
    pub(super) fn new() -> Self {
        let bar = ProgressBar::no_length();
        bar.set_style(style("{spinner} {elapsed} {msg}"));
        bar.enable_steady_tick(TICK);
        Self(bar)
    }

    /// Shows what is done meanwhile.
    pub(super) fn about(&self, what: &'static str) {
        self.0.set_message(what);
    }

    /// One of `all` things is done.
    pub(super) fn one_of(&self, all: usize, what: &'static str) {
        if self.0.length().is_none() {
            self.0.set_style(style("{spinner} {elapsed} {pos} of {len} {msg}"));
            self.0.set_length(all as u64);
            self.0.set_message(what);
        }
        self.0.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is part of this program")
}
