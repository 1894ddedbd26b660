//! The configuration of the engine.

use std::{fmt::Display, time::Duration};

use gradwire_collectives::{Algorithm, CostModel, Rules, RulesError};
use gradwire_proto::{Compression, Epoch, JobId, MAX_LANES, Rank, beat::Limits};
use gradwire_settings::{OnDeadlock, ProbeEnabled, Settings, variables::VariableError};

use crate::error::CoordinatorError;

/// The most nodes of a job (BOUND): the most ranks, because each node has one. The world with the
/// longest names still fits in a message.
const MAX_NODES: u32 = Rank::MAX;

/// The smallest piece: a cache line, because cuts are aligned to cache lines.
pub(crate) const MIN_PIECE_BYTES: u64 = 64;

/// The largest piece.
const MAX_PIECE_BYTES: u64 = 1 << 30;

/// The most known tensors, unless more can have an id (BOUND).
const MAX_PENDING: u32 = 262_144;

/// The longest configurable time, so that sums of times do not overflow.
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
    /// The total number of ranks, if it is known. Mistakes are then noticed before the job starts.
    pub ranks: Option<u32>,
    /// The number of this formation of the world.
    pub epoch: Epoch,
    /// Whether the job is elastic: it goes on in other epochs, which have other daemons.
    pub elastic: bool,
    /// Data threads per daemon, with their own connections, 1 to [`MAX_LANES`]; sent to all nodes.
    pub lanes: u32,
    /// The wire type of reduced f32; sent to every node.
    pub compression: Compression,
    /// The interval between heartbeats, on both sides.
    pub heartbeat_interval: Duration,
    /// The silence after which a node is lost; more than twice the interval.
    pub heartbeat_timeout: Duration,
    /// How long a node whose stream broke may be away; `None`: it is lost at once.
    pub return_timeout: Option<Duration>,
    /// How long to wait for the nodes to join.
    pub start_timeout: Duration,
    /// How long to collect failure reports before the cause is sent to all nodes.
    pub cause_window: Duration,
    /// The wait after which missing ranks are reported.
    pub stall_warning: Duration,
    /// The wait for a rank after which the job fails; zero: never.
    pub stall_shutdown: Duration,
    /// The wait for a rank at [`gradwire_proto::FUNCTION_MEETING`] after which the epoch ends.
    pub elastic_timeout: Duration,
    /// What follows if no rank can ever go on.
    pub deadlock: OnDeadlock,
    /// The most bytes of one piece, 64 to 2^30.
    pub piece_bytes: u64,
    /// The most operations in flight, at least 1.
    pub credit_pieces: u32,
    /// The bytes of a chunk, until measured times change it.
    pub chunk_bytes: u64,
    /// Connections of each data thread to each peer, by the settings on this host.
    pub streams: u32,
    /// The most tensors with an id; others are sent by name.
    pub max_tensors: u32,
    /// The most known tensors; a job with more fails.
    pub max_pending: u32,
    /// The algorithms from which the cost model chooses.
    pub rules: Rules,
    /// The rules for quantized pieces.
    pub quantized_rules: Rules,
    /// The costs of the links.
    pub cost: CostModel,
    /// Whether the links between nodes are measured before the first operation.
    pub probe: bool,
    /// Whether measurements may determine the racks of nodes without labels, and the order of nodes
    /// in a ring. False if every run must add in the same order.
    pub may_arrange: bool,
    /// Whether algorithms other than the cheapest by the cost model are sometimes tried, so that
    /// measured times can correct the model.
    pub may_explore: bool,
}

impl EngineConfig {
    /// The configuration for a job of `nodes` nodes, of which the last `servers` have no ranks.
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
        let known = || format!("expected one of {}", Compression::NAMES.join(", "));
        let compression = name.parse().map_err(|_| invalid("data.compression", name, known()))?;
        Ok(Self {
            job,
            nodes,
            servers,
            ranks: None,
            epoch: Epoch(1),
            elastic: false,
            lanes: settings.data.lanes,
            compression,
            quantized_rules,
            heartbeat_interval: settings.heartbeat.interval,
            heartbeat_timeout: settings.heartbeat.timeout,
            return_timeout: settings.recovery.enabled.then_some(settings.recovery.return_timeout),
            start_timeout: settings.start.timeout,
            cause_window: settings.coordinator.cause_window,
            stall_warning: negotiation.stall_warning,
            stall_shutdown: negotiation.stall_shutdown,
            elastic_timeout: settings.elastic.timeout,
            deadlock: negotiation.deadlock,
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

    /// The epoch that challenges and joins name: 0 in a job with only one.
    pub(crate) fn named_epoch(&self) -> u64 {
        if self.elastic { self.epoch.0 } else { 0 }
    }

    /// How long a node may be silent. Its stream may have broken without a sign of that, and
    /// another one may follow.
    pub(crate) fn silence(&self) -> Limits {
        let limits = Limits::new(self.heartbeat_interval, self.heartbeat_timeout);
        limits.at_least(self.return_timeout.unwrap_or_default())
    }

    /// Checks every value.
    ///
    /// # Errors
    /// [`CoordinatorError::Config`] for the first value that is out of range.
    pub fn validate(&self) -> Result<(), CoordinatorError> {
        let ms = |time: Duration| format!("{} ms", time.as_millis());
        check("nodes", (1..=MAX_NODES).contains(&self.nodes), self.nodes, "it must be 1 to 4096")?;
        let servers = self.servers;
        check("servers", servers < self.nodes, servers, "at least one node must have ranks")?;
        let with_ranks = self.nodes - servers;
        let ranks = self.ranks.unwrap_or(with_ranks);
        let least = "each node except the servers must have at least one rank";
        check("ranks", ranks >= with_ranks, ranks, least)?;
        check("ranks", ranks <= Rank::MAX, ranks, "it must be at most 4096")?;
        check("lanes", (1..=MAX_LANES).contains(&self.lanes), self.lanes, "it must be 1 to 16")?;
        let interval = self.heartbeat_interval;
        check("heartbeat_interval", !interval.is_zero(), ms(interval), "it must be more than 0")?;
        check(
            "heartbeat_timeout",
            self.heartbeat_timeout > interval.saturating_mul(2),
            ms(self.heartbeat_timeout),
            "it must be more than twice the heartbeat_interval",
        )?;
        let stall = self.stall_warning;
        let least = "it must be at least 10 ms";
        check("stall_warning", stall >= Duration::from_millis(10), ms(stall), least)?;
        for (name, time) in [
            ("heartbeat_timeout", self.heartbeat_timeout),
            ("return_timeout", self.return_timeout.unwrap_or_default()),
            ("start_timeout", self.start_timeout),
            ("cause_window", self.cause_window),
            ("stall_warning", stall),
            ("stall_shutdown", self.stall_shutdown),
            ("elastic_timeout", self.elastic_timeout),
        ] {
            check(name, time <= MAX_TIME, ms(time), "it must be at most a year")?;
        }
        let piece = self.piece_bytes;
        let possible = (MIN_PIECE_BYTES..=MAX_PIECE_BYTES).contains(&piece);
        check("piece_bytes", possible, piece, "it must be 64 bytes to 1 GiB")?;
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
    fn defaults_are_valid_and_mistakes_are_named() {
        let good = EngineConfig::new(JobId::new("job").unwrap(), 2, 0, &Settings::default());
        let good = good.unwrap();
        good.validate().unwrap();
        let cases = [
            (EngineConfig { nodes: 0, ..good.clone() }, "nodes is 0: it must be 1 to 4096"),
            (EngineConfig { ranks: Some(1), ..good.clone() }, "ranks is 1: each node"),
            (EngineConfig { ranks: Some(4097), ..good.clone() }, "it must be at most 4096"),
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
