//! One line of a file in the Trace Event Format.

use std::{
    borrow::Cow,
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use serde::{Serialize, Serializer};
use serde_json::{Value, json};

/// The id of an arrow in the file. Perfetto understands only hexadecimal numbers.
pub(super) fn arrow_id(id: &str) -> String {
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    format!("{:#x}", hasher.finish())
}

/// A process and a thread of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) pid: u64,
    pub(super) tid: u64,
}

/// The details of a line that a viewer shows.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Facts<'a> {
    Submission {
        rank: u32,
        ticket: Option<u64>,
        tensor: &'a str,
    },
    Moved {
        operation: Option<u64>,
        bytes: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        peer: Option<&'a str>,
    },
    Other(Value),
}

/// A line of the file: an event. The fields have the names of the format.
#[derive(Debug, Default, Serialize)]
pub(super) struct Line<'a> {
    ph: &'static str,
    name: Cow<'a, str>,
    pid: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id2: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Facts<'a>>,
    #[serde(rename = "ts", skip_serializing_if = "Option::is_none")]
    at: Option<Nanoseconds>,
    #[serde(rename = "dur", skip_serializing_if = "Option::is_none")]
    duration: Option<Nanoseconds>,
}

/// A time, which the format has in microseconds. It is exact as a float: the times of a day have 14
/// digits, and the shortest text of a float is exact for 15.
#[derive(Debug, Clone, Copy)]
struct Nanoseconds(u64);

impl Serialize for Nanoseconds {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0 as f64 / 1e3)
    }
}

impl<'a> Line<'a> {
    fn new(ph: &'static str, name: impl Into<Cow<'a, str>>, pid: u64) -> Self {
        Self { ph, name: name.into(), pid, ..Self::default() }
    }

    fn timed(
        ph: &'static str,
        name: impl Into<Cow<'a, str>>,
        category: &'static str,
        place: Place,
        at_ns: u64,
    ) -> Self {
        let line = Self::new(ph, name, place.pid);
        Self { cat: Some(category), tid: Some(place.tid), at: Some(Nanoseconds(at_ns)), ..line }
    }

    /// Facts about a process, or about the job (0).
    pub(super) fn about(name: &'static str, pid: u64, facts: Value) -> Self {
        Self::new("M", name, pid).with(Facts::Other(facts))
    }

    /// The name of a process.
    pub(super) fn process(pid: u64, name: &str) -> Self {
        Self::about("process_name", pid, json!({ "name": name }))
    }

    /// The name of a thread.
    pub(super) fn thread(place: Place, name: &str) -> Self {
        let line = Self::about("thread_name", place.pid, json!({ "name": name }));
        Self { tid: Some(place.tid), ..line }
    }

    /// Something with a duration.
    pub(super) fn slice(
        name: impl Into<Cow<'a, str>>,
        category: &'static str,
        place: Place,
        at_ns: u64,
        duration_ns: u64,
    ) -> Self {
        let line = Self::timed("X", name, category, place, at_ns);
        Self { duration: Some(Nanoseconds(duration_ns)), ..line }
    }

    /// The beginning (`b`) or the end (`e`) of something that may overlap with others.
    pub(super) fn overlapping(
        phase: &'static str,
        name: &'a str,
        category: &'static str,
        place: Place,
        id: u64,
        at_ns: u64,
    ) -> Self {
        let id2 = Some(json!({ "local": format!("{id:#x}") }));
        Self { id2, ..Self::timed(phase, name, category, place, at_ns) }
    }

    /// The beginning (`s`) or the end (`f`) of an arrow between slices.
    pub(super) fn arrow(
        phase: &'static str,
        name: &'static str,
        place: Place,
        id: &str,
        at_ns: u64,
    ) -> Self {
        // The arrow ends at the slice around that time, not at the next one.
        let bp = (phase == "f").then_some("e");
        Self { id: Some(arrow_id(id)), bp, ..Self::timed(phase, name, "arrow", place, at_ns) }
    }

    /// An event without duration, for a whole process.
    pub(super) fn instant(name: &'a str, place: Place, at_ns: u64) -> Self {
        Self { s: Some("p"), ..Self::timed("i", name, "gradwire", place, at_ns) }
    }

    /// Adds details.
    pub(super) fn with(self, facts: Facts<'a>) -> Self {
        Self { args: Some(facts), ..self }
    }

    /// Makes times relative to this one, and cuts off what is earlier.
    pub(super) fn since(self, base_ns: u64) -> Self {
        let missing_ns = self.at.map_or(0, |at| base_ns.saturating_sub(at.0));
        let at = self.at.map(|at| Nanoseconds(at.0.saturating_sub(base_ns)));
        let duration =
            self.duration.map(|duration| Nanoseconds(duration.0.saturating_sub(missing_ns)));
        Self { at, duration, ..self }
    }

    /// Writes it, with a comma and an end of line.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        serde_json::to_writer(&mut *out, self).expect("writing to memory can't fail");
        out.extend_from_slice(b",\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_exact_to_the_nanosecond() {
        let place = Place { pid: 1, tid: 2 };
        for ns in [0, 1, 999, 1_000, 1_001, 123_456_789, 86_400_000_000_001, 604_799_999_999_999] {
            let mut out = Vec::new();
            Line::slice("s", "c", place, ns + 5, ns).since(5).write(&mut out);
            let text = String::from_utf8(out).unwrap();
            let us = format!("{}.{:03}", ns / 1000, ns % 1000);
            let us = us.trim_end_matches('0');
            let us = if us.ends_with('.') { format!("{us}0") } else { us.to_owned() };
            assert!(text.contains(&format!("\"ts\":{us},\"dur\":{us}}}")), "{ns}: {text}");
        }
    }

    #[test]
    fn earlier_times_are_cut_off() {
        let place = Place { pid: 1, tid: 2 };
        let line = Line::slice("s", "c", place, 3_000, 5_000).since(4_000);
        assert_eq!((line.at.unwrap().0, line.duration.unwrap().0), (0, 4_000));
    }
}
