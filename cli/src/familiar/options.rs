//! The options of other launchers, in one table.

/// What an option of another launcher is here.
#[derive(Debug, Clone, Copy)]
pub(super) enum Meaning {
    /// This option, with the same value.
    Is(&'static str),
    /// This option, without a value.
    Flag(&'static str),
    /// Nothing: Gradwire always does what it asks for.
    Always,
    /// Nothing with this value; with another one, it is refused for this reason.
    AlwaysWith(&'static str, &'static str),
    /// The setting that this variable of Horovod changes, after a multiplication.
    Variable(&'static str, u64),
    /// The setting that this variable of Horovod changes if it is 1.
    Switch(&'static str),
    /// A variable of the ranks: NAME=VALUE, or NAME, which ranks get in any case.
    Exports,
    /// It can't be accepted, for this reason.
    Refused(&'static str),
}

use Meaning::{Always, AlwaysWith, Exports, Flag, Is, Refused, Switch, Variable};

/// Options with one meaning: their names, how many words follow, the meaning. A name of one letter
/// has one dash; others may have one or two.
pub(super) type Row = (&'static [&'static str], usize, Meaning);

const ONCE: &str = "gradwire run is started once and starts all hosts: -H HOST:RANKS,… or \
                    --hostfile FILE";
const MEET: &str = "ranks find each other through the launcher, and need no address";
const RESTARTS: &str = "with --min-np N the job continues after a loss and replaces lost ranks; \
                        otherwise start gradwire run again in a loop";
const PLACES: &str =
    "-H HOST:RANKS,… says how many ranks each host gets; hosts are filled in order";
const BINDING: &str =
    "--bind-to core or numa binds ranks; for other choices, start the program with numactl";
const COST: &str = "a cost model chooses; --set tuning.enabled=true corrects it by measured times";
const FILES: &str = "--output-dir DIR writes the output of each rank to files, and shows it too";
const NO_MPI: &str = "Gradwire does not use MPI; `gradwire config show` lists the settings";
const EVENTS: &str = "`gradwire trace` and --trace record what torchrun writes there, and more";

const HOROVODRUN: &[Row] = &[
    (&["num-proc"], 1, Is("--np")),
    (&["cb"], 0, Flag("--check-build")),
    (&["disable-cache"], 0, Always),
    (
        &["network-interfaces", "network-interface", "nics", "nic"],
        1,
        Variable("HOROVOD_GLOO_IFACE", 1),
    ),
    (
        &["config-file"],
        1,
        Refused("--config FILE reads settings of Gradwire in TOML, and docs/horovod.md maps them"),
    ),
    (&["p"], 1, Is("--ssh-port")),
    (&["i"], 1, Is("--ssh-identity-file")),
    (&["fusion-threshold-mb"], 1, Variable("HOROVOD_FUSION_THRESHOLD", 1 << 20)),
    (
        &["cycle-time-ms"],
        1,
        Refused(
            "Gradwire works without cycles: a tensor that is ready on all ranks starts at once",
        ),
    ),
    (&["cache-capacity"], 1, Variable("HOROVOD_CACHE_CAPACITY", 1)),
    (&["hierarchical-allreduce", "hierarchical-allgather"], 0, Always),
    (
        &["no-hierarchical-allreduce", "no-hierarchical-allgather"],
        0,
        Refused("ranks of a host always share memory"),
    ),
    (&["no-torus-allreduce"], 0, Always),
    (
        &["torus-allreduce"],
        0,
        Refused("the setting negotiation.algorithm chooses; `gradwire algorithms` lists them"),
    ),
    (&["no-autotune", "no-timeline-mark-cycles", "stall-check"], 0, Always),
    (&["autotune"], 0, Refused(COST)),
    (
        &[
            "autotune-log-file",
            "autotune-warmup-samples",
            "autotune-steps-per-sample",
            "autotune-bayes-opt-max-samples",
            "autotune-gaussian-process-noise",
        ],
        1,
        Refused(COST),
    ),
    (&["timeline-mark-cycles"], 0, Refused("Gradwire works without cycles")),
    (&["no-stall-check"], 0, Switch("HOROVOD_STALL_CHECK_DISABLE")),
    (&["stall-check-warning-time-seconds"], 1, Variable("HOROVOD_STALL_CHECK_TIME_SECONDS", 1)),
    (&["stall-check-shutdown-time-seconds"], 1, Variable("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 1)),
    (&["gloo", "tcp", "mpi-threads-disable", "no-mpi-threads-disable"], 0, Always),
    (&["mpi", "jsrun"], 0, Refused("gradwire run starts the ranks itself, without MPI or jsrun")),
    (&["mpi-args"], 1, Refused(NO_MPI)),
    (&["binding-args", "thread-affinity"], 1, Refused(BINDING)),
    (&["num-nccl-streams"], 1, Refused("NCCL is not used; data.lanes is the number of threads")),
    (&["gloo-timeout-seconds"], 1, Variable("HOROVOD_GLOO_TIMEOUT_SECONDS", 1)),
    (&["log-level"], 1, Variable("HOROVOD_LOG_LEVEL", 1)),
    (&["log-with-timestamp"], 0, Always),
    (
        &["log-without-timestamp", "log-hide-timestamp"],
        0,
        Refused("lines of the logs always have their time"),
    ),
    (&["prefix-timestamp", "prefix-output-with-timestamp"], 0, Flag("--timestamp-output")),
];

const TORCHRUN: &[Row] = &[
    (&["nproc-per-node"], 1, Is("--nproc-per-node")),
    (&["nnodes"], 1, AlwaysWith("1", ONCE)),
    (&["standalone", "no-python", "use-env"], 0, Always),
    (&["node-rank", "group-rank"], 1, Refused(ONCE)),
    (
        &[
            "master-addr",
            "master-port",
            "rdzv-backend",
            "rdzv-endpoint",
            "rdzv-id",
            "rdzv-conf",
            "local-addr",
        ],
        1,
        Refused(MEET),
    ),
    (&["max-restarts"], 1, AlwaysWith("0", RESTARTS)),
    (&["monitor-interval"], 1, Always),
    (&["numa-binding"], 1, Refused(BINDING)),
    (&["start-method"], 1, Refused("ranks are programs, which are started and not forked")),
    (&["role"], 1, Refused("all ranks have the same role; RANK says which one a process is")),
    (&["run-path"], 0, Refused("name the interpreter: gradwire run … -- python SCRIPT")),
    (&["log-dir"], 1, Is("--output-dir")),
    (&["r", "redirects", "t", "tee"], 1, Refused(FILES)),
    (&["local-ranks-filter"], 1, Refused(FILES)),
    (&["logs-specs", "event-log-handler"], 1, Refused(EVENTS)),
    (&["virtual-local-rank"], 0, Refused("LOCAL_RANK is always the number on the host")),
    (
        &["signals-to-handle"],
        1,
        Refused("SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT and SIGWINCH reach ranks"),
    ),
];

const MPIRUN: &[Row] = &[
    (&["np", "n", "c"], 1, Is("--np")),
    (&["host", "hosts"], 1, Is("--hosts")),
    (&["hostfile", "machinefile", "default-hostfile", "f"], 1, Is("--hostfile")),
    (&["npernode", "ppn", "perhost"], 1, Is("--nproc-per-node")),
    (&["ppr", "npersocket", "rankfile", "rf"], 1, Refused(PLACES)),
    (&["pernode"], 0, Refused("use -N 1: one rank on each host")),
    (&["map-by"], 1, AlwaysWith("slot", PLACES)),
    (&["rank-by"], 1, AlwaysWith("slot", PLACES)),
    (
        &["report-bindings", "bind-to-core", "bind-to-socket", "use-hwthread-cpus"],
        0,
        Refused(BINDING),
    ),
    (&["cpu-set", "cpu-list", "cpus-per-proc", "cpus-per-rank"], 1, Refused(BINDING)),
    (&["oversubscribe", "nooversubscribe", "allow-run-as-root"], 0, Always),
    (&["x"], 1, Exports),
    (&["genv", "env"], 2, Exports),
    (&["genvall", "envall"], 0, Always),
    (
        &["genvnone", "envnone"],
        0,
        Refused("ranks get the variables of gradwire run; start it with env -i for an empty set"),
    ),
    (&["genvlist", "envlist"], 1, Always),
    (&["mca", "gmca", "prtemca", "pmixmca"], 2, Refused(NO_MPI)),
    (&["am", "tune", "launcher", "bootstrap", "iface"], 1, Refused(NO_MPI)),
    (&["path"], 1, Refused("programs are looked for in PATH; set it with -x PATH=…")),
    (&["wd", "wdir"], 1, Is("--wdir")),
    (&["bind-to"], 1, Is("--bind-to")),
    (&["timestamp-output"], 0, Flag("--timestamp-output")),
    (&["output-filename"], 1, Is("--output-dir")),
    (&["xml", "merge-stderr-to-stdout"], 0, Refused(FILES)),
    (&["xterm"], 1, Refused(FILES)),
    (&["tag-output", "prepend-rank", "l", "q", "quiet"], 0, Always),
    (&["timeout"], 1, Refused("start the job with timeout: timeout SECONDS gradwire run …")),
    (&["do-not-launch"], 0, Flag("--dry-run")),
    (
        &["display-map", "display-allocation"],
        0,
        Refused("--dry-run shows where each rank would run"),
    ),
    (
        &["prefix", "launch-agent"],
        1,
        Refused("the setting launch.remote_gradwire is the path of gradwire on other hosts"),
    ),
    (&["app", "configfile"], 1, Refused("all ranks run the same program")),
    (&["stdin"], 1, Refused("the standard input of ranks is empty; read a file instead")),
    (&["preload-binary"], 0, Refused("programs are not copied: use a shared folder")),
    (&["V", "version"], 0, Refused("`gradwire --version` shows the version")),
];

/// The launchers and their options. The first that has an option counts.
pub(super) const LAUNCHERS: [(&str, &[Row]); 3] =
    [("mpirun", MPIRUN), ("horovodrun", HOROVODRUN), ("torchrun", TORCHRUN)];
