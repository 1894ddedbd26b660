//! How long a node has been without a stream. Pure.

use std::time::Duration;

/// A stream that breaks earlier, and on which nothing has arrived, continues the absence before it.
const STABLE: Duration = Duration::from_secs(1);

/// Whether a node has a stream, and since when it has had none.
#[derive(Debug, Clone, Default)]
pub(crate) struct Absence {
    /// When it lost its last working stream. The time limit begins then.
    since: Option<Duration>,
    /// When it came back.
    returned: Duration,
    /// Why it has no stream now.
    why: Option<String>,
    /// How often it has come back.
    pub(crate) returns: u32,
}

impl Absence {
    /// Its stream has ended.
    pub(crate) fn begin(&mut self, why: &str, now: Duration) {
        if now >= self.returned + STABLE {
            self.since = None;
        }
        self.since.get_or_insert(now);
        self.why = Some(why.to_owned());
    }

    /// It has another stream. Returns how long it was away, and why.
    pub(crate) fn end(&mut self, now: Duration) -> (Duration, String) {
        // A node may notice that its stream broke before the coordinator does.
        let why = self.why.take().unwrap_or_else(|| "its stream broke".to_owned());
        self.returns += 1;
        self.returned = now;
        (now.saturating_sub(*self.since.get_or_insert(now)), why)
    }

    /// Its absence begins again: the coordinator was suspended.
    pub(crate) fn restart(&mut self, now: Duration) {
        self.since = self.since.map(|_| now);
    }

    /// A message has arrived on its stream.
    pub(crate) fn received(&mut self) {
        if self.why.is_none() {
            self.since = None;
        }
    }

    /// Whether it has no stream.
    pub(crate) fn is_away(&self) -> bool {
        self.why.is_some()
    }

    /// Until when it may be away, if it is.
    pub(crate) fn until(&self, limit: Duration) -> Option<Duration> {
        self.why.as_ref().and(self.since).map(|since| since + limit)
    }

    /// Why it is lost if it does not come back in this time.
    pub(crate) fn text(&self, limit: Duration) -> Option<String> {
        let ms = limit.as_millis();
        self.why.as_ref().map(|why| format!("{why}, and it was not made again within {ms} ms"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_useful_stream_gives_more_time() {
        let seconds = Duration::from_secs;
        let mut absence = Absence::default();
        assert_eq!(absence.until(seconds(10)), None);
        absence.begin("reset", seconds(3));
        absence.received();
        assert_eq!(absence.until(seconds(10)), Some(seconds(13)));
        assert_eq!(absence.end(seconds(5)), (seconds(2), "reset".to_owned()));
        assert_eq!(absence.until(seconds(10)), None);
        absence.begin("again", seconds(6) - Duration::from_nanos(1));
        assert_eq!(absence.until(seconds(10)), Some(seconds(13)));
        let text = absence.text(seconds(10)).unwrap();
        assert_eq!(text, "again, and it was not made again within 10000 ms");
        absence.restart(seconds(7));
        assert_eq!(absence.until(seconds(10)), Some(seconds(17)));
        absence.end(seconds(7));
        absence.received();
        absence.begin("later", seconds(7));
        assert_eq!(absence.until(seconds(10)), Some(seconds(17)));
        absence.end(seconds(8));
        absence.begin("after a second", seconds(9));
        assert_eq!(absence.until(seconds(10)), Some(seconds(19)));
        assert_eq!(absence.returns, 3);
    }
}
