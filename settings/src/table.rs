//! All keys, and the typed [`Settings`] that the rest of Gradwire reads.
//!
//! One declaration makes three things: the field, its documentation, and the key that loading,
//! `gradwire config show` and the tests use.

use std::{net::SocketAddr, ops::Deref, time::Duration};

use gradwire_collectives::Rules;
use gradwire_keys::{
    AddressRange, Checked, Key, Kind, Start, Worker,
    section::{Field, Values},
    sections,
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const HOUR_MS: u64 = 3_600_000;

/// What a log line looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object a line.
    Json,
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

/// Which algorithms may run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Algorithms(pub Rules);

impl Deref for Algorithms {
    type Target = Rules;

    fn deref(&self) -> &Rules {
        &self.0
    }
}

impl Field for Algorithms {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        Rules::parse(&String::read(value, unit)?).ok().map(Self)
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

sections! {
    /// The job as a whole.
    Job {
        /// An operation fails if none of the connections that it waits for moves a byte for this
        /// long. After an outage TCP is silent for another second, so an outage of
        /// heartbeat.timeout_ms needs more than that one and a second.
        timeout: Duration = "job.timeout_ms", Kind::Number { min: 100, max: HOUR_MS }, "5000", "ms";
    }
    /// The coordinator.
    Coordinator {
        /// Where it listens for daemons; empty: the first host's address and a free port.
        listen: Option<SocketAddr> = "coordinator.listen", Kind::AddressOrNone, "", "";
        /// Where it serves /metrics, /healthz and /readyz: the first free port. The daemon that
        /// hosts it shows them at its own address (metrics.listen), and here too if this has a
        /// port.
        metrics_listen: AddressRange =
            "coordinator.metrics_listen", Kind::AddressRange, "127.0.0.1:0", "";
        /// How long reports of a failure are collected before the most likely one is named as the
        /// cause.
        cause_window: Duration =
            "coordinator.cause_window_ms", Kind::Number { min: 0, max: 10_000 }, "200", "ms";
    }
    /// How the coordinator orders operations.
    Negotiation {
        /// The largest piece: small tensors are fused up to it, large ones are cut to it.
        piece_bytes: u64 =
            "negotiation.piece_bytes",
            Kind::Bytes { min: 64 * KIB, max: 64 * MIB }, "4MiB", "bytes";
        /// How many pieces may be in flight at once. Tensors that become ready meanwhile are fused
        /// and ordered by priority.
        credit_pieces: u32 =
            "negotiation.credit_pieces", Kind::Number { min: 1, max: 1024 }, "8", "pieces";
        /// How many tensor names have short ids at a time. A further name takes the id of one that
        /// is not in use. If all are in use, the name itself is sent.
        max_tensors: u32 =
            "negotiation.max_tensors", Kind::Number { min: 1, max: 16_777_216 }, "65536", "tensors";
        /// A tensor that waits longer for some rank is reported with the missing ranks.
        stall_warning: Duration =
            "negotiation.stall_warning_ms",
            Kind::Number { min: 100, max: 24 * HOUR_MS }, "10000", "ms", User;
        /// Which algorithms may run: one with its parameters, such as circulant(radix=4), or rules
        /// by collective and size, such as allreduce:0-64K=recursive-doubling; 64K-=^ring. auto:
        /// the cost model decides piece by piece.
        algorithm: Algorithms = "negotiation.algorithm", Kind::Rules, "auto", "", User;
        /// The same bits in every run: reductions add up in one order, whatever the algorithm and
        /// the pieces. They then use only recursive-doubling, halving-doubling or rabenseifner, and
        /// data.compression must be none.
        strict: bool = "negotiation.strict", Kind::Choice(&["false", "true"]), "false", "", User;
    }
    /// The connections between nodes that carry tensor bytes.
    Data {
        /// Data threads of a daemon; each has connections of its own to each peer.
        lanes: u32 = "data.lanes", Kind::Number { min: 1, max: 16 }, "2", "threads", User;
        /// Connections of each data thread to each peer. The next chunk goes to whichever is free.
        /// More than one helps where single connections are slow at times.
        streams: u32 = "data.streams", Kind::Number { min: 1, max: 16 }, "1", "connections";
        /// How much is received, reduced and sent on at a time. Smaller chunks overlap better,
        /// larger ones need fewer calls.
        chunk_bytes: u64 =
            "data.chunk_bytes", Kind::Bytes { min: 4 * KIB, max: 4 * MIB }, "256KiB", "bytes";
        /// The format in which f32 is sent between nodes where it is reduced. bf16 has half the
        /// bytes and 8 bits of precision. int8 and fp8 have a quarter: they are for allreduces
        /// (sum, average) of tensors from 64 KiB on, in groups of 256 elements with one scale. The
        /// coordinator decides for all nodes.
        compression: String =
            "data.compression", Kind::Choice(&["none", "bf16", "int8", "fp8"]), "none", "", User;
        /// How much memory a daemon takes for what int8 and fp8 have lost, which is added the next
        /// time: four bytes for each element. Tensors beyond it are rounded without that.
        feedback_max_bytes: u64 =
            "data.feedback_max_bytes", Kind::Bytes { min: 0, max: 1024 * GIB }, "4GiB", "bytes";
        /// The sockets' send and receive buffers; 0: 2 MiB shared between the connections with a
        /// peer, and more where the path is long, if the system grants that.
        socket_buffer_bytes: u64 =
            "data.socket_buffer_bytes", Kind::Bytes { min: 0, max: GIB }, "0", "bytes";
        /// The connections' congestion control, such as cubic or bbr; empty: the system's, but
        /// cubic instead of bbr, which loses much where several nodes send to one; and reno on
        /// loopback, where there is nothing to congest and pacing only costs.
        congestion_control: String = "data.congestion_control", Kind::Text, "", "";
        /// How long a connection to a peer may take, with its handshake.
        connect_timeout: Duration =
            "data.connect_timeout_ms", Kind::Number { min: 10, max: HOUR_MS }, "3000", "ms";
        /// Where a daemon listens for its peers; empty: its host's address and a free port.
        listen: Option<SocketAddr> = "data.listen", Kind::AddressOrNone, "", "";
    }
    /// The links between nodes, as the cost model assumes them. They decide which algorithm is
    /// chosen, and nothing else. What differs from its default here is not replaced by what was
    /// measured (probe.enabled).
    Network {
        /// From the end of a send to the first byte at the receiver, inside a rack.
        latency: Duration =
            "network.latency_us", Kind::Number { min: 0, max: 10_000_000 }, "40", "us", Measured;
        /// The rate of a node's line; it sends and receives at once.
        rate_mbit: u32 =
            "network.rate_mbit",
            Kind::Number { min: 1, max: 10_000_000 }, "25000", "Mbit/s", Measured;
        /// As network.latency_us, between racks.
        rack_latency: Duration =
            "network.rack_latency_us",
            Kind::Number { min: 0, max: 10_000_000 }, "60", "us", Measured;
        /// A node's share of its rack's line to other racks, if all of its nodes use it.
        rack_rate_mbit: u32 =
            "network.rack_rate_mbit",
            Kind::Number { min: 1, max: 10_000_000 }, "8333", "Mbit/s", Measured;
        /// How fast received bytes are reduced.
        reduce_mb: u32 =
            "network.reduce_mb_per_s",
            Kind::Number { min: 1, max: 10_000_000 }, "10000", "MB/s", Measured;
        /// Processor time for each message.
        message_ns: u32 =
            "network.message_ns", Kind::Number { min: 0, max: 100_000_000 }, "3000", "ns", Measured;
        /// Paths of one cost out of a rack, among which connections are divided by chance (ECMP).
        rack_paths: u32 =
            "network.rack_paths", Kind::Number { min: 1, max: 4096 }, "1", "paths", Measured;
        /// How fast one data thread sends and receives; a piece that is alone has one. 0: as fast
        /// as the line.
        lane_rate_mbit: u32 =
            "network.lane_rate_mbit",
            Kind::Number { min: 0, max: 10_000_000 }, "0", "Mbit/s", Measured;
        /// How fast results are handed to the ranks. 0: at once.
        publish_mb: u32 =
            "network.publish_mb_per_s",
            Kind::Number { min: 0, max: 10_000_000 }, "0", "MB/s", Measured;
        /// What an operation takes besides: its order, and the reports that it is done.
        operation: Duration =
            "network.operation_us", Kind::Number { min: 0, max: 10_000_000 }, "0", "us", Measured;
    }
    /// How the links between nodes are measured when a job starts.
    Probe {
        /// Whether they are measured. auto: with two nodes or more, if there is a choice between
        /// algorithms. It takes at most one second. Operations wait until it is over.
        enabled: ProbeEnabled =
            "probe.enabled", Kind::Choice(&["auto", "true", "false"]), "auto", "";
    }
    /// How measured times correct the cost model.
    Tuning {
        /// Whether other algorithms than the cost model's are tried, in at most 2 % of the
        /// operations. What is faster replaces it. Never with negotiation.strict.
        enabled: bool = "tuning.enabled", Kind::Choice(&["false", "true"]), "false", "";
        /// With tuning.enabled: an absolute path of a folder on the first host, where the times of
        /// a job are kept for the next one on the same hosts; empty: they are not kept. Delete the
        /// file there to measure again.
        directory: String = "tuning.directory", Kind::Text, "", "";
    }
    /// How a silent node is noticed.
    Heartbeat {
        /// The time between two heartbeats.
        interval: Duration =
            "heartbeat.interval_ms", Kind::Number { min: 10, max: 60_000 }, "500", "ms";
        /// An outage as long as this is survived; a node or coordinator that is silent for longer,
        /// by one interval, is lost. More than twice the interval.
        timeout: Duration =
            "heartbeat.timeout_ms", Kind::Number { min: 30, max: HOUR_MS }, "3000", "ms", User;
    }
    /// This node.
    Node {
        /// The rack it is in; nodes of one rack are near each other. Racks may be in groups, and
        /// these in others: pod1/r3 is a rack of pod1.
        rack: String = "node.rack", Kind::RackLabel, "", "", User;
        /// The rate of its line; auto: network.rate_mbit if that is set, otherwise what the
        /// interface says. Where rates differ, who has a faster line reduces more of a piece.
        line_mbit: Option<u64> =
            "node.line_mbit",
            Kind::NumberOrAuto { min: 1, max: 10_000_000 }, "auto", "Mbit/s", Measured;
    }
    /// What is logged.
    Log {
        /// A level (error, warn, info, debug, trace) or a filter such as
        /// warn,gradwire_daemon=debug.
        level: String = "log.level", Kind::Text, "warn", "", User;
        /// What a line looks like.
        format: LogFormat = "log.format", Kind::Choice(&["text", "json"]), "text", "";
    }
    /// A daemon's metrics.
    Metrics {
        /// Where it serves /metrics, /healthz and /readyz: the first free port. An address of
        /// 0.0.0.0 lets other hosts read them, too.
        listen: AddressRange =
            "metrics.listen", Kind::AddressRange, "127.0.0.1:9401-9499", "", User;
        /// An absolute path of a file on the first host. Who looks at the status page or asks its
        /// interface must send the token in it. Needed where metrics.listen is no loopback address,
        /// which others can reach; empty: there the page refuses everybody.
        token_file: String = "metrics.token_file", Kind::Text, "", "";
    }
    /// Sending metrics and spans with OpenTelemetry's protocol.
    Otlp {
        /// Where every daemon sends its metrics with OTLP over gRPC, and the first one spans: a
        /// collector, such as http://127.0.0.1:4317; empty: nowhere.
        endpoint: String = "otlp.endpoint", Kind::UrlOrNone, "", "", User;
        /// Each step whose number is a multiple of this one is sent as spans; 0: none. Between
        /// these steps nothing is recorded.
        sample_steps: u64 =
            "otlp.sample_steps", Kind::Number { min: 0, max: 1_000_000_000 }, "0", "steps";
        /// The time between two messages with metrics.
        interval: Duration =
            "otlp.interval_ms", Kind::Number { min: 100, max: HOUR_MS }, "10000", "ms";
    }
    /// `gradwire run`.
    Launch {
        /// How long processes may take to end after they were asked to, before they are killed.
        grace: Duration = "launch.grace_ms", Kind::Number { min: 0, max: HOUR_MS }, "3000", "ms";
        /// The program that reaches another host.
        ssh: String = "launch.ssh", Kind::Text, "ssh", "";
        /// Its arguments before the host's name. The default shares no connection with other
        /// shells.
        ssh_args: Vec<String> =
            "launch.ssh_args",
            Kind::Words,
            "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 \
             -o ControlMaster=no -o ControlPath=none", "";
        /// The gradwire program on other hosts.
        remote_gradwire: String = "launch.remote_gradwire", Kind::Text, "gradwire", "";
        /// The gradwired program; empty: beside gradwire, else in PATH.
        gradwired: String = "launch.gradwired", Kind::Text, "", "";
    }
}

/// Makes [`Settings`] and [`KEYS`] of sections.
macro_rules! settings {
    ($( $(#[doc = $doc:literal])+ $section:ident: $Section:ident; )+) => {
        /// Every setting, checked.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Settings {
            $( $(#[doc = $doc])+ pub $section: $Section, )+
        }

        const SECTIONS: &[&[Key]] = &[$($Section::KEYS),+];

        impl Settings {
            /// Takes one checked value for each key.
            pub(crate) fn from_values(values: &Values) -> Option<Self> {
                Some(Self { $( $section: $Section::from_values(values)?, )+ })
            }
        }
    };
}

settings! {
    /// The job as a whole.
    job: Job;
    /// The coordinator.
    coordinator: Coordinator;
    /// How the coordinator orders operations.
    negotiation: Negotiation;
    /// The connections between nodes that carry tensor bytes.
    data: Data;
    /// measured (probe.enabled).
    network: Network;
    /// How the links between nodes are measured when a job starts.
    probe: Probe;
    /// How measured times correct the cost model.
    tuning: Tuning;
    /// How a silent node is noticed.
    heartbeat: Heartbeat;
    /// This node.
    node: Node;
    /// A training process.
    worker: Worker;
    /// What is logged.
    log: Log;
    /// A daemon's metrics.
    metrics: Metrics;
    /// Sending metrics and spans with OpenTelemetry's protocol.
    otlp: Otlp;
    /// `gradwire run`.
    launch: Launch;
    /// The start of a job.
    start: Start;
}

/// The number of keys.
const COUNT: usize = {
    let (mut count, mut section) = (0, 0);
    while section < SECTIONS.len() {
        count += SECTIONS[section].len();
        section += 1;
    }
    count
};

/// Every key, in the order of [`Settings`].
pub static KEYS: &[Key] = &{
    let mut all = [SECTIONS[0][0]; COUNT];
    let (mut at, mut section) = (0, 0);
    while section < SECTIONS.len() {
        let mut key = 0;
        while key < SECTIONS[section].len() {
            all[at] = SECTIONS[section][key];
            (at, key) = (at + 1, key + 1);
        }
        section += 1;
    }
    all
};
