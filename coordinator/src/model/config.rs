//! What is fixed before the engine starts.

use std::{fmt::Display, time::Duration};

use gradwire_collectives::{Algorithm, CostModel, Rules, RulesError};
use gradwire_proto::{Compression, Epoch, JobId, MAX_LANES, Rank, beat::Limits};
use gradwire_settings::{ProbeEnabled, Settings, variables::VariableError};

use crate::error::CoordinatorError;

/// The most nodes of one job: each has a rank (BOUND). The world with the longest names fits one
/// message.
const MAX_NODES: u32 = Rank::MAX;

/// The smallest piece: a cache line, to which cuts keep.
pub(crate) const MIN_PIECE_BYTES: u64 = 64;

/// The largest piece.
const MAX_PIECE_BYTES: u64 = 1 << 30;

/// The most tensors that are known at once, unless more get an id (BOUND).
const MAX_PENDING: u32 = 262_144;

/// The longest time that can be configured, so that no sum of times overflows.
const MAX_TIME: Duration = Duration::from_secs(365 * 24 * 3600);

/// The engine's part of the configuration.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// The job that nodes may join.
    pub job: JobId,
    /// The number of nodes of the complete world.
    pub nodes: u32,
    /// How many of them are servers, the last ones: nodes without ranks.
    pub servers: u32,
    /// The number of ranks of all nodes together, if it is known. A mistake is then noticed before
    /// the job starts.
    pub ranks: Option<u32>,
    /// The number of this formation of the world.
    pub epoch: Epoch,
    /// Data threads per daemon, each with its own connections, 1 to [`MAX_LANES`]; sent to every
    /// node.
    pub lanes: u32,
    /// The wire type of f32 where it is reduced; sent to every node.
    pub compression: Compression,
    /// The interval between signs of life, on both sides.
    pub heartbeat_interval: Duration,
    /// The silence after which a node is lost; more than twice the interval.
    pub heartbeat_timeout: Duration,
    /// How long to wait for the nodes to join.
    pub start_timeout: Duration,
    /// How long to collect reports of a failure before the cause is sent to all nodes.
    pub cause_window: Duration,
    /// The wait after which the missing ranks are reported.
    pub stall_warning: Duration,
    /// The most bytes of one piece, 64 to 2^30.
    pub piece_bytes: u64,
    /// The most operations in flight, at least 1.
    pub credit_pieces: u32,
    /// The bytes of a chunk, unless measured times say otherwise.
    pub chunk_bytes: u64,
    /// Connections of each data thread to each peer, as the settings say it here.
    pub streams: u32,
    /// The most tensors that get an id; further ones travel by name.
    pub max_tensors: u32,
    /// The most tensors that are known at once; a job with more is ended.
    pub max_pending: u32,
    /// The algorithms from which the cost model chooses.
    pub rules: Rules,
    /// Those for pieces that travel in eight bits.
    pub quantized_rules: Rules,
    /// The costs of the links.
    pub cost: CostModel,
    /// Whether the links between nodes are measured before the first operation.
    pub probe: bool,
    /// Whether what was measured may decide the racks of nodes without labels, and the order of
    /// nodes in a ring. Not where each run has to add up in the same order.
    pub may_arrange: bool,
    /// Whether other algorithms than the cheapest by the cost model are tried now and then, so that
    /// measured times can correct it.
    pub may_explore: bool,
}

impl EngineConfig {
    /// The configuration for a job of `nodes` nodes, the last `servers` of which have no ranks,
    /// with these settings.
    ///
    /// # Errors
    /// [`VariableError`] if a setting names an algorithm or a compression that does not exist.
    pub fn new(
        job: JobId,
        nodes: u32,
        servers: u32,
        settings: &Settings,
    ) -> Result<Self, VariableError> {
        let negotiation = &settings.negotiation;
        let invalid = |variable, value: &str, reason: String| VariableError::Invalid {
            variable,
            value: value.to_owned(),
            reason,
        };
        let given = &negotiation.algorithm;
        let refused = |error: RulesError| {
            invalid("negotiation.algorithm", &given.to_string(), error.to_string())
        };
        let with_ranks = nodes.saturating_sub(servers);
        given.fits(with_ranks).map_err(refused)?;
        let rules = settings.algorithms().map_err(refused)?;
        let quantized_rules = rules.clone().quantized();
        let name = settings.data.compression.as_str();
        let known = || format!("it is {}", Compression::NAMES.join(" or "));
        let compression = name.parse().map_err(|_| invalid("data.compression", name, known()))?;
        Ok(Self {
            job,
            nodes,
            servers,
            ranks: None,
            epoch: Epoch(1),
            lanes: settings.data.lanes,
            compression,
            quantized_rules,
            heartbeat_interval: settings.heartbeat.interval,
            heartbeat_timeout: settings.heartbeat.timeout,
            start_timeout: settings.start.timeout,
            cause_window: settings.coordinator.cause_window,
            stall_warning: negotiation.stall_warning,
            piece_bytes: negotiation.piece_bytes,
            credit_pieces: negotiation.credit_pieces,
            chunk_bytes: settings.data.chunk_bytes,
            streams: settings.data.streams,
            max_tensors: negotiation.max_tensors,
            max_pending: MAX_PENDING.max(negotiation.max_tensors),
            probe: nodes > 1
                && match settings.probe.enabled {
                    ProbeEnabled::Auto => {
                        rules.is_choice(with_ranks) || rules.names(Algorithm::Blink)
                    }
                    ProbeEnabled::True => true,
                    ProbeEnabled::False => false,
                },
            rules,
            cost: settings.cost_model(),
            may_arrange: !negotiation.strict,
            may_explore: settings.tuning.enabled && !negotiation.strict,
        })
    }

    /// How long a node may be silent.
    pub(crate) fn silence(&self) -> Limits {
        Limits::new(self.heartbeat_interval, self.heartbeat_timeout)
    }

    /// Checks every value.
    ///
    /// # Errors
    /// [`CoordinatorError::Config`] for the first one that is out of range.
    pub fn validate(&self) -> Result<(), CoordinatorError> {
        let ms = |time: Duration| format!("{} ms", time.as_millis());
        check(
            "nodes",
            (1..=MAX_NODES).contains(&self.nodes),
            self.nodes,
            "1 to 4096 are possible",
        )?;
        let servers = self.servers;
        check("servers", servers < self.nodes, servers, "one node at least must have ranks")?;
        let with_ranks = self.nodes - servers;
        let ranks = self.ranks.unwrap_or(with_ranks);
        let least = "each node but the servers has at least one rank";
        check("ranks", ranks >= with_ranks, ranks, least)?;
        check("ranks", ranks <= Rank::MAX, ranks, "at most 4096 are possible")?;
        check("lanes", (1..=MAX_LANES).contains(&self.lanes), self.lanes, "1 to 16 are possible")?;
        let interval = self.heartbeat_interval;
        check("heartbeat_interval", !interval.is_zero(), ms(interval), "it must be more than 0")?;
        check(
            "heartbeat_timeout",
            self.heartbeat_timeout > interval.saturating_mul(2),
            ms(self.heartbeat_timeout),
            "it must be more than twice the heartbeat_interval",
        )?;
        let stall = self.stall_warning;
        check("stall_warning", stall >= Duration::from_millis(10), ms(stall), "at least 10 ms")?;
        for (name, time) in [
            ("heartbeat_timeout", self.heartbeat_timeout),
            ("start_timeout", self.start_timeout),
            ("cause_window", self.cause_window),
            ("stall_warning", stall),
        ] {
            check(name, time <= MAX_TIME, ms(time), "at most a year is possible")?;
        }
        let piece = self.piece_bytes;
        let possible = (MIN_PIECE_BYTES..=MAX_PIECE_BYTES).contains(&piece);
        check("piece_bytes", possible, piece, "64 bytes to 1 GiB are possible")?;
        check(
            "credit_pieces",
            self.credit_pieces >= 1,
            self.credit_pieces,
            "it must be at least 1",
        )?;
        let pending = self.max_pending;
        let enough = pending >= self.max_tensors.max(1);
        check("max_pending", enough, pending, "it must be at least 1 and at least max_tensors")
    }
}

fn check(
    name: &'static str,
    fits: bool,
    given: impl Display,
    allowed: &'static str,
) -> Result<(), CoordinatorError> {
    if fits {
        return Ok(());
    }
    Err(CoordinatorError::Config { name, given: given.to_string(), allowed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_each_mistake_is_named() {
        let good = EngineConfig::new(JobId::new("job").unwrap(), 2, 0, &Settings::default());
        let good = good.unwrap();
        good.validate().unwrap();
        let cases = [
            (EngineConfig { nodes: 0, ..good.clone() }, "nodes is 0: 1 to 4096"),
            (EngineConfig { ranks: Some(1), ..good.clone() }, "ranks is 1: each node"),
            (EngineConfig { ranks: Some(4097), ..good.clone() }, "ranks is 4097: at most 4096"),
            (EngineConfig { lanes: 0, ..good.clone() }, "lanes is 0"),
            (
                EngineConfig { heartbeat_timeout: good.heartbeat_interval, ..good.clone() },
                "heartbeat_timeout is 500 ms: it must be more than twice",
            ),
            (EngineConfig { cause_window: Duration::MAX, ..good.clone() }, "at most a year"),
            (EngineConfig { piece_bytes: u64::MAX, ..good.clone() }, "64 bytes to 1 GiB"),
            (EngineConfig { piece_bytes: 63, ..good.clone() }, "piece_bytes is 63"),
            (EngineConfig { credit_pieces: 0, ..good.clone() }, "credit_pieces is 0"),
            (EngineConfig { max_pending: 7, ..good }, "max_pending is 7"),
        ];
        for (config, text) in cases {
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}
