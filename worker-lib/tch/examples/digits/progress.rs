//! Rank 0's progress bar: epoch, loss, images per second.

use std::{
    fmt,
    io::{self, IsTerminal, Write},
    sync::Mutex,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

const REDRAWS_PER_SECOND: u8 = 4;

/// The progress bar for a total of `images` images; hidden on other ranks.
pub(crate) fn bar(images: u64, rank: usize, launched: bool) -> ProgressBar {
    let target = if rank != 0 {
        ProgressDrawTarget::hidden()
    } else if launched && !io::stderr().is_terminal() {
        ProgressDrawTarget::term_like_with_hz(Box::new(Pipe::default()), REDRAWS_PER_SECOND)
    } else {
        ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_SECOND)
    };
    let template = "{prefix} [{bar:24}] {percent:>3}% {msg} {per_sec}";
    let style = ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .with_key("per_sec", |state: &indicatif::ProgressState, f: &mut dyn fmt::Write| {
            // An error would only truncate the bar.
            let _ = write!(f, "{:.0} images/s", state.per_sec());
        })
        .progress_chars("=> ");
    ProgressBar::with_draw_target(Some(images), target).with_style(style)
}

/// The launcher's pipe, a terminal of one line without a cursor. The launcher forwards text that
/// ends in a carriage return unchanged, so that each update overwrites the previous one.
#[derive(Debug, Default)]
struct Pipe(Mutex<String>);

impl Pipe {
    fn with<R>(&self, change: impl FnOnce(&mut String) -> R) -> R {
        change(&mut self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }
}

impl TermLike for Pipe {
    fn width(&self) -> u16 {
        78
    }

    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.write_str(text)
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.with(|line| line.push_str(text));
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.with(String::clear);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let line = self.with(std::mem::take);
        let line = line.trim_matches('\r');
        if line.trim().is_empty() {
            return Ok(());
        }
        let mut stderr = io::stderr().lock();
        write!(stderr, "{line}\r")?;
        stderr.flush()
    }
}
