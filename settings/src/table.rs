//! All keys, and the typed [`Settings`] that the rest of Gradwire reads.
//!
//! One declaration defines the field, its documentation, and the row of [`KEYS`] that loading,
//! `gradwire config show` and the tests use. Durations are written in milliseconds or microseconds
//! (the key ends in the unit) and read as [`Duration`].

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use gradwire_collectives::Rules;

use crate::key::{AddressRange, Checked, Key, Kind};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const HOUR_MS: u64 = 3_600_000;

/// The smallest `worker.arena_segment_bytes`.
pub const MIN_SEGMENT_BYTES: u64 = 64 * KIB;

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Whether ordinary tensors move into shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adopt {
    /// When they are exchanged again.
    Auto,
    /// Never: they are copied each time.
    Off,
}

/// Whether a worker's memory is backed by huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePages {
    /// Ordinary pages.
    Never,
    /// Huge pages where the system offers them.
    Advise,
    /// Huge pages, or an error.
    Require,
}

/// Whether the links between nodes are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeEnabled {
    /// With two nodes or more, if there is a choice between algorithms.
    Auto,
    /// With two nodes or more.
    True,
    /// Never.
    False,
}

/// A type that is made from a checked value. `None` means that a key's declaration contradicts
/// itself; the test of the defaults finds that.
trait Field: Sized {
    fn read(value: &Checked, unit: &str) -> Option<Self>;
}

impl Field for Option<u64> {
    fn read(value: &Checked, _unit: &str) -> Option<Self> {
        if let Checked::Number(number) = value { Some(*number) } else { None }
    }
}

impl Field for u64 {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        Option::<Self>::read(value, unit)?
    }
}

impl Field for u32 {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        Self::try_from(u64::read(value, unit)?).ok()
    }
}

impl Field for usize {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        Self::try_from(u64::read(value, unit)?).ok()
    }
}

impl Field for Option<Duration> {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        let number = Option::<u64>::read(value, unit)?;
        match unit {
            "ms" => Some(number.map(Duration::from_millis)),
            "us" => Some(number.map(Duration::from_micros)),
            _ => None,
        }
    }
}

impl Field for Duration {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        Option::<Self>::read(value, unit)?
    }
}

impl Field for String {
    fn read(value: &Checked, _unit: &str) -> Option<Self> {
        if let Checked::Text(text) = value { Some(text.clone()) } else { None }
    }
}

impl Field for bool {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        String::read(value, unit)?.parse().ok()
    }
}

impl Field for Vec<String> {
    fn read(value: &Checked, _unit: &str) -> Option<Self> {
        if let Checked::Words(words) = value { Some(words.clone()) } else { None }
    }
}

impl Field for Option<SocketAddr> {
    fn read(value: &Checked, _unit: &str) -> Option<Self> {
        if let Checked::Address(address) = value { Some(*address) } else { None }
    }
}

impl Field for AddressRange {
    fn read(value: &Checked, _unit: &str) -> Option<Self> {
        if let Checked::AddressRange(range) = value { Some(range.clone()) } else { None }
    }
}

impl Field for Rules {
    fn read(value: &Checked, _unit: &str) -> Option<Self> {
        if let Checked::Rules(rules) = value { Some(rules.clone()) } else { None }
    }
}

impl Field for LogFormat {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        match String::read(value, unit)?.as_str() {
            "text" => Some(Self::Text),
            "json" => Some(Self::Json),
            _ => None,
        }
    }
}

impl Field for ProbeEnabled {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        match String::read(value, unit)?.as_str() {
            "auto" => Some(Self::Auto),
            "true" => Some(Self::True),
            "false" => Some(Self::False),
            _ => None,
        }
    }
}

impl Field for Adopt {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        match String::read(value, unit)?.as_str() {
            "auto" => Some(Self::Auto),
            "off" => Some(Self::Off),
            _ => None,
        }
    }
}

impl Field for HugePages {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        match String::read(value, unit)?.as_str() {
            "never" => Some(Self::Never),
            "advise" => Some(Self::Advise),
            "require" => Some(Self::Require),
            _ => None,
        }
    }
}

macro_rules! settings {
    ($(
        $(#[doc = $sdoc:literal])+
        $section:ident: $Section:ident {
            $(
                $(#[doc = $doc:literal])+
                $field:ident: $type:ty = $key:literal, $kind:expr, $default:literal, $unit:literal;
            )+
        }
    )+) => {
        $(
            $(#[doc = $sdoc])+
            #[derive(Debug, Clone, PartialEq, Eq)]
            pub struct $Section {
                $(
                    $(#[doc = $doc])+
                    #[doc = ""]
                    #[doc = concat!("Key `", $key, "`, default `", $default, "`.")]
                    pub $field: $type,
                )+
            }
        )+

        /// Every setting, checked.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Settings {
            $( $(#[doc = $sdoc])+ pub $section: $Section, )+
        }

        /// Every key, in the order of [`Settings`].
        pub const KEYS: &[Key] = &[$($(
            Key {
                name: $key,
                kind: $kind,
                default: $default,
                unit: $unit,
                doc: concat!($($doc),+).trim_ascii(),
            },
        )+)+];

        impl Settings {
            /// Builds the settings from one checked value for each key.
            pub(crate) fn from_checked(values: &BTreeMap<&'static str, Checked>) -> Option<Self> {
                Some(Self {$(
                    $section: $Section {$(
                        $field: Field::read(values.get($key)?, $unit)?,
                    )+},
                )+})
            }
        }
    };
}

settings! {
    /// The job as a whole.
    job: Job {
        /// An operation fails if no connection that it waits for moves a byte for this long. After
        /// an outage TCP is silent for another second, so to survive an outage of
        /// heartbeat.timeout_ms, this must be more than a second longer.
        timeout: Duration = "job.timeout_ms", Kind::Number { min: 100, max: HOUR_MS }, "5000", "ms";
    }
    /// The coordinator.
    coordinator: Coordinator {
        /// The address on which daemons reach it; empty: the first host's address, any free port.
        listen: Option<SocketAddr> = "coordinator.listen", Kind::AddressOrNone, "", "";
        /// The address on which it serves /metrics, /healthz and /readyz, at the first free port.
        /// The daemon that hosts it serves them at its own address (metrics.listen), and also here
        /// if this has a port.
        metrics_listen: AddressRange =
            "coordinator.metrics_listen", Kind::AddressRange, "127.0.0.1:0", "";
        /// How long failure reports are collected before the most likely one is named as the cause.
        cause_window: Duration =
            "coordinator.cause_window_ms", Kind::Number { min: 0, max: 10_000 }, "200", "ms";
    }
    /// How the coordinator orders operations.
    negotiation: Negotiation {
        /// The largest piece: small tensors are fused up to this size, large ones are cut to it.
        piece_bytes: u64 =
            "negotiation.piece_bytes",
            Kind::Bytes { min: 64 * KIB, max: 64 * MIB }, "4MiB", "bytes";
        /// How many pieces may be in flight at once. Tensors that become ready in the meantime are
        /// fused and ordered by priority.
        credit_pieces: u32 =
            "negotiation.credit_pieces", Kind::Number { min: 1, max: 1024 }, "8", "pieces";
        /// How many tensor names have short ids at a time. Another name takes the id of a tensor
        /// that is not in use. If all are in use, the name itself is sent.
        max_tensors: u32 =
            "negotiation.max_tensors", Kind::Number { min: 1, max: 16_777_216 }, "65536", "tensors";
        /// A tensor that waits longer than this for a rank is reported with the missing ranks.
        stall_warning: Duration =
            "negotiation.stall_warning_ms",
            Kind::Number { min: 100, max: 24 * HOUR_MS }, "10000", "ms";
        /// Which algorithms may run: an algorithm with its parameters, such as circulant(radix=4),
        /// or rules by collective and size, such as allreduce:0-64K=recursive-doubling; 64K-=^ring.
        /// auto: the cost model decides for each piece.
        algorithm: Rules = "negotiation.algorithm", Kind::Rules, "auto", "";
        /// The same bits in every run: reductions add in a fixed order, whatever the algorithm and
        /// the pieces. They use only recursive-doubling, halving-doubling or rabenseifner, and
        /// data.compression must be none.
        strict: bool = "negotiation.strict", Kind::Choice(&["false", "true"]), "false", "";
    }
    /// The connections between nodes that carry tensor bytes.
    data: Data {
        /// Data threads of a daemon; each has its own connections to each peer.
        lanes: u32 = "data.lanes", Kind::Number { min: 1, max: 16 }, "2", "threads";
        /// Connections of each data thread to each peer. The next chunk goes to whichever is free.
        /// More than one helps where single connections are sometimes slow.
        streams: u32 = "data.streams", Kind::Number { min: 1, max: 16 }, "1", "connections";
        /// How many bytes are received, reduced and sent on at a time. Smaller chunks overlap
        /// better, larger ones need fewer calls.
        chunk_bytes: u64 =
            "data.chunk_bytes", Kind::Bytes { min: 4 * KIB, max: 4 * MIB }, "256KiB", "bytes";
        /// The format in which reduced f32 tensors are sent between nodes. bf16 has half the bytes
        /// and 8 bits of precision. int8 and fp8 have a quarter of the bytes. They apply to
        /// allreduces (sum, average) of tensors from 64 KiB on, in groups of 256 elements with one
        /// scale. The coordinator decides for all nodes.
        compression: String =
            "data.compression", Kind::Choice(&["none", "bf16", "int8", "fp8"]), "none", "";
        /// The most memory of a daemon for error feedback with int8 and fp8: four bytes for each
        /// element keep the rounding error, which is added in the next step. Tensors beyond the
        /// limit are rounded without error feedback.
        feedback_max_bytes: u64 =
            "data.feedback_max_bytes", Kind::Bytes { min: 0, max: 1024 * GIB }, "4GiB", "bytes";
        /// The sockets' send and receive buffers; 0: 2 MiB shared by the connections with a peer,
        /// and more for long round-trip times, if the system allows it.
        socket_buffer_bytes: u64 =
            "data.socket_buffer_bytes", Kind::Bytes { min: 0, max: GIB }, "0", "bytes";
        /// The connections' congestion control, such as cubic or bbr; empty: the system's, with two
        /// exceptions. cubic replaces bbr, which is slow where several nodes send to one. Loopback
        /// uses reno, because there is no congestion and pacing only costs time.
        congestion_control: String = "data.congestion_control", Kind::Text, "", "";
        /// How long connecting to a peer may take, including the handshake.
        connect_timeout: Duration =
            "data.connect_timeout_ms", Kind::Number { min: 10, max: HOUR_MS }, "3000", "ms";
        /// The address on which a daemon listens for its peers; empty: its host's address and a
        /// free port.
        listen: Option<SocketAddr> = "data.listen", Kind::AddressOrNone, "", "";
    }
    /// The links between nodes, as the cost model assumes them. They only affect the choice of
    /// algorithms. A value that differs from its default takes precedence over measurements
    /// (probe.enabled).
    network: Network {
        /// The time from the end of a send to the first byte at the receiver, inside a rack.
        latency: Duration =
            "network.latency_us", Kind::Number { min: 0, max: 10_000_000 }, "40", "us";
        /// The rate of a node's line in each direction.
        rate_mbit: u32 =
            "network.rate_mbit", Kind::Number { min: 1, max: 10_000_000 }, "25000", "Mbit/s";
        /// Like network.latency_us, but between racks.
        rack_latency: Duration =
            "network.rack_latency_us", Kind::Number { min: 0, max: 10_000_000 }, "60", "us";
        /// A node's share of its rack's uplink when all nodes of the rack use it.
        rack_rate_mbit: u32 =
            "network.rack_rate_mbit", Kind::Number { min: 1, max: 10_000_000 }, "8333", "Mbit/s";
        /// How fast received bytes are reduced.
        reduce_mb: u32 =
            "network.reduce_mb_per_s", Kind::Number { min: 1, max: 10_000_000 }, "10000", "MB/s";
        /// The number of bytes after which the next hop can begin. It is less than
        /// data.chunk_bytes, because a node does not wait for a full chunk.
        chunk_bytes: u64 =
            "network.chunk_bytes", Kind::Bytes { min: 4 * KIB, max: 4 * MIB }, "128KiB", "bytes";
        /// Processor time for each message.
        message_ns: u32 =
            "network.message_ns", Kind::Number { min: 0, max: 100_000_000 }, "3000", "ns";
        /// How much of the rate is lost when several nodes send to one at once.
        burst_loss: u32 =
            "network.burst_loss_percent", Kind::Number { min: 0, max: 1000 }, "7", "percent";
        /// How many nodes may send to one without further loss.
        free_senders: u32 =
            "network.free_senders", Kind::Number { min: 1, max: 4096 }, "8", "nodes";
        /// How much of the rate is lost for each sender beyond network.free_senders.
        sender_loss: u32 =
            "network.sender_loss_percent", Kind::Number { min: 0, max: 1000 }, "3", "percent";
        /// How many bytes several nodes may send to one at once before the queue of its line
        /// overflows. 0: no limit.
        queue_bytes: u64 =
            "network.queue_bytes", Kind::Bytes { min: 0, max: GIB }, "0", "bytes";
        /// The delay when that queue overflows, until the lost packets are retransmitted.
        overflow: Duration =
            "network.overflow_us", Kind::Number { min: 0, max: 10_000_000 }, "0", "us";
        /// The number of equal-cost paths out of a rack, to which connections are assigned at
        /// random (ECMP).
        rack_paths: u32 =
            "network.rack_paths", Kind::Number { min: 1, max: 4096 }, "1", "paths";
        /// The rate of one data thread; a single piece uses one. 0: as fast as the line.
        lane_rate_mbit: u32 =
            "network.lane_rate_mbit", Kind::Number { min: 0, max: 10_000_000 }, "0", "Mbit/s";
        /// How fast results are handed to the ranks. 0: instantly.
        publish_mb: u32 =
            "network.publish_mb_per_s", Kind::Number { min: 0, max: 10_000_000 }, "0", "MB/s";
        /// The fixed time for each operation: the order to start it, and the reports that it is
        /// done.
        operation: Duration =
            "network.operation_us", Kind::Number { min: 0, max: 10_000_000 }, "0", "us";
    }
    /// How the links between nodes are measured when a job starts.
    probe: Probe {
        /// Whether links are measured. auto: with two nodes or more, if there is a choice of
        /// algorithms. The probe takes at most one second, and operations wait until it is over.
        enabled: ProbeEnabled =
            "probe.enabled", Kind::Choice(&["auto", "true", "false"]), "auto", "";
    }
    /// Correction of the cost model by measured times.
    tuning: Tuning {
        /// Whether at most 2 % of the operations try algorithms other than the cost model's choice.
        /// A faster one replaces it. Never with negotiation.strict.
        enabled: bool = "tuning.enabled", Kind::Choice(&["false", "true"]), "false", "";
        /// With tuning.enabled: the absolute path of a folder on the first host, where measured
        /// times are kept for the next job on the same hosts; empty: they are not kept. Delete the
        /// file there to measure again.
        directory: String = "tuning.directory", Kind::Text, "", "";
    }
    /// How a silent node is noticed.
    heartbeat: Heartbeat {
        /// The time between two heartbeats.
        interval: Duration =
            "heartbeat.interval_ms", Kind::Number { min: 10, max: 60_000 }, "500", "ms";
        /// A job survives an outage of this length. A node or coordinator that is silent for one
        /// interval longer is lost. Must be more than twice the interval.
        timeout: Duration =
            "heartbeat.timeout_ms", Kind::Number { min: 30, max: HOUR_MS }, "3000", "ms";
    }
    /// This node.
    node: Node {
        /// The node's rack; nodes of one rack are near each other. Racks may be grouped, and groups
        /// may be nested: pod1/r3 is a rack of pod1.
        rack: String = "node.rack", Kind::RackLabel, "", "";
        /// The rate of the node's line; auto: network.rate_mbit if that is set, otherwise what the
        /// interface reports. Nodes with faster lines reduce larger parts of a piece.
        line_mbit: Option<u64> =
            "node.line_mbit", Kind::NumberOrAuto { min: 1, max: 10_000_000 }, "auto", "Mbit/s";
    }
    /// A training process.
    worker: Worker {
        /// A worker's shared memory grows in segments of 4, 4, 8, 16 … MiB, up to this segment
        /// size; a larger tensor gets its own segment.
        arena_segment_bytes: u64 =
            "worker.arena_segment_bytes",
            Kind::Bytes { min: MIN_SEGMENT_BYTES, max: 64 * GIB }, "64MiB", "bytes";
        /// The most shared memory of one worker; 0: no limit but that of the machine.
        arena_max_bytes: u64 =
            "worker.arena_max_bytes", Kind::Bytes { min: 0, max: 1024 * GIB }, "0", "bytes";
        /// The most segments of one worker. Adopted tensors take at most half of them.
        max_segments: u32 =
            "worker.max_segments", Kind::Number { min: 1, max: 65_536 }, "1024", "segments";
        /// Whether the memory of a PyTorch CPU tensor is moved into shared memory when the tensor
        /// is exchanged in place a second time, so that it is not copied any more.
        adopt: Adopt = "worker.adopt", Kind::Choice(&["auto", "off"]), "auto", "";
        /// Larger tensors are not moved.
        adopt_max_bytes: u64 =
            "worker.adopt_max_bytes", Kind::Bytes { min: 64 << 10, max: 1024 * GIB }, "4GiB",
            "bytes";
        /// How long a waiting worker spins before it sleeps; auto: depends on the number of cores
        /// and workers.
        spin: Option<Duration> =
            "worker.spin_us", Kind::NumberOrAuto { min: 0, max: 1_000_000 }, "auto", "us";
        /// The largest object that a worker sends with broadcast_object or allgather_object.
        max_object_bytes: u64 =
            "worker.max_object_bytes", Kind::Bytes { min: 1, max: 1024 * GIB }, "1GiB", "bytes";
        /// A worker considers the daemon lost after this long without its heartbeat.
        daemon_timeout: Duration =
            "worker.daemon_timeout_ms", Kind::Number { min: 1000, max: HOUR_MS }, "4000", "ms";
        /// Whether shared memory is backed by huge pages.
        huge_pages: HugePages =
            "worker.huge_pages", Kind::Choice(&["never", "advise", "require"]), "advise", "";
    }
    /// Logging.
    log: Log {
        /// A level (error, warn, info, debug, trace) or a filter such as
        /// warn,gradwire_daemon=debug.
        level: String = "log.level", Kind::Text, "warn", "";
        /// The format of log lines.
        format: LogFormat = "log.format", Kind::Choice(&["text", "json"]), "text", "";
    }
    /// A daemon's metrics.
    metrics: Metrics {
        /// The address on which it serves /metrics, /healthz and /readyz, at the first free port.
        /// With 0.0.0.0, other hosts can read them, too.
        listen: AddressRange =
            "metrics.listen", Kind::AddressRange, "127.0.0.1:9401-9499", "";
        /// The absolute path of a file on the first host that contains a token. The status page and
        /// its API require this token. If empty, they require no token on loopback addresses, and
        /// refuse all requests if metrics.listen is any other address.
        token_file: String = "metrics.token_file", Kind::Text, "", "";
    }
    /// Export of metrics and spans with OpenTelemetry's protocol.
    otlp: Otlp {
        /// The collector to which every daemon sends its metrics with OTLP over gRPC, and the first
        /// daemon also spans, such as http://127.0.0.1:4317; empty: none.
        endpoint: String = "otlp.endpoint", Kind::UrlOrNone, "", "";
        /// Each step whose number is a multiple of this is sent as spans; 0: none. Other steps are
        /// not recorded.
        sample_steps: u64 =
            "otlp.sample_steps", Kind::Number { min: 0, max: 1_000_000_000 }, "0", "steps";
        /// The time between two exports of metrics.
        interval: Duration =
            "otlp.interval_ms", Kind::Number { min: 100, max: HOUR_MS }, "10000", "ms";
    }
    /// `gradwire run`.
    launch: Launch {
        /// How long it may take until every daemon is ready and every rank is started.
        start_timeout: Duration =
            "launch.start_timeout_ms", Kind::Number { min: 100, max: 24 * HOUR_MS }, "30000", "ms";
        /// How long processes may take to exit when they are asked to, before they are killed.
        grace: Duration = "launch.grace_ms", Kind::Number { min: 0, max: HOUR_MS }, "3000", "ms";
        /// The program that starts commands on other hosts.
        ssh: String = "launch.ssh", Kind::Text, "ssh", "";
        /// Its arguments before the host's name. The default does not share connections with other
        /// SSH sessions.
        ssh_args: Vec<String> =
            "launch.ssh_args",
            Kind::Words,
            "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 \
             -o ControlMaster=no -o ControlPath=none", "";
        /// The gradwire program on other hosts.
        remote_gradwire: String = "launch.remote_gradwire", Kind::Text, "gradwire", "";
        /// The gradwired program; empty: next to gradwire, otherwise in PATH.
        gradwired: String = "launch.gradwired", Kind::Text, "", "";
    }
}
