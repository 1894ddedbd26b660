//! All keys, and the typed [`Settings`] that the rest of Gradwire reads.
//!
//! One declaration defines the field, its documentation, and the key that loading,
//! `gradwire config show` and the tests use. Durations are written in milliseconds or microseconds
//! (the key ends in the unit) and read as [`Duration`].

use std::{net::SocketAddr, ops::Deref, time::Duration};

use gradwire_collectives::Rules;
use gradwire_keys::{
    AddressRange, Checked, Checks, Elastic, Key, Kind, Start, Worker,
    section::{Field, Values},
    sections,
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const HOUR_MS: u64 = 3_600_000;

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// What starts programs on other hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Starter {
    /// Slurm on the hosts of its allocation, otherwise ssh.
    Auto,
    /// ssh, or another program in its place.
    Ssh,
    /// Slurm's srun.
    Srun,
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

/// What follows if no rank can ever go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnDeadlock {
    /// The job fails.
    Fail,
    /// It is reported.
    Warn,
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

impl Field for Starter {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        match String::read(value, unit)?.as_str() {
            "auto" => Some(Self::Auto),
            "ssh" => Some(Self::Ssh),
            "srun" => Some(Self::Srun),
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

impl Field for OnDeadlock {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        match String::read(value, unit)?.as_str() {
            "fail" => Some(Self::Fail),
            "warn" => Some(Self::Warn),
            _ => None,
        }
    }
}

sections! {
    /// The job as a whole.
    Job {
        /// An operation fails if no connection that it waits for moves a byte for this long. After
        /// an outage TCP is silent for another second, so to survive an outage of
        /// heartbeat.timeout_ms, this must be more than a second longer.
        timeout: Duration = "job.timeout_ms", Kind::Number { min: 100, max: HOUR_MS }, "5000", "ms";
    }
    /// The coordinator.
    Coordinator {
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
    Negotiation {
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
        /// A tensor that waits longer than this for a rank is reported with the missing ranks, and
        /// again each time that its wait has doubled.
        stall_warning: Duration =
            "negotiation.stall_warning_ms",
            Kind::Number { min: 100, max: 24 * HOUR_MS }, "5000", "ms", User;
        /// A tensor that waits longer than this for a rank ends the job; 0: never.
        stall_shutdown: Duration =
            "negotiation.stall_shutdown_ms",
            Kind::Number { min: 0, max: 24 * HOUR_MS }, "0", "ms";
        /// What follows if it is certain that no rank can ever go on, because every rank waits for
        /// an operation that other ranks have not called: the job fails with a table of what each
        /// rank waits for, or the table is only reported.
        deadlock: OnDeadlock =
            "negotiation.deadlock", Kind::Choice(&["fail", "warn"]), "fail", "";
        /// Which algorithms may run: an algorithm with its parameters, such as circulant(radix=4),
        /// or rules by collective and size, such as allreduce:0-64K=recursive-doubling; 64K-=^ring.
        /// auto: the cost model decides for each piece.
        algorithm: Algorithms = "negotiation.algorithm", Kind::Rules, "auto", "", User;
        /// The same bits in every run: reductions add in a fixed order, whatever the algorithm and
        /// the pieces. They use only recursive-doubling, halving-doubling or rabenseifner, and
        /// data.compression must be none.
        strict: bool = "negotiation.strict", Kind::Choice(&["false", "true"]), "false", "", User;
    }
    /// The connections between nodes that carry tensor bytes.
    Data {
        /// Data threads of a daemon; each has its own connections to each peer.
        lanes: u32 = "data.lanes", Kind::Number { min: 1, max: 16 }, "2", "threads";
        /// How many threads of a daemon may reduce and publish tensors at once: its data.lanes, and
        /// helpers that do parts of large pieces. auto: one for each core that the daemon may use,
        /// but no more than make a reduction faster on this machine, and only the lanes on a node
        /// with one rank.
        threads: Option<u64> =
            "data.threads", Kind::NumberOrAuto { min: 1, max: 256 }, "auto", "threads", User;
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
            "data.compression", Kind::Choice(&["none", "bf16", "int8", "fp8"]), "none", "", User;
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
        /// uses reno, because pacing only costs time without congestion.
        congestion_control: String = "data.congestion_control", Kind::Text, "", "";
        /// How long connecting to a peer may take, including the handshake. Ten measured round
        /// trips are added, so a long line needs no other value.
        connect_timeout: Duration =
            "data.connect_timeout_ms", Kind::Number { min: 10, max: HOUR_MS }, "3000", "ms";
        /// The network that carries the data: names of interfaces (eth1), patterns (ib*) or
        /// networks (10.1.0.0/16), separated by commas. The first that a host has counts; after ^,
        /// all that are not in the list. eth1+eth2 uses both together. Empty: NCCL_SOCKET_IFNAME or
        /// GLOO_SOCKET_IFNAME, if they are set, or else the network by which the launcher reaches
        /// the host.
        interface: String = "data.interface", Kind::Text, "", "", User;
        /// The address on which a daemon listens for its peers, instead of data.interface; empty:
        /// its host's address there and a free port.
        listen: Option<SocketAddr> = "data.listen", Kind::AddressOrNone, "", "";
    }
    /// What a job survives.
    Recovery {
        /// Whether a connection that breaks is made again and continues where it ended: data
        /// connections, and those with the coordinator. With false, the job fails if data was in
        /// flight, or if it was a connection with the coordinator.
        enabled: bool = "recovery.enabled", Kind::Choice(&["false", "true"]), "true", "";
        /// How long a connection that broke may be missing before the job fails, and how long a
        /// node and the coordinator may be silent. A daemon that the launcher has seen end is not
        /// waited for.
        return_timeout: Duration =
            "recovery.return_timeout_ms", Kind::Number { min: 100, max: HOUR_MS }, "10000", "ms";
        /// How often an elastic job continues after losses of daemons or their connections in
        /// which no rank was lost. After the next one it ends with exit code 75.
        restarts: u32 =
            "recovery.restarts", Kind::Number { min: 0, max: 1_000_000 }, "100", "losses";
    }
    /// The links between nodes, as the cost model assumes them. They only affect the choice of
    /// algorithms. A value that differs from its default takes precedence over measurements
    /// (probe.enabled).
    Network {
        /// The time from the end of a send to the first byte at the receiver, inside a rack.
        latency: Duration =
            "network.latency_us", Kind::Number { min: 0, max: 10_000_000 }, "40", "us", Measured;
        /// The rate of a node's line in each direction.
        rate_mbit: u32 =
            "network.rate_mbit",
            Kind::Number { min: 1, max: 10_000_000 }, "25000", "Mbit/s", Measured;
        /// Like network.latency_us, but between racks.
        rack_latency: Duration =
            "network.rack_latency_us",
            Kind::Number { min: 0, max: 10_000_000 }, "60", "us", Measured;
        /// A node's share of its rack's uplink when all nodes of the rack use it.
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
        /// The number of equal-cost paths out of a rack, to which connections are assigned at
        /// random (ECMP).
        rack_paths: u32 =
            "network.rack_paths", Kind::Number { min: 1, max: 4096 }, "1", "paths", Measured;
        /// The rate of one data thread; a single piece uses one. 0: as fast as the line.
        lane_rate_mbit: u32 =
            "network.lane_rate_mbit",
            Kind::Number { min: 0, max: 10_000_000 }, "0", "Mbit/s", Measured;
        /// How fast results are handed to the ranks. 0: instantly.
        publish_mb: u32 =
            "network.publish_mb_per_s",
            Kind::Number { min: 0, max: 10_000_000 }, "0", "MB/s", Measured;
        /// The fixed time for each operation: the order to start it, and the reports that it is
        /// done.
        operation: Duration =
            "network.operation_us", Kind::Number { min: 0, max: 10_000_000 }, "0", "us", Measured;
    }
    /// How the links between nodes are measured when a job starts.
    Probe {
        /// Whether links are measured. auto: with two nodes or more, if there is a choice of
        /// algorithms. The probe takes at most one second, and operations wait until it is over.
        enabled: ProbeEnabled =
            "probe.enabled", Kind::Choice(&["auto", "true", "false"]), "auto", "";
    }
    /// Correction of the cost model by measured times.
    Tuning {
        /// Whether at most 2 % of the operations try algorithms other than the cost model's choice.
        /// A faster one replaces it. Never with negotiation.strict.
        enabled: bool = "tuning.enabled", Kind::Choice(&["false", "true"]), "false", "";
        /// With tuning.enabled: the absolute path of a folder on the first host, where measured
        /// times are kept for the next job on the same hosts; empty: they are not kept. Delete the
        /// file there to measure again.
        directory: String = "tuning.directory", Kind::Text, "", "";
    }
    /// What happens to a job that stands still as a whole. Its steps are those of optimizers and of
    /// mark_step(). Nothing happens before the second step, and while a rank is paused.
    Watchdog {
        /// If no rank makes a step for this many times the median of the last steps, what all ranks
        /// do is reported, and again each time that the time has doubled; 0: never.
        factor: u32 = "watchdog.factor", Kind::Number { min: 0, max: 1_000_000 }, "20", "steps";
        /// A shorter time without a step is never reported.
        min: Duration =
            "watchdog.min_ms", Kind::Number { min: 100, max: 24 * HOUR_MS }, "60000", "ms";
        /// A time without a step that is longer than this, and long enough to be reported, ends the
        /// job; with watchdog.factor=0 it only has to be longer than watchdog.min_ms; 0: none does.
        abort: Duration =
            "watchdog.abort_ms", Kind::Number { min: 0, max: 24 * HOUR_MS }, "0", "ms";
    }
    /// The flight recorder: the last operations of each rank and the last events of each daemon.
    Recorder {
        /// The absolute path of a folder on each host, or of one that all hosts share. When a job
        /// fails, and when `gradwire report` asks for it, each daemon writes a file there; empty:
        /// none does.
        directory: String = "recorder.directory", Kind::Text, "", "";
    }
    /// How a silent node is noticed.
    Heartbeat {
        /// The time between two heartbeats.
        interval: Duration =
            "heartbeat.interval_ms", Kind::Number { min: 10, max: 60_000 }, "500", "ms";
        /// A job survives an outage of this length. A node or coordinator that is silent for one
        /// interval longer is lost; with recovery.enabled, the node then opens another connection
        /// with the coordinator, and is lost after recovery.return_timeout_ms of silence if that is
        /// longer. Must be more than twice the interval.
        timeout: Duration =
            "heartbeat.timeout_ms", Kind::Number { min: 30, max: HOUR_MS }, "3000", "ms", User;
    }
    /// This node.
    Node {
        /// The node's rack; nodes of one rack are near each other. Racks may be grouped, and groups
        /// may be nested: pod1/r3 is a rack of pod1.
        rack: String = "node.rack", Kind::RackLabel, "", "", User;
        /// The rate of the node's line; auto: network.rate_mbit if that is set, otherwise what the
        /// interface reports. Nodes with faster lines reduce larger parts of a piece.
        line_mbit: Option<u64> =
            "node.line_mbit",
            Kind::NumberOrAuto { min: 1, max: 10_000_000 }, "auto", "Mbit/s", Measured;
    }
    /// Logging.
    Log {
        /// A level (off, error, warn, info, debug, trace) or a filter of modules, such as
        /// warn,gradwire_daemon=debug.
        level: String = "log.level", Kind::Text, "warn", "", User;
        /// The format of log lines.
        format: LogFormat = "log.format", Kind::Choice(&["text", "json"]), "text", "";
    }
    /// A daemon's metrics.
    Metrics {
        /// The address on which it serves /metrics, /healthz and /readyz, at the first free port.
        /// With 0.0.0.0, other hosts can read them, too.
        listen: AddressRange =
            "metrics.listen", Kind::AddressRange, "127.0.0.1:9401-9499", "", User;
        /// The absolute path of a file on the first host that contains a token. The status page and
        /// its API require this token. If empty, they require no token on loopback addresses, and
        /// refuse all requests if metrics.listen is any other address.
        token_file: String = "metrics.token_file", Kind::Text, "", "";
    }
    /// Export of metrics and spans with OpenTelemetry's protocol.
    Otlp {
        /// The collector to which every daemon sends its metrics with OTLP over gRPC, and the first
        /// daemon also spans, such as http://127.0.0.1:4317; empty: none.
        endpoint: String = "otlp.endpoint", Kind::UrlOrNone, "", "", User;
        /// Each step whose number is a multiple of this is sent as spans; 0: none. Other steps are
        /// not recorded.
        sample_steps: u64 =
            "otlp.sample_steps", Kind::Number { min: 0, max: 1_000_000_000 }, "0", "steps";
        /// The time between two exports of metrics.
        interval: Duration =
            "otlp.interval_ms", Kind::Number { min: 100, max: HOUR_MS }, "10000", "ms";
    }
    /// `gradwire run`.
    Launch {
        /// How long processes may take to exit when they are asked to, before they are killed.
        grace: Duration = "launch.grace_ms", Kind::Number { min: 0, max: HOUR_MS }, "3000", "ms";
        /// What starts commands on other hosts. auto: srun on the hosts of an allocation of Slurm,
        /// otherwise ssh.
        starter: Starter =
            "launch.starter", Kind::Choice(&["auto", "ssh", "srun"]), "auto", "";
        /// The program that starts commands on other hosts, if that is ssh.
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
    /// What a job survives.
    recovery: Recovery;
    /// The links between nodes, as the cost model assumes them. They only affect the choice of
    /// algorithms. A value that differs from its default takes precedence over measurements
    /// (probe.enabled).
    network: Network;
    /// How the links between nodes are measured when a job starts.
    probe: Probe;
    /// Correction of the cost model by measured times.
    tuning: Tuning;
    /// A job that stands still.
    watchdog: Watchdog;
    /// The flight recorder.
    recorder: Recorder;
    /// How a silent node is noticed.
    heartbeat: Heartbeat;
    /// This node.
    node: Node;
    /// Checks of a training process.
    checks: Checks;
    /// A training process.
    worker: Worker;
    /// Logging.
    log: Log;
    /// A daemon's metrics.
    metrics: Metrics;
    /// Export of metrics and spans with OpenTelemetry's protocol.
    otlp: Otlp;
    /// `gradwire run`.
    launch: Launch;
    /// The start of a job.
    start: Start;
    /// Elastic jobs.
    elastic: Elastic;
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
