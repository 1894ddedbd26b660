//! Rank 0's report at the end.

use std::{
    env,
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::Context;
use sha2::{Digest, Sha256};
use tch::{Kind, nn};

/// A metrics endpoint that does not answer within this time is left out.
const METRICS_TIMEOUT: Duration = Duration::from_secs(2);
const METRICS_MAX_BYTES: u64 = 4 << 20;

/// The first 8 bytes of the SHA-256 of all parameters, in the order of their names.
pub(crate) fn hash(parameters: &nn::VarStore) -> anyhow::Result<i64> {
    let mut variables: Vec<_> = parameters.variables().into_iter().collect();
    variables.sort_by(|a, b| a.0.cmp(&b.0));
    let mut sha = Sha256::new();
    for (name, tensor) in variables {
        let numbers = Vec::<f32>::try_from(tensor.to_kind(Kind::Float).flatten(0, -1))
            .with_context(|| format!("parameter {name} can't be read"))?;
        sha.update(name.as_bytes());
        for number in numbers {
            sha.update(number.to_le_bytes());
        }
    }
    let digest = sha.finalize();
    let first = digest.first_chunk().context("a SHA-256 has 32 bytes")?;
    Ok(i64::from_be_bytes(*first))
}

/// Hashes in hexadecimal, for people.
pub(crate) fn hex(hashes: &[i64]) -> String {
    hashes.iter().map(|hash| format!("{hash:016x}")).collect::<Vec<_>>().join(" ")
}

/// The figures of a finished training.
#[derive(Debug)]
pub(crate) struct Report<'a> {
    /// The fraction of test images that are recognized, 0 to 1.
    pub(crate) accuracy: f64,
    /// Test images.
    pub(crate) tested: usize,
    /// Time of the training.
    pub(crate) seconds: f64,
    /// Images seen by all ranks together.
    pub(crate) images: u64,
    /// Bytes of tensors that this rank gave to the collectives.
    pub(crate) bytes_given: u64,
    /// Each rank's hash of its parameters.
    pub(crate) hashes: &'a [i64],
}

impl Report<'_> {
    /// Writes the report for people.
    pub(crate) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let (ranks, hashes) = (self.hashes.len(), hex(self.hashes));
        let accuracy = self.accuracy * 100.0;
        writeln!(out, "test accuracy {accuracy:.2} % of {} images", self.tested)?;
        let speed = self.images as f64 / self.seconds;
        let plural = if ranks == 1 { "" } else { "s" };
        writeln!(
            out,
            "trained in {:.2} s, {speed:.0} images/s with {ranks} rank{plural}",
            self.seconds
        )?;
        if ranks > 1 {
            writeln!(out, "exchanged {} of tensors by each rank", mebibytes(self.bytes_given))?;
            let daemon = address("GRADWIRE_DAEMON_METRICS");
            for (name, bytes) in daemon.map(byte_counters).unwrap_or_default() {
                writeln!(out, "  this node's daemon: {name} {}", mebibytes(bytes))?;
            }
        }
        match self.hashes.iter().all(|hash| *hash == self.hashes[0]) {
            true if ranks == 1 => writeln!(out, "parameter hash {hashes}")?,
            true => writeln!(out, "all {ranks} ranks hold bit-identical parameters: {hashes}")?,
            false => writeln!(out, "the ranks' parameters DIFFER: {hashes}")?,
        }
        for (who, variable) in [
            ("this node's daemon", "GRADWIRE_DAEMON_METRICS"),
            ("the coordinator", "GRADWIRE_COORDINATOR_METRICS"),
        ] {
            if let Some(address) = address(variable) {
                writeln!(out, "metrics of {who} were served at http://{address}/metrics")?;
            }
        }
        Ok(())
    }

    /// The same figures as JSON, with the loss of each step.
    pub(crate) fn json(&self, losses: &[f64]) -> serde_json::Value {
        serde_json::json!({
            "ranks": self.hashes.len(),
            "accuracy": self.accuracy,
            "seconds": self.seconds,
            "images": self.images,
            "bytes_given": self.bytes_given,
            "hashes": self.hashes.iter().map(|h| format!("{h:016x}")).collect::<Vec<_>>(),
            "losses": losses,
        })
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

fn address(variable: &str) -> Option<SocketAddr> {
    env::var(variable).ok()?.parse().ok()
}

/// The byte counters of a metrics endpoint, added up over their labels. Empty if it does not
/// answer: that should not fail the report.
fn byte_counters(address: SocketAddr) -> Vec<(String, u64)> {
    let Ok(text) = fetch(address) else {
        return Vec::new();
    };
    let mut counters: Vec<(String, u64)> = Vec::new();
    for line in text.lines().filter(|line| line.starts_with("gradwire_")) {
        let Some((series, value)) = line.rsplit_once(' ') else { continue };
        let name = series.split('{').next().unwrap_or(series);
        let Ok(value) = value.parse::<f64>() else { continue };
        if !name.ends_with("bytes_total") {
            continue;
        }
        match counters.iter_mut().find(|(known, _)| known == name) {
            Some((_, sum)) => *sum += value as u64,
            None => counters.push((name.to_owned(), value as u64)),
        }
    }
    counters
}

fn fetch(address: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, METRICS_TIMEOUT)?;
    stream.set_read_timeout(Some(METRICS_TIMEOUT))?;
    write!(stream, "GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut text = String::new();
    stream.take(METRICS_MAX_BYTES).read_to_string(&mut text)?;
    Ok(text)
}
