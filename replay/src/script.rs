//! Which recorded call a call of the program is. Pure.
//!
//! A call has the result of the recorded call with the same process set and name: the first that
//! was not made yet, if there are several. Threads may take turns in another way than in the
//! recorded job, so the order of different names is checked only within each thread. A call behind
//! a gate may arrive after calls with larger numbers.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt::Write as _,
};

use gradwire_proto::{Failure, FailureKind, Request, TensorName};
use gradwire_worker::record::{
    format::{Described, End, Outcome, Why},
    reader::{Call, Next, Reader, RecordError},
};

/// The most recorded calls that are known but not made (BOUND): as many as may be in flight.
pub const AHEAD: usize = 1 << 16;

/// Where the recorded calls come from.
pub trait Source {
    /// What comes next.
    ///
    /// # Errors
    /// [`RecordError`] if the record can't be read.
    fn next(&mut self) -> Result<Next, RecordError>;
}

impl Source for Reader {
    fn next(&mut self) -> Result<Next, RecordError> {
        Self::next(self)
    }
}

/// A call of the program.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// Its number in the session, from 1.
    pub number: u64,
    /// The number of its process set.
    pub process_set: u32,
    /// Its name.
    pub name: &'a TensorName,
    /// What it asks for.
    pub request: &'a Request,
}

/// What happens to a call.
#[derive(Debug)]
pub enum Answer {
    /// It ends like this one.
    Recorded(Box<Call>),
    /// It does not end before the session does.
    Open,
    /// The record is over.
    Over(Failure),
    /// It differs: the text shows both calls.
    Differs(String),
}

/// The recorded calls that the program has not made yet.
#[derive(Debug, Default)]
pub struct Script {
    known: BTreeMap<u64, Box<Call>>,
    by_name: HashMap<(u32, TensorName), BTreeSet<u64>>,
    /// How the record ends, once that is known; `None` in it if it ends without a reason.
    end: Option<Option<End>>,
    /// The calls that were read, and the largest of their numbers.
    read: u64,
    last: u64,
    /// The calls that the program has made, and the largest of their numbers.
    arrived: u64,
    highest: u64,
    /// The calls that were found.
    made: u64,
    /// Found calls that do not end before the session does.
    open: u64,
    limit: u64,
}

impl Script {
    /// The script of a record with this limit in bytes.
    pub fn new(limit: u64) -> Self {
        Self { limit, ..Self::default() }
    }

    /// Reads one more call. Returns false if there is none.
    fn read(&mut self, source: &mut impl Source) -> Result<bool, RecordError> {
        if self.end.is_some() || self.known.len() >= AHEAD {
            return Ok(false);
        }
        match source.next()? {
            Next::Call(call) => {
                let number = call.head.number;
                self.read += 1;
                self.last = self.last.max(number);
                let key = (call.head.process_set, call.name.clone());
                self.by_name.entry(key).or_default().insert(number);
                self.known.insert(number, call);
                return Ok(true);
            }
            Next::End(end) => self.end = Some(Some(end)),
            Next::Cut => self.end = Some(None),
        }
        Ok(false)
    }

    /// The call of the program, and what happens to it.
    ///
    /// # Errors
    /// [`RecordError`] if the record can't be read.
    pub fn ask(
        &mut self,
        asked: Asked<'_>,
        source: &mut impl Source,
    ) -> Result<Answer, RecordError> {
        self.arrived += 1;
        self.highest = self.highest.max(asked.number);
        let key = (asked.process_set, asked.name.clone());
        let found = loop {
            let found = self.by_name.get(&key).and_then(BTreeSet::first).copied();
            if found.is_some() || !self.read(source)? {
                break found;
            }
        };
        let Some(number) = found else { return Ok(self.not_found(asked)) };
        if let Some(other) = self.expected(number, asked) {
            return Ok(Answer::Differs(differs(other, asked)));
        }
        let numbers = self.by_name.get_mut(&key);
        let is_last = numbers.is_some_and(|numbers| numbers.remove(&number) && numbers.is_empty());
        if is_last {
            self.by_name.remove(&key);
        }
        self.made += 1;
        Ok(match self.known.remove(&number) {
            Some(call) if call.head.outcome != Outcome::Open => Answer::Recorded(call),
            _ => {
                self.open += 1;
                Answer::Open
            }
        })
    }

    /// The recorded call that should have come instead of the one with this number and name.
    fn expected(&self, number: u64, asked: Asked<'_>) -> Option<&Call> {
        let call = self.known.get(&number)?;
        if call.request != *asked.request {
            return Some(call);
        }
        // Calls that the program has made but that have not arrived: they wait behind gates.
        let held = self.highest.saturating_sub(self.arrived);
        let mut left_out = self
            .known
            .range(..number)
            .map(|(_, other)| other)
            .filter(|other| other.head.thread == call.head.thread);
        let first = left_out.next()?;
        let count = 1 + left_out.count() as u64;
        (count > held).then_some(&**first)
    }

    fn not_found(&self, asked: Asked<'_>) -> Answer {
        let calls = match &self.end {
            Some(Some(end)) => end.calls,
            Some(None) => self.last,
            None => u64::MAX,
        };
        let other = self.known.get(&asked.number).or_else(|| self.known.values().next());
        match other {
            Some(other) if asked.number <= calls => Answer::Differs(differs(other, asked)),
            _ => Answer::Over(self.over(Some(asked))),
        }
    }

    /// The failure of calls after the end of the record.
    fn over(&self, asked: Option<Asked<'_>>) -> Failure {
        let count = self.read;
        let (kind, what) = match &self.end {
            Some(Some(End { why: Why::Failed(failure), .. })) => return failure.clone(),
            Some(Some(End { why: Why::Left, .. })) => (
                FailureKind::Disagreement,
                format!("the record ends: the rank left the job after {count} calls"),
            ),
            Some(Some(End { why: Why::Full, .. })) => (
                FailureKind::Cancelled,
                format!(
                    "the record ends after {count} calls: it had reached its limit of {} bytes; \
                     record with a larger --record-bytes",
                    self.limit
                ),
            ),
            Some(Some(End { why: Why::Unwritten(error), .. })) => (
                FailureKind::Cancelled,
                format!("the record ends after {count} calls: it could not be written ({error})"),
            ),
            Some(None) | None => (
                FailureKind::Cancelled,
                format!(
                    "the record ends after {count} complete calls: the process was killed, or the \
                     file is cut off"
                ),
            ),
        };
        let now = asked.map_or_else(String::new, |asked| format!("\n  now: {}", line(asked)));
        Failure::new(kind, what + &now)
    }

    /// The failure of the session, if the program waits only for operations that never ended.
    ///
    /// # Errors
    /// [`RecordError`] if the record can't be read.
    pub fn is_over(&mut self, source: &mut impl Source) -> Result<Option<Failure>, RecordError> {
        if self.open == 0 {
            return Ok(None);
        }
        while self.known.is_empty() && self.read(source)? {}
        let has_failed = matches!(&self.end, Some(Some(End { why: Why::Failed(_), .. })));
        Ok((self.known.is_empty() && has_failed).then(|| self.over(None)))
    }

    /// How many recorded calls the program has made, and how many there are.
    ///
    /// # Errors
    /// [`RecordError`] if the record can't be read.
    pub fn counts(&mut self, source: &mut impl Source) -> Result<(u64, u64), RecordError> {
        while self.end.is_none() {
            self.known.clear();
            self.read(source)?;
        }
        Ok((self.made, self.read))
    }
}

fn line(asked: Asked<'_>) -> String {
    let Asked { number, process_set, name, request } = asked;
    format!("call {number}, {}", Described { process_set, name: name.as_str(), request })
}

/// The text about two calls.
fn differs(recorded: &Call, asked: Asked<'_>) -> String {
    let Call { head, name, request, .. } = recorded;
    let recorded = Asked { number: head.number, process_set: head.process_set, name, request };
    let mut text = format!("call {} differs from the recorded one", asked.number);
    let _ = write!(text, "\n  recorded: {}\n  now: {}", line(recorded), line(asked));
    text
}

#[cfg(test)]
mod tests;
