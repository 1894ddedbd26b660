//! The lines of the program that a rank submits operations from. A rank numbers them, and says the
//! text of a number in the first submission that has it.

use std::sync::Arc;

use gradwire_shm::control::{CallSite, MAX_CALL_SITES};
use parking_lot::Mutex;

/// What one rank has said (BOUND: by the limits of numbers and texts, which are checked where a
/// submission is read).
#[derive(Debug, Default)]
pub(crate) struct CallSites(Mutex<Vec<Arc<str>>>);

impl CallSites {
    /// The text of a submission's call site; empty if it is not known.
    pub(crate) fn text(&self, site: &CallSite) -> Arc<str> {
        let number = site.number.min(MAX_CALL_SITES) as usize;
        let mut texts = self.0.lock();
        if !site.text.is_empty() {
            if texts.len() <= number {
                texts.resize(number + 1, Arc::default());
            }
            texts[number] = site.text.clone();
        }
        texts.get(number).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_remembered_by_its_number() {
        let sites = CallSites::default();
        let of = |number, text: &str| sites.text(&CallSite { number, text: text.into() });
        assert_eq!(&*of(7, "train.py:3 in step"), "train.py:3 in step");
        assert_eq!(&*of(7, ""), "train.py:3 in step");
        assert_eq!(&*of(3, ""), "");
        assert_eq!(&*of(9000, ""), "", "TRUST");
    }
}
