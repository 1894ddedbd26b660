//! The line of progress at the end of the terminal, which is rewritten. Pure: it returns what to
//! write to standard error.

/// Moves to the beginning of the line and clears it.
pub const CLEAR: &str = "\r\x1b[K";

/// The line of progress.
#[derive(Debug, Default)]
pub struct Progress {
    text: String,
    /// Whether some line is on the terminal, and whether it has this text.
    is_shown: bool,
    is_new: bool,
}

impl Progress {
    /// Sets the text, without control characters (TRUST); empty for no line.
    pub fn set(&mut self, text: String) {
        let text: String = text.chars().filter(|one| !one.is_control()).collect();
        self.is_new |= text != self.text;
        self.text = text;
    }

    /// What shows the line, if that changes anything.
    pub fn show(&mut self) -> String {
        if self.is_shown && !self.is_new {
            return String::new();
        }
        let clear = self.hide();
        self.is_new = false;
        self.is_shown = !self.text.is_empty();
        format!("{clear}{}", self.text)
    }

    /// What removes the line before other output; empty if there is none.
    pub fn hide(&mut self) -> &'static str {
        if std::mem::take(&mut self.is_shown) { CLEAR } else { "" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_output_never_shares_its_line() {
        let mut progress = Progress::default();
        assert_eq!(progress.show() + progress.hide(), "", "nothing is written without a text");
        progress.set("step 1".into());
        assert_eq!(progress.show(), "step 1");
        assert_eq!(progress.show(), "", "it is there");
        progress.set("step 2\x1b[2J".into());
        assert_eq!(progress.show(), format!("{CLEAR}step 2[2J"), "TRUST");
        assert_eq!(progress.hide(), CLEAR);
        assert_eq!(progress.hide(), "");
        // It comes back after the output.
        assert_eq!(progress.show(), "step 2[2J");
        progress.set(String::new());
        assert_eq!(progress.show(), CLEAR);
        assert_eq!(progress.show(), "");
    }
}
