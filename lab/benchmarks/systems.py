"""The compared systems: how each is started, with its defaults and at its best.

"At its best" means: TCP with reno (bbr, a common default of servers, slows Gloo and the MPI
libraries down on links without loss), and a malloc that keeps large blocks (otherwise the MPI
libraries measure page faults above 32 MiB). For each size it also means the fastest of the
library's algorithms, found by measuring them in this run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from install import PYTHON, VENV, Tools
from net import Network
from plan import Run, Scenario
from shell import Process

TUNED_CONGESTION_CONTROL = "reno"
MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}


@dataclass(frozen=True)
class Setup:
    """One way to configure a system."""

    label: str
    environment: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class System:
    """A line of the plot."""

    name: str
    title: str
    family: str
    tuned: bool
    # Measured once before the rounds. Each size then uses its fastest setup.
    setups: tuple[Setup, ...] = (Setup("default"),)
    # The factor by which a slow system gets fewer iterations.
    thrift: int = 1
    # Whether its ranks are Python programs, which print their times.
    in_python: bool = False

    @property
    def ours(self) -> bool:
        """Whether it is Gradwire."""
        return self.family == "gradwire"

    @property
    def answers_in_file(self) -> bool:
        """Whether it is `gradwire bench`, which measures one size and writes a file."""
        return self.ours and not self.in_python


@dataclass(frozen=True)
class Model:
    """A network's gradients, in text files."""

    for_gradwire: Path
    for_peers: Path
    warmup: int
    iterations: int


@dataclass(frozen=True)
class Job:
    """What a system measures, and where."""

    tools: Tools
    net: Network
    scenario: Scenario
    work: list[Run] | Model


def _malloc(
    label: str, environment: dict[str, str] | None = None, words: tuple[str, ...] = ()
) -> Setup:
    return Setup(label, tuple((MALLOC | (environment or {})).items()), words)


def _mca(label: str, **parameters: str) -> Setup:
    words = tuple(word for name, value in parameters.items() for word in ("--mca", name, value))
    return _malloc(label, words=words)


def _ompi_algorithm(label: str, number: int) -> Setup:
    return _mca(label, coll_tuned_use_dynamic_rules="1", coll_tuned_allreduce_algorithm=str(number))


OPEN_MPI = (
    _malloc("its own choice"),
    _ompi_algorithm("recursive doubling", 3),
    _ompi_algorithm("ring", 4),
    _ompi_algorithm("segmented ring", 5),
    _ompi_algorithm("Rabenseifner", 6),
    _mca("han", coll_han_priority="100"),
)
UNPINNED = {"I_MPI_PIN": "0"}
INTEL_MPI = (
    _malloc("its own choice"),
    _malloc("Rabenseifner", {"I_MPI_ADJUST_ALLREDUCE": "2"}),
    _malloc("ring", {"I_MPI_ADJUST_ALLREDUCE": "8"}),
    _malloc("unpinned", UNPINNED),
    _malloc("unpinned, ring", UNPINNED | {"I_MPI_ADJUST_ALLREDUCE": "8"}),
)
# With more ranks than cores, a pinned rank that polls keeps its core from the rank that it waits
# for: a few bytes take tens of milliseconds instead of a quarter of one. So both are switched off.
SHARING = UNPINNED | {"CCL_YIELD": "sched_yield"}
ONECCL = (
    _malloc("unpinned, yielding", SHARING),
    _malloc("unpinned, yielding, ring", SHARING | {"CCL_ALLREDUCE": "ring"}),
    _malloc("unpinned, yielding, Rabenseifner", SHARING | {"CCL_ALLREDUCE": "rabenseifner"}),
    _malloc("pinned, polling"),
)

# Horovod looks for new tensors once per cycle, in milliseconds.
HOROVOD = (
    _malloc("its own cycle of 1 ms"),
    _malloc("cycle of 0.1 ms", {"HOROVOD_CYCLE_TIME": "0.1"}),
)


def systems(scenario: Scenario, tools: Tools, namespaces: bool) -> list[System]:
    """Returns the systems of a scenario. Without namespaces, only malloc and algorithms can be
    tuned, not TCP."""
    ours = [System("gradwire", "Gradwire", "gradwire", tuned=True)]
    if scenario.nodes == 1:
        ordinary = (Setup("default", words=("--memory", "ordinary")),)
        ours.append(
            System("gradwire-ordinary", "Gradwire, ordinary memory", "gradwire", True, ordinary)
        )
    elif namespaces:
        ours.append(System("gradwire-plain", "Gradwire, untuned", "gradwire", tuned=False))
        short = (Setup("default", words=("--set", "data.compression=bf16")),)
        ours.append(System("gradwire-bf16", "Gradwire, bf16 on the wire", "gradwire", True, short))
    if scenario.nodes == 1 and not scenario.model and tools.has("gradwire-python"):
        for interface, call in (("dist", "dist.all_reduce"), ("hvd", "hvd.allreduce_")):
            ordinary = (Setup("default", words=("--interface", interface)),)
            ours.append(
                System(
                    f"gradwire-{interface}",
                    f"Gradwire, {call} in Python",
                    "gradwire",
                    True,
                    ordinary,
                    in_python=True,
                )
            )
    peers = _model_peers() if scenario.model else _size_peers(scenario)
    able = ours + [peer for peer in peers if tools.has(peer.family)]
    return [system for system in able if not scenario.systems or system.name in scenario.systems]


def _size_peers(scenario: Scenario) -> list[System]:
    pairs = [
        ("gloo", "Gloo", (_malloc("malloc, reno"),), 1),
        ("openmpi", "Open MPI", OPEN_MPI, 1),
    ]
    if scenario.nodes == 1:
        pairs += [("intelmpi", "Intel MPI", INTEL_MPI, 1), ("oneccl", "oneCCL", ONECCL, 10)]
        pairs += [("horovod", "Horovod", HOROVOD, 1)]
    peers = []
    for family, title, setups, thrift in pairs:
        peers.append(System(family, title, family, tuned=False, thrift=thrift))
        peers.append(System(f"{family}-tuned", f"{title}, tuned", family, True, setups, thrift))
    return peers


def _model_peers() -> list[System]:
    buckets, single = ("--mode", "buckets"), ("--mode", "single")
    return [
        System(
            "gloo-ddp", "Gloo, DDP's buckets", "gloo", False, (Setup("default", words=buckets),)
        ),
        System(
            "gloo-ddp-tuned",
            "Gloo, DDP's buckets, tuned",
            "gloo",
            True,
            (_malloc("malloc, reno", words=buckets),),
        ),
        System(
            "gloo-each-tuned",
            "Gloo, one by one, tuned",
            "gloo",
            True,
            (_malloc("malloc, reno", words=single),),
        ),
        System("openmpi-each", "Open MPI, one by one", "openmpi", False),
        System("openmpi-each-tuned", "Open MPI, one by one, tuned", "openmpi", True, OPEN_MPI),
        System("intelmpi-each-tuned", "Intel MPI, one by one, tuned", "intelmpi", True, INTEL_MPI),
        System("horovod", "Horovod", "horovod", False),
        System("horovod-tuned", "Horovod, tuned", "horovod", True, HOROVOD),
    ]


def processes(job: Job, system: System, setup: Setup, answer: Path) -> list[Process]:
    """Returns the processes of a measurement; `answer` is for systems that write a file."""
    start: dict[str, Callable[[Job, Setup, Path], list[Process]]] = {
        "gradwire": _gradwire,
        "gloo": _gloo,
        "openmpi": _open_mpi,
        "intelmpi": _intel_mpi,
        "oneccl": _oneccl,
        "horovod": _horovod,
    }
    run = _gradwire_python if system.in_python else start[system.family]
    started = run(job, setup, answer)
    for process in started:
        process.environment.update(setup.environment)
    return started


def _hosts(job: Job) -> str:
    return ",".join(f"{node.address}:{job.scenario.ranks_per_node}" for node in job.net.nodes)


def _gradwire(job: Job, setup: Setup, answer: Path) -> list[Process]:
    words = [str(job.tools.gradwire), "bench"]
    if isinstance(job.work, Model):
        words += ["model", "--shapes", str(job.work.for_gradwire), "--barrier", "--check", "1"]
        words += ["--warmup", str(job.work.warmup), "--iters", str(job.work.iterations)]
    else:
        (run,) = job.work
        words += ["allreduce", "--begin", str(run.size), "--end", str(run.size)]
        words += ["--warmup", str(run.warmup), "--iters", str(run.iterations)]
        # A tensor is filled only if its result is checked. Between checks, calls follow each other.
        words += ["--barrier", "--check", "1"] if run.barrier else ["--check", "10"]
    words += ["--op", "sum", "--json", str(answer), "-np", str(job.scenario.ranks), *setup.words]
    if job.scenario.nodes > 1:
        words += ["--hosts", _hosts(job), "--set", f"launch.ssh={job.net.remote_shell}"]
        words += ["--set", f"launch.remote_gradwire={job.tools.gradwire}"]
    return [Process(job.net.nodes[0].inside(words))]


def _gradwire_python(job: Job, setup: Setup, answer: Path) -> list[Process]:
    words = [str(VENV / "bin" / "gradwire"), "run", "-np", str(job.scenario.ranks), "--"]
    words += [str(PYTHON), str(job.tools.programs["gradwire-python"]), *setup.words]
    return [Process(job.net.nodes[0].inside([*words, *_gloo_words(job)]))]


def _gloo(job: Job, setup: Setup, answer: Path) -> list[Process]:
    words = [str(PYTHON), str(job.tools.programs["gloo"]), *setup.words, *_gloo_words(job)]
    each = job.scenario.ranks_per_node
    started = []
    for rank in range(job.scenario.ranks):
        node = job.net.nodes[rank // each]
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(job.scenario.ranks),
            "LOCAL_WORLD_SIZE": str(each),
            "MASTER_ADDR": job.net.nodes[0].address,
            "MASTER_PORT": "29400",
            "GLOO_SOCKET_IFNAME": node.device,
        }
        started.append(Process(node.inside(words), environment))
    return started


def _gloo_words(job: Job) -> list[str]:
    """Returns the arguments of the Python programs."""
    if isinstance(job.work, Model):
        words = ["--model", str(job.work.for_peers), "--warmup", str(job.work.warmup)]
        return [*words, "--iterations", str(job.work.iterations)]
    return ["--sizes", ",".join(map(str, job.work))]


def _horovod(job: Job, setup: Setup, answer: Path) -> list[Process]:
    """Returns Horovod's processes, on one node only, because its launcher would use ssh for
    others."""
    words = [
        str(PYTHON),
        str(VENV / "bin" / "horovodrun"),
        "--gloo",
        "-np",
        str(job.scenario.ranks),
    ]
    words += [
        "--network-interfaces",
        job.net.nodes[0].device,
        str(PYTHON),
        str(job.tools.programs["horovod"]),
    ]
    # It resolves its host's name, and fails without an address.
    node = replace(job.net.nodes[0], host="localhost")
    return [Process(node.inside([*words, *_gloo_words(job)]))]


def _mpi_words(job: Job) -> list[str]:
    if isinstance(job.work, Model):
        return [
            "model",
            str(job.work.for_peers),
            str(job.work.warmup),
            str(job.work.iterations),
            "blocking",
        ]
    return ["sizes", ",".join(map(str, job.work))]


def _open_mpi(job: Job, setup: Setup, answer: Path) -> list[Process]:
    # It counts this machine's cores as slots, and refuses to run as root.
    environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = ["mpirun.openmpi", "--oversubscribe", "-np", str(job.scenario.ranks)]
    if job.scenario.nodes > 1:
        device = job.net.nodes[0].device
        words += ["--host", _hosts(job), "--mca", "plm_rsh_agent", str(job.net.remote_shell)]
        words += ["--mca", "btl", "self,vader,tcp", "--mca", "pml", "ob1"]
        # Otherwise it would keep the cores busy while waiting, because it can't know that its nodes
        # share them.
        words += ["--mca", "mpi_yield_when_idle", "1"]
        words += ["--mca", "btl_tcp_if_include", device, "--mca", "oob_tcp_if_include", device]
        words += [
            word for name in MALLOC if dict(setup.environment).get(name) for word in ("-x", name)
        ]
    words += [*setup.words, str(job.tools.programs["openmpi"]), *_mpi_words(job)]
    return [Process(job.net.nodes[0].inside(words), environment)]


def _intel_mpi(job: Job, setup: Setup, answer: Path) -> list[Process]:
    return _hydra(job, job.tools.programs["intelmpi"])


def _oneccl(job: Job, setup: Setup, answer: Path) -> list[Process]:
    return _hydra(job, job.tools.programs["oneccl"])


def _hydra(job: Job, program: Path) -> list[Process]:
    environment = {
        "I_MPI_ROOT": str(VENV),
        "CCL_ROOT": str(VENV),
        "LD_LIBRARY_PATH": str(VENV / "lib"),
        "CCL_KVS_IFACE": job.net.nodes[0].device,
    }
    words = [str(VENV / "bin" / "mpiexec.hydra"), "-n", str(job.scenario.ranks)]
    return [Process(job.net.nodes[0].inside([*words, str(program), *_mpi_words(job)]), environment)]
