//! The contents of an input file, and how its values are read.

use std::ops::Range;

use serde::Deserialize;
use toml::Spanned;

pub(super) const MEGABITS: f64 = 1e6 / 8.0;
pub(super) const MICRO: f64 = 1e-6;
pub(super) const MILLI: f64 = 1e-3;

/// The largest number, in any unit.
pub(super) const MOST: f64 = 1e12;

/// An error in an input.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct InputError {
    /// The line, counted from 1.
    pub line: usize,
    /// The key, and the accepted values.
    pub what: String,
}

pub(super) type OptionalNumber = Option<Spanned<f64>>;
pub(super) type Text = Option<Spanned<String>>;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    /// The hosts by number, from 0, in the order in which a ring visits them, as far as racks stay
    /// together. If empty, hosts are in the order of the file.
    pub(super) order: Option<Spanned<Vec<u32>>>,
    #[serde(default)]
    pub(super) network: NetworkPart,
    #[serde(default, rename = "host")]
    pub(super) hosts: Vec<HostPart>,
    #[serde(default, rename = "link")]
    pub(super) links: Vec<LinkPart>,
    #[serde(default, rename = "tier")]
    pub(super) tiers: Vec<TierPart>,
    #[serde(default)]
    pub(super) job: JobPart,
    pub(super) tcp: Option<TcpPart>,
    #[serde(default, rename = "fault")]
    pub(super) faults: Vec<Spanned<FaultPart>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct NetworkPart {
    pub(super) latency_us: OptionalNumber,
    pub(super) rate_mbit: OptionalNumber,
    pub(super) rack_latency_us: OptionalNumber,
    pub(super) rack_rate_mbit: OptionalNumber,
    pub(super) reduce_mb_per_s: OptionalNumber,
    pub(super) chunk_bytes: OptionalNumber,
    pub(super) message_ns: OptionalNumber,
    pub(super) burst_loss_percent: OptionalNumber,
    pub(super) free_senders: OptionalNumber,
    pub(super) sender_loss_percent: OptionalNumber,
    pub(super) lane_rate_mbit: OptionalNumber,
    pub(super) publish_mb_per_s: OptionalNumber,
    pub(super) operation_us: OptionalNumber,
    pub(super) queue_bytes: OptionalNumber,
    pub(super) overflow_us: OptionalNumber,
    pub(super) rack_paths: OptionalNumber,
    pub(super) connection_mbit: OptionalNumber,
    pub(super) burst_bytes: OptionalNumber,
    pub(super) burst_mbit: OptionalNumber,
    pub(super) ecmp: Text,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HostPart {
    pub(super) name: Spanned<String>,
    #[serde(default)]
    pub(super) rack: Text,
    pub(super) line_mbit: OptionalNumber,
    pub(super) slowness: OptionalNumber,
    pub(super) count: OptionalNumber,
    #[serde(default)]
    pub(super) server: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LinkPart {
    pub(super) from: Spanned<String>,
    pub(super) to: Spanned<String>,
    pub(super) latency_us: OptionalNumber,
    pub(super) lane_rate_mbit: OptionalNumber,
    pub(super) rate_mbit: OptionalNumber,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TierPart {
    pub(super) links: OptionalNumber,
    pub(super) rate_mbit: Spanned<f64>,
    pub(super) latency_us: OptionalNumber,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct JobPart {
    pub(super) collective: Text,
    pub(super) bytes: OptionalNumber,
    pub(super) pieces: OptionalNumber,
    pub(super) specs: Option<Vec<Spanned<String>>>,
    pub(super) chunk_bytes: OptionalNumber,
    pub(super) lanes: OptionalNumber,
    pub(super) streams: OptionalNumber,
    pub(super) socket_bytes: OptionalNumber,
    pub(super) credit_pieces: OptionalNumber,
    pub(super) piece_bytes: OptionalNumber,
    pub(super) call_us: OptionalNumber,
    pub(super) limit_s: OptionalNumber,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct TcpPart {
    pub(super) window_bytes: OptionalNumber,
    pub(super) buffer_bytes: OptionalNumber,
    pub(super) timeout_ms: OptionalNumber,
    pub(super) round_trip_us: OptionalNumber,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FaultPart {
    pub(super) kind: Spanned<String>,
    pub(super) host: Text,
    pub(super) rack: Text,
    pub(super) link: OptionalNumber,
    pub(super) hosts: OptionalNumber,
    pub(super) every_ms: OptionalNumber,
    pub(super) factor: OptionalNumber,
    pub(super) times: OptionalNumber,
    pub(super) loss_percent: OptionalNumber,
    pub(super) from_ms: OptionalNumber,
    pub(super) until_ms: OptionalNumber,
}

/// Reads values, and locates errors.
pub(super) struct Reader<'a>(pub(super) &'a str);

impl Reader<'_> {
    pub(super) fn error(&self, span: Range<usize>, what: String) -> InputError {
        let before = self.0.get(..span.start).unwrap_or(self.0);
        InputError { line: before.matches('\n').count() + 1, what }
    }

    /// An error of the parser. For a value, the parser does not name the key.
    pub(super) fn refused(&self, error: &toml::de::Error) -> InputError {
        let text = error.message().replace('\n', "; ").replace("expected f64", "expected a number");
        let text = text.replace("expected a sequence", "expected a list");
        let error = self.error(error.span().unwrap_or_default(), text);
        let of_a_value = ["invalid type", "invalid value", "duplicate key"];
        if !of_a_value.iter().any(|kind| error.what.starts_with(kind)) {
            return error;
        }
        InputError { what: format!("{}: {}", self.key(error.line), error.what), ..error }
    }

    /// The key that a line sets, with its section.
    fn key(&self, line: usize) -> String {
        let section = |line: &&str| line.trim().starts_with('[');
        let lines: Vec<&str> = self.0.lines().take(line).collect();
        let section = lines.iter().rev().copied().find(section).unwrap_or_default();
        let section = section.trim().trim_start_matches('[').split(']').next();
        let key = lines.last().and_then(|line| line.split_once('=')).map(|(key, _)| key.trim());
        let named = section.into_iter().chain(key).filter(|name| !name.is_empty());
        named.collect::<Vec<_>>().join(".")
    }

    /// A number in this range, or its usual value.
    pub(super) fn number(
        &self,
        value: &OptionalNumber,
        key: &str,
        (least, most): (f64, f64),
        usual: f64,
    ) -> Result<f64, InputError> {
        let Some(value) = value else { return Ok(usual) };
        let number = *value.get_ref();
        if number.is_finite() && (least..=most).contains(&number) {
            return Ok(number);
        }
        let what = format!("{key} is {number}: it must be from {least} to {most}");
        Err(self.error(value.span(), what))
    }

    pub(super) fn whole(
        &self,
        value: &OptionalNumber,
        key: &str,
        range: (f64, f64),
        usual: f64,
    ) -> Result<f64, InputError> {
        let number = self.number(value, key, range, usual)?;
        match value {
            Some(value) if number.fract() != 0.0 => {
                let what = format!("{key} is {number}: it must be a whole number");
                Err(self.error(value.span(), what))
            }
            _ => Ok(number),
        }
    }
}

/// From the smallest meaningful rate or time to the largest.
pub(super) const POSITIVE: (f64, f64) = (1e-3, MOST);
pub(super) const ANY: (f64, f64) = (0.0, MOST);
