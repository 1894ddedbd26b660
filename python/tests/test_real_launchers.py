"""Real launchers start four ranks on two nodes, and each launcher meets each misfortune.

In a cell of this table, every rank that can speak gets one clear error, the launcher ends with the
right exit code, and nothing is left behind. Without misfortune, all launchers train the same.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launchers import MPI, Done, install
from launching import AT_NIGHT, LAUNCHER, LIMIT, needs_torch, until
from nodes import NOBODY, Nodes, two_nodes, with_slurm

PORT = 29555

# The last rank is the victim. All ranks begin at once, however long the launcher takes.
CELL = """
import os, signal, sys, time
from pathlib import Path
folder, event, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
names = "GRADWIRE_RANK OMPI_COMM_WORLD_RANK SLURM_PROCID PMI_RANK RANK".split()
rank = int(next(os.environ[name] for name in names if name in os.environ))
if "LOCAL_WORLD_SIZE" in os.environ and "GRADWIRE_RANK" not in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun would end the others at once
import gradwire as gw
(folder / f"came.{rank}").touch()
while len(list(folder.glob("came.*"))) < size:
    time.sleep(0.02)
victim = rank == size - 1
try:
    if victim and event == "killed before":
        os.kill(os.getpid(), signal.SIGKILL)
    gw.init()
    gw.barrier()
    if victim and event == "killed after":
        os.kill(os.getpid(), signal.SIGKILL)
    gw.barrier()
except gw.GradwireError as error:
    (folder / f"told.{rank}").write_text(f"{type(error).__name__}: {error}")
    raise
"""
HOLDER = f"""
import os, socket, time
server = socket.create_server(("", {PORT}))
print(os.getpid(), flush=True)
while True:
    time.sleep(60)
"""
ENDLESS = """
import time
import gradwire as gw
gw.init()
print("BEGUN", flush=True)
while True:
    gw.barrier()
    time.sleep(0.1)
"""
DIGITS = """
import os, signal
import gradwire
from gradwire.demo import _numpy
gradwire.init()
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("FAILS", "never"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, which need not wait
    gradwire.barrier()
    if gradwire.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gradwire.barrier()
_numpy.train(None)
gradwire.shutdown()
"""

# What users set for ranks on two nodes, and a time for ranks that wait for others in vain.
SECRET, MEETING = "GRADWIRE_SECRET_FILE", "GRADWIRE_RENDEZVOUS"
TIMEOUT = "GRADWIRE_LAUNCH__START_TIMEOUT_MS"


@dataclass(frozen=True)
class Way:
    """A launcher with its options, and what it does when a rank ends."""

    words: list[str]
    # A variable that it sets for each rank.
    variable: str
    # What it says when rank 3 is killed, and its exit code.
    killed: str
    codes: tuple[int, ...] = (137,)
    # Whether it ends the other ranks when one was killed, and when one has failed.
    ends_killed: bool = False
    ends_failed: bool = False


def mpirun(name: str) -> Way:
    given = [word for one in (SECRET, MEETING, TIMEOUT) for word in ("-x", one)]
    return Way(
        [MPI[name][0], "-H", "n1:2,n2:2", "--map-by", "slot", *given, "-np", "4"],
        "OMPI_COMM_WORLD_LOCAL_RANK",
        r"process rank 3 with PID \d+ on node n2 exited on\s+signal 9",
        ends_killed=True,
        ends_failed=True,
    )


OURS = r"gradwire: rank 3 on host n2 \(pid \d+\) was killed by SIGKILL, .* ranks were stopped\n"
HERE, INSIDE = "gradwire run over ssh", "gradwire run in sbatch"
WAYS = {
    HERE: Way([LAUNCHER, "run", "-H", "n1:2,n2:2", "--"], "GRADWIRE_SECRET", OURS),
    INSIDE: Way([LAUNCHER, "run", "--"], "GRADWIRE_SECRET", OURS),
    "srun": Way(
        ["srun", "-N2", "-n4", "--ntasks-per-node=2"],
        "SLURM_LOCALID",
        "srun: error: n2: task 3: Killed",
    ),
    "Open MPI": mpirun("Open MPI"),
    "Open MPI 5": mpirun("Open MPI 5"),
    "MPICH": Way(
        [MPI["MPICH"][0], "-hosts", "n1,n2", "-ppn", "2", "-n", "4"],
        "MPI_LOCALRANKID",
        r"RUNNING AT n2\n=   EXIT CODE: 9\n",
        # 255: its helper on the other node has failed, since it was ended.
        codes=(9, 255),
        ends_killed=True,
    ),
}


@dataclass
class Place:
    """Two nodes with Slurm."""

    nodes: Nodes
    slurm: dict[str, str]

    def run(self, way: str, program: list[str], astray: bool = False, **variables: str) -> Done:
        """Runs a program as the ranks of a job. ``astray``: one of its hosts has no address."""
        if way not in (INSIDE, "srun") and self.nodes.no_ssh:
            pytest.skip(self.nodes.no_ssh)
        folder, words = self.nodes.folder, [*WAYS[way].words, *program]
        if astray and way in (HERE, INSIDE):
            words = [LAUNCHER, "run", "-H", f"n1:2,{NOBODY}:2", "--", *program]
        if way not in (HERE, INSIDE):
            variables = {SECRET: str(folder / "secret.1"), **variables}
        if WAYS[way].ends_killed:  # of MPI; Slurm names the first host
            variables = {MEETING: f"n1:{PORT}", **variables}
        variables = {**self.slurm, **variables}
        if way != INSIDE:
            return self.nodes.run(0, words, **variables)
        job = self.submit(["-n4", "--ntasks-per-node=2"], words, **variables)
        until("the job has ended", lambda: not re.search("PENDING|RUNNING|COMPL.*ING", job.state))
        return Done(job.code, job.text)

    def submit(self, options: list[str], words: list[str], **variables: str) -> Job:
        """Submits a batch job for both nodes."""
        output = self.nodes.folder / "output"
        output.unlink(missing_ok=True)
        start = ["sbatch", "--parsable", "-N2", f"--output={output}", *options]
        variables = {**self.slurm, **variables}
        done = self.nodes.run(0, [*start, "--wrap", shlex.join(words)], **variables)
        assert done.code == 0, done.text
        return Job(self, done.text.strip(), output)


@dataclass
class Job:
    """A batch job of Slurm."""

    place: Place
    number: str
    output: Path

    def _shown(self, name: str) -> str:
        words = ["scontrol", "show", "job", self.number]
        done = self.place.nodes.run(0, words, **self.place.slurm)
        found = re.search(rf"\b{name}=(\S+)", done.text)
        assert found, done.text
        return found[1]

    @property
    def state(self) -> str:
        """What Slurm says about it, such as RUNNING."""
        return self._shown("JobState")

    @property
    def code(self) -> int:
        """Its exit code."""
        code, signal = self._shown("ExitCode").split(":")
        return int(code) or int(signal)

    @property
    def text(self) -> str:
        """What it has written."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Two nodes with Slurm and ssh, and two secrets."""
    install()
    folder = tmp_path_factory.mktemp("nodes")
    with two_nodes(folder) as nodes:
        for number in (1, 2):
            subprocess.run([LAUNCHER, "secret", str(folder / f"secret.{number}")], check=True)
        yield Place(nodes, with_slurm(nodes))


def python(folder: Path, text: str, *arguments: str) -> list[str]:
    program = folder / "program.py"
    program.write_text(text)
    return [sys.executable, str(program), *arguments]


def parameters(done: Done, ranks: int = 4) -> str:
    """Returns the hash of the parameters that all ranks have at the end."""
    assert done.code == 0, done.text
    found = re.search(rf"parameters (\w+): the same bits on {ranks} of {ranks} ranks", done.text)
    assert found, done.text
    return found[1]


@pytest.fixture(scope="module")
def digits(place: Place) -> str:
    """The parameters that `gradwire run` trains."""
    way = INSIDE if place.nodes.no_ssh else HERE
    with place.nodes.nothing_is_left():
        return parameters(place.run(way, python(place.nodes.folder, DIGITS)))


@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_all_launchers_train_the_same(way: str, place: Place, digits: str) -> None:
    with place.nodes.nothing_is_left():
        assert parameters(place.run(way, python(place.nodes.folder, DIGITS))) == digits


@dataclass
class Cell:
    """What follows from an event."""

    # Patterns: what ranks of each node say, and what the output contains.
    told: tuple[str, str]
    says: str
    # All of these ranks say it, and at least one of those.
    all: tuple[int, ...] = ()
    some: tuple[int, ...] = ()
    codes: tuple[int, ...] = (1,)
    # What changes the environment of a rank, in a shell, and that of the launcher.
    before: str = ":"
    given: tuple[str, str] = ("GWTEST", "1")


EVENTS = ["killed before", "killed after", "secret", "port", "variable", "name"]
EVERY = (0, 1, 2, 3)
ALONE = "not all nodes joined within 6.0 s: 1 of 2 nodes have joined; missing: node 1"


def of_gradwire_run(way: Way, event: str) -> Cell:
    """What follows under `gradwire run`. It gives the other ranks a second to say why they end."""
    killed = r"rank 3 on host n2: its process (\(pid \d+\) )?was killed by SIGKILL "
    wrong = "the worker's secret is not that of this job; see GRADWIRE_SECRET"
    failed = r"rank [23] on host n2: its process ended with exit code 1 before"
    unset = f"{way.variable}: it is not set, although other variables of the launcher are"
    taken = rf"can't listen on 10\.78\.0\.1:{PORT} .*Address already in use"
    where = ("GRADWIRE_COORDINATOR__LISTEN", f"10.78.0.1:{PORT}")
    other = f"[ $(hostname) = n1 ] || export GRADWIRE_SECRET={'a' * 64}"
    unknown = f"host {NOBODY} can't be reached: ssh: Could not resolve hostname"
    return {
        "killed before": Cell((f"{killed}before",) * 2, way.killed, (0, 1, 2), codes=way.codes),
        "killed after": Cell((f"{killed}without",) * 2, way.killed, (0, 1, 2), codes=way.codes),
        "secret": Cell((failed, wrong), wrong, (0, 1), (2, 3), before=other),
        "port": Cell(("", ""), taken, given=where),
        "variable": Cell((unset, unset), unset, EVERY, before=f"unset {way.variable}"),
        "name": Cell(("", ""), unknown),
    }[event]


def of_tasks(way: Way, event: str) -> Cell:
    """What follows under other launchers. Some end the other ranks, perhaps before they speak."""
    three = () if way.ends_killed else (0, 1, 2)
    ranks = ((), EVERY) if way.ends_failed else (EVERY, ())
    on_first, on_second = (((), (0, 1)), ((), (2, 3))) if way.ends_failed else (ranks, ranks)
    late = "rank 3 on host n2: has not joined the job within 6.0 s"
    lost = r"PeerLost: rank 3 on host n2: its process \(pid \d+\) ended without leaving the job"
    wrong = "the job secret of this node differs from the coordinator's"
    other = f"[ $(hostname) = n1 ] || export {SECRET}=secret.2"
    taken = rf"can't listen on 10\.78\.0\.1:{PORT} .*Address already in use"
    ended = "the daemon of host n1 ended before it was ready; see its output"
    silent = rf"the coordinator at 10\.78\.0\.1:{PORT} accepts connections, but says nothing"
    unset = f"has not set {way.variable}; start the job once, with gradwire run"
    unknown = f"no address for host {NOBODY}, where rank 0 is to be; set {MEETING}=HOST:PORT"
    found = {
        "killed before": Cell((late, late), way.killed, three, codes=way.codes),
        "killed after": Cell((lost, lost), way.killed, three, codes=way.codes),
        "secret": Cell((ALONE, wrong), wrong, *on_second, before=other),
        "port": Cell((ended, silent), taken, *on_first, given=(MEETING, f"n1:{PORT}")),
        "variable": Cell((unset, unset), unset, *ranks, before=f"unset {way.variable}"),
        "name": Cell((ALONE, unknown), ".", *ranks, given=(MEETING, f"{NOBODY}:{PORT}")),
    }[event]
    if way.ends_killed:  # one after another
        ending = "ended without leaving the job|can't be reached"
        found.told = (f"{found.told[0]}|{ending}", f"{found.told[1]}|{ending}")
    return found


@contextlib.contextmanager
def port_in_use(nodes: Nodes) -> Iterator[None]:
    """Another program on the first node uses the port."""
    holder = nodes.start(0, [sys.executable, "-c", HOLDER], nodes.folder / "holder")
    until("the port is in use", lambda: holder.text, of=holder.process)
    yield
    assert nodes.run(0, ["kill", holder.text.strip()]).code == 0
    holder.wait()


def clean(folder: Path) -> None:
    for file in [*folder.glob("came.*"), *folder.glob("told.*")]:
        file.unlink()


def check(folder: Path, cell: Cell, done: Done) -> None:
    """Compares what the ranks have said, and how the launcher has ended."""
    told = {int(file.suffix[1:]): file.read_text() for file in sorted(folder.glob("told.*"))}
    about = f"{told}\n{done.code}\n{done.text}"
    assert done.code in cell.codes and re.search(cell.says, done.text), about
    assert all(re.search(cell.told[rank // 2], text) for rank, text in told.items()), about
    assert set(cell.all) <= told.keys() and (not cell.some or told.keys() & set(cell.some)), about
    assert "panicked" not in done.text, about


# The other kinds of MPI differ little from the first one.
USUAL = list(WAYS) if AT_NIGHT else [HERE, INSIDE, "srun", "Open MPI"]
# By day, each event happens under one of the launchers that are alike, in turn.
MISFORTUNES = [
    (way, event)
    for at, way in enumerate(USUAL)
    for turn, event in enumerate(EVENTS)
    if AT_NIGHT or (at + turn) % 2 == 0
]


@pytest.mark.parametrize(("way", "event"), MISFORTUNES)
def test_a_misfortune_under(way: str, event: str, place: Place) -> None:
    nodes, its = place.nodes, WAYS[way]
    cell = (of_gradwire_run if way in (HERE, INSIDE) else of_tasks)(its, event)
    clean(nodes.folder)
    program = python(nodes.folder, CELL, str(nodes.folder), event, "4")
    rank = ["sh", "-c", f'{cell.before}; exec "$@"', "sh", *program]
    with contextlib.ExitStack() as stack:
        if event == "port":
            stack.enter_context(port_in_use(nodes))
        stack.enter_context(nodes.nothing_is_left())
        done = place.run(
            way, rank, event == "name", **{TIMEOUT: "6000", cell.given[0]: cell.given[1]}
        )
    check(nodes.folder, cell, done)


def torchrun(nodes: Nodes, *words: str, **variables: str) -> Done:
    """Runs two ranks of torchrun on the first node."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return nodes.run(0, [*start, *words], **variables)


TORCHRUN = {
    # The ranks get their secret from torch's store.
    "killed before": Cell(
        ("rank 1 on host n1: has not joined the job within 6.0 s", ""),
        r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9",
        (0,),
    ),
    "killed after": Cell(
        (r"PeerLost: rank 1 on host n1: its process \(pid \d+\) ended without leaving", ""),
        r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9",
        (0,),
    ),
    "port": Cell(
        (rf"store at n1:{PORT} .*(set another MASTER_PORT|does another program use)", ""),
        rf"rank 0 can't serve the ranks' store at n1:{PORT}",
        (0, 1),
        before=f"export MASTER_PORT={PORT} TORCHELASTIC_USE_AGENT_STORE=False",
    ),
    "variable": Cell(
        ("NotLaunched: RANK=[01]: torchrun also sets LOCAL_RANK, which is missing here", ""),
        "torchrun also sets LOCAL_RANK",
        (0, 1),
        before="unset LOCAL_RANK",
    ),
    "name": Cell(
        (f"no address for host {NOBODY}", ""),
        f"no address for host {NOBODY}",
        (0, 1),
        before=f"export MASTER_ADDR={NOBODY}",
    ),
}


@pytest.mark.parametrize("event", TORCHRUN)
def test_a_misfortune_under_torchrun(event: str, place: Place) -> None:
    needs_torch(why="torchrun is part of PyTorch")
    nodes, cell = place.nodes, TORCHRUN[event]
    clean(nodes.folder)
    program = python(nodes.folder, CELL, str(nodes.folder), event, "2")
    rank = ["--no-python", "sh", "-c", f'{cell.before}; exec "$@"', "sh", *program]
    with contextlib.ExitStack() as stack:
        if event == "port":
            stack.enter_context(port_in_use(nodes))
        stack.enter_context(nodes.nothing_is_left())
        done = torchrun(nodes, *rank, **{TIMEOUT: "6000"})
    check(nodes.folder, cell, done)


def test_torchrun_trains_the_same(place: Place, digits: str) -> None:
    needs_torch(why="torchrun is part of PyTorch")
    nodes = place.nodes
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    start += ["--rdzv-backend=c10d", "--rdzv-endpoint=n1:29400"]
    words = [*start, *python(nodes.folder, DIGITS)[1:]]
    with nodes.nothing_is_left():
        both = [nodes.start(node, words, nodes.folder / f"torchrun.{node}") for node in (0, 1)]
        ended = [each.wait() for each in both]
    # Rank 0 may be on either node.
    done = Done(ended[0].code + ended[1].code, ended[0].text + ended[1].text)
    assert parameters(done) == digits


def test_torchrun_restarts_the_ranks(place: Place) -> None:
    """A rank is lost at the first start; the second one trains as if there had been none."""
    needs_torch(why="torchrun is part of PyTorch")
    nodes = place.nodes
    program = python(nodes.folder, DIGITS)
    with nodes.nothing_is_left():
        expected = nodes.run(0, [LAUNCHER, "run", "-np", "2", "--", *program])
        done = torchrun(nodes, "--max-restarts=1", *program[1:], FAILS="0")
    assert parameters(done, 2) == parameters(expected, 2)
    assert "rank 1 on host n1: its process" in done.text, done.text


@pytest.mark.parametrize("way", ["srun", INSIDE])
def test_a_time_limit_of_slurm(way: str, place: Place) -> None:
    nodes = place.nodes
    words = ["srun"] if way == "srun" else WAYS[way].words
    program = python(nodes.folder, ENDLESS)
    variables = {SECRET: str(nodes.folder / "secret.1")} if way == "srun" else {}
    with nodes.nothing_is_left():
        options = ["-n4", "--ntasks-per-node=2"]
        job = place.submit(options, [*words, *program], **variables)
        until("all ranks run", lambda: job.text.count("BEGUN") == 4)
        # Its limit is at least a minute, but Slurm lets it be changed.
        update = ["scontrol", "update", f"JobId={job.number}", "EndTime=now"]
        # Slurm refuses a time that has passed when the request arrives.
        until("its end is set", lambda: nodes.run(0, update, **place.slurm).code == 0)
        until("the job is over", lambda: job.state == "TIMEOUT", LIMIT)
    assert "DUE TO TIME LIMIT" in job.text and "panicked" not in job.text, job.text
    if way == INSIDE:
        assert "gradwire: interrupted by SIGTERM; everything was stopped" in job.text, job.text
