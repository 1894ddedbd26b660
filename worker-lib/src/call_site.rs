//! Call sites: the lines of the program that submit operations, for reports and errors.
//!
//! A call site is a small number of this process, so a submission that has one costs nothing more
//! than a look-up. Its text goes to a daemon once, in the first submission with that number.
//!
//! BOUND: a process has at most [`MAX_CALL_SITES`] of them. Later ones are "another place".

use std::{
    collections::HashMap,
    panic::Location,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use gradwire_shm::control::{self, MAX_CALL_SITE_BYTES, MAX_CALL_SITES, Submission};
use parking_lot::Mutex;

/// The line of the program that calls the library. Rust programs need not use it: the library finds
/// their lines itself. A language binding gives the lines of its language with
/// [`Session::called_at`](crate::Session::called_at).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallSite(u32);

/// The call sites of this process, by number from 1.
#[derive(Debug)]
struct Table {
    texts: Vec<Arc<str>>,
    by_text: HashMap<Arc<str>, CallSite>,
    /// By the address of the location.
    by_location: HashMap<usize, CallSite>,
    most: u32,
}

static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(|| Mutex::new(Table::new(MAX_CALL_SITES)));

/// The text of all call sites beyond the limit.
const OTHER: &str = "another place";

impl Table {
    /// An empty table for numbers below `most`.
    fn new(most: u32) -> Self {
        Self { texts: Vec::new(), by_text: HashMap::new(), by_location: HashMap::new(), most }
    }

    fn is_full(&self) -> bool {
        self.texts.len() + 2 >= self.most as usize
    }

    /// The number of a text.
    fn number(&mut self, text: &str) -> CallSite {
        if let Some(known) = self.by_text.get(text) {
            return *known;
        }
        if self.is_full() {
            return CallSite(self.most - 1);
        }
        let text: Arc<str> = text.into();
        self.texts.push(text.clone());
        let site = CallSite(self.texts.len() as u32);
        self.by_text.insert(text, site);
        site
    }

    fn of(&mut self, location: &'static Location<'static>) -> CallSite {
        let address = std::ptr::from_ref(location).addr();
        if let Some(known) = self.by_location.get(&address) {
            return *known;
        }
        if self.is_full() {
            return CallSite(self.most - 1);
        }
        let site = self.number(&limited(&format!("{}:{}", location.file(), location.line())));
        self.by_location.insert(address, site);
        site
    }

    fn text(&self, site: CallSite) -> Option<Arc<str>> {
        match site {
            CallSite(0) => None,
            CallSite(number) => {
                Some(self.texts.get(number as usize - 1).cloned().unwrap_or_else(|| OTHER.into()))
            }
        }
    }
}

/// A text of one line with a limited length (BOUND). The end is kept: it says most.
fn limited(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    if text.len() <= MAX_CALL_SITE_BYTES {
        return text;
    }
    let from = text.ceil_char_boundary(text.len() + '…'.len_utf8() - MAX_CALL_SITE_BYTES);
    format!("…{}", &text[from..])
}

impl CallSite {
    /// A call site that is not known.
    pub const UNKNOWN: Self = Self(0);

    /// The call site with this text, such as `train.py:12 in step`. A text of more than 256 bytes
    /// loses its beginning.
    pub fn new(text: &str) -> Self {
        let text = limited(text);
        TABLE.lock().number(&text)
    }

    /// The line that calls this function, or that calls a function with `#[track_caller]` which
    /// calls it.
    #[track_caller]
    pub fn here() -> Self {
        TABLE.lock().of(Location::caller())
    }

    /// The call site of a submission.
    pub(crate) fn of(submission: &Submission) -> Self {
        Self(submission.site.number)
    }

    /// Its text; `None` if it is not known.
    pub fn text(self) -> Option<Arc<str>> {
        TABLE.lock().text(self)
    }
}

/// Which call sites a daemon has learned.
#[derive(Debug)]
pub(crate) struct Learned(Box<[AtomicU64]>);

impl Default for Learned {
    fn default() -> Self {
        Self((0..MAX_CALL_SITES.div_ceil(u64::BITS)).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Learned {
    fn place(&self, number: u32) -> (&AtomicU64, u64) {
        (&self.0[(number / u64::BITS) as usize], 1 << (number % u64::BITS))
    }

    /// A call site as a submission has it: with its text until the daemon has learned it.
    pub(crate) fn describe(&self, site: CallSite) -> control::CallSite {
        let number = site.0;
        let (word, bit) = self.place(number);
        let is_known = number == 0 || word.load(Relaxed) & bit != 0;
        let text = if is_known { None } else { site.text() };
        control::CallSite { number, text: text.unwrap_or_default() }
    }

    /// Notes that a submission with this call site is in the ring. Threads that submit at the same
    /// time may both have sent its text.
    pub(crate) fn sent(&self, site: &control::CallSite) {
        if !site.text.is_empty() {
            let (word, bit) = self.place(site.number);
            word.fetch_or(bit, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn called() -> CallSite {
        CallSite::here()
    }

    #[test]
    fn a_call_site_is_the_line_of_the_caller() {
        let first = called();
        let second = called();
        let both = [called(), called()];
        assert_ne!(first, second);
        assert_eq!(both[0], both[1], "one line has one number");
        let text = first.text().unwrap();
        assert!(text.contains("call_site.rs:"), "{text}");
        assert_eq!(CallSite::UNKNOWN.text(), None);
    }

    #[test]
    fn call_sites_beyond_the_limit_share_a_number() {
        let mut table = Table::new(5);
        let sites: Vec<_> = ["a", "b", "c", "d", "e"].map(|text| table.number(text).0).to_vec();
        assert_eq!(sites, [1, 2, 3, 4, 4], "BOUND");
        let texts = [1, 3, 4].map(|number| table.text(CallSite(number)).unwrap());
        assert_eq!(texts.each_ref().map(|text| &**text), ["a", "c", OTHER]);
        assert_eq!(table.number("b").0, 2);
    }

    #[test]
    fn a_long_text_keeps_its_end() {
        let long = format!("{}/é/train.py:12 in step", "é".repeat(300));
        let text = limited(&long);
        assert!(text.len() <= MAX_CALL_SITE_BYTES && text.starts_with('…'), "{text}");
        assert!(text.ends_with("é/train.py:12 in step"));
        assert_eq!(limited("a\n\u{1b}b"), "a??b", "TRUST");
    }

    #[test]
    fn a_text_is_sent_once() {
        let learned = Learned::default();
        let site = CallSite::new("train.py:1 in step");
        let first = learned.describe(site);
        assert_eq!(&*first.text, "train.py:1 in step");
        assert_eq!(learned.describe(site), first, "not in the ring yet");
        learned.sent(&first);
        assert!(learned.describe(site).text.is_empty());
        assert_eq!(learned.describe(CallSite::UNKNOWN), control::CallSite::default());
    }
}
