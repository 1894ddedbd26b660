//! One event of a file in the Trace Event Format.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use serde_json::{Value, json};

/// The id of an arrow in the file. Perfetto understands hexadecimal numbers alone.
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

/// A line of the file. Times are in nanoseconds until it is written, then in microseconds.
#[derive(Debug, Clone)]
pub(super) struct Line {
    event: Value,
    /// When, and how long; `None` for what has no time.
    at_ns: Option<u64>,
    duration_ns: Option<u64>,
    base_ns: u64,
}

impl Line {
    fn new(phase: &str, name: &str, pid: u64) -> Self {
        let event = json!({ "ph": phase, "name": name, "pid": pid });
        Self { event, at_ns: None, duration_ns: None, base_ns: 0 }
    }

    fn timed(phase: &str, name: &str, category: &str, place: Place, at_ns: u64) -> Self {
        let mut line = Self::new(phase, name, place.pid);
        line.event["cat"] = category.into();
        line.event["tid"] = place.tid.into();
        line.at_ns = Some(at_ns);
        line
    }

    /// Facts about a process, or about the job (0).
    pub(super) fn about(name: &str, pid: u64, facts: Value) -> Self {
        Self::new("M", name, pid).with(facts)
    }

    /// The name of a process.
    pub(super) fn process(pid: u64, name: &str) -> Self {
        Self::about("process_name", pid, json!({ "name": name }))
    }

    /// The name of a thread.
    pub(super) fn thread(place: Place, name: &str) -> Self {
        let mut line = Self::about("thread_name", place.pid, json!({ "name": name }));
        line.event["tid"] = place.tid.into();
        line
    }

    /// Something that took a while.
    pub(super) fn slice(
        name: &str,
        category: &str,
        place: Place,
        at_ns: u64,
        duration_ns: u64,
    ) -> Self {
        let line = Self::timed("X", name, category, place, at_ns);
        Self { duration_ns: Some(duration_ns), ..line }
    }

    /// The beginning (`b`) or the end (`e`) of something beside which other things go on.
    pub(super) fn overlapping(
        phase: &str,
        name: &str,
        category: &str,
        place: Place,
        id: u64,
        at_ns: u64,
    ) -> Self {
        let mut line = Self::timed(phase, name, category, place, at_ns);
        line.event["id2"] = json!({ "local": format!("{id:#x}") });
        line
    }

    /// The beginning (`s`) or the end (`f`) of an arrow between slices.
    pub(super) fn arrow(phase: &str, name: &str, place: Place, id: &str, at_ns: u64) -> Self {
        let mut line = Self::timed(phase, name, "arrow", place, at_ns);
        line.event["id"] = arrow_id(id).into();
        if phase == "f" {
            // It ends at the slice around that time, not at the next one.
            line.event["bp"] = "e".into();
        }
        line
    }

    /// Something that happened at one moment, for a whole process.
    pub(super) fn instant(name: &str, place: Place, at_ns: u64) -> Self {
        let mut line = Self::timed("i", name, "gradwire", place, at_ns);
        line.event["s"] = "p".into();
        line
    }

    /// With these facts.
    pub(super) fn with(mut self, facts: Value) -> Self {
        self.event["args"] = facts;
        self
    }

    /// With times since this one.
    pub(super) fn at(&self, base_ns: u64) -> Self {
        Self { base_ns, ..self.clone() }
    }

    /// Writes it, with a comma and an end of line. What began before 0 is cut off there.
    pub(super) fn write(&self, out: &mut String) {
        let mut text = self.event.to_string();
        // Numbers with three decimals, which a float could not tell exactly.
        let mut put = |name: &str, ns: u64| {
            text.pop();
            text.push_str(&format!(",\"{name}\":{}.{:03}}}", ns / 1000, ns % 1000));
        };
        if let Some(at_ns) = self.at_ns {
            put("ts", at_ns.saturating_sub(self.base_ns));
            if let Some(duration_ns) = self.duration_ns {
                put("dur", duration_ns.saturating_sub(self.base_ns.saturating_sub(at_ns)));
            }
        }
        out.push_str(&text);
        out.push_str(",\n");
    }
}
