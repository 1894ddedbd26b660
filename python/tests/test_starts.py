"""The ways to start a job: gradwire.run, no launcher, and other starters."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from functions import dies, ends_badly, exits, horovods_variables, raises, shares
from launching import LAUNCHER, LIMIT, PLACES, Job, free_ports, remains, running, torchrun, until

import gradwire
from gradwire import _start


def test_a_function_as_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    results = gradwire.run(shares, (1.0,), {"last": 5.0}, np=3)
    assert results == [(0, 7.0), (1, 7.0), (2, 7.0)]
    assert "rank 2 says hello" in capsys.readouterr().out


def test_a_function_that_fails() -> None:
    with pytest.raises(gradwire.GradwireError, match="LookupError: nothing there") as caught:
        gradwire.run(raises, np=2)
    assert caught.value.rank == 1
    with pytest.raises(ValueError, match="np=0"):
        gradwire.run(raises, np=0)


def test_a_function_whose_rank_is_killed() -> None:
    with pytest.raises(gradwire.PeerLost, match="killed by SIGKILL") as caught:
        gradwire.run(dies, np=2)
    assert (caught.value.rank, caught.value.host) == (1, "localhost")
    assert str(caught.value).startswith("rank 1 on host localhost: "), caught.value


def test_a_function_whose_result_stays() -> None:
    with pytest.raises(gradwire.GradwireError, match=r"the result of \S+ can.t be pickled"):
        gradwire.run(threading.Lock)


@pytest.mark.parametrize(
    ("how", "says"), [("sys", "rank 1 of the job raised:\nSystemExit: 0"), ("os", "rank 1 of the")]
)
def test_a_function_that_ends_its_process(how: str, says: str) -> None:
    with pytest.raises(gradwire.Cancelled, match=says) as caught:
        gradwire.run(exits, (how,), np=2)
    assert caught.value.rank == 1 and "result" in str(caught.value), caught.value


def test_a_function_whose_process_fails_later() -> None:
    says = r"the job failed; rank 1 on host localhost .* ended with exit code 9"
    with pytest.raises(gradwire.Cancelled, match=says) as caught:
        gradwire.run(ends_badly, np=2)
    assert caught.value.rank == 1, caught.value


def test_a_killed_caller_leaves_no_job(tmp_path: Path) -> None:
    program = tmp_path / "caller.py"
    program.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import functions, gradwire\n"
        "gradwire.run(functions.sleeps, (sys.argv[1],), np=2)\n"
    )
    mark = f"TEST_CALLER={tmp_path}"
    words = [sys.executable, str(program), str(tmp_path)]
    folder = tmp_path / "temporary"
    folder.mkdir()
    variables = {"TEST_CALLER": str(tmp_path), "TMPDIR": str(folder)}
    with running(words, tmp_path / "log", **variables) as caller:
        until("both ranks run", lambda: len(list(tmp_path.glob("runs.*"))) == 2)
        assert list(folder.iterdir())
        caller.kill()
        until("the job has ended", lambda: not remains(mark.encode()))
        assert not list(folder.iterdir())


def test_a_thread_that_attaches_may_end(job: Job) -> None:
    done = job(
        """
        import threading, time
        import gradwire as gw, numpy as np
        thread = threading.Thread(target=gw.init)
        thread.start()
        thread.join()
        time.sleep(1)  # if its daemon ended with the thread, it would have by now
        print("MEAN", gw.allreduce(np.ones(2))[0])
        """,
        ranks=None,
    )
    assert "MEAN 1.0" in done.stdout and done.returncode == 0, done.stdout


def test_without_a_launcher(job: Job) -> None:
    done = job(PLACES + "gw.shutdown()\ngw.init()\nprint('AGAIN', gw.size())\n", ranks=None)
    assert "RANK 0 of 1 local 0 of 1 sum 1.0" in done.stdout, done.stdout
    assert "AGAIN 1" in done.stdout and done.returncode == 0, done.stdout
    # It has no other output, and its services have ended with it (CLEAN).
    assert len(done.stdout.splitlines()) == 2, done.stdout


def test_variables_of_another_job_are_not_read(job: Job) -> None:
    stale = {"GRADWIRE_ELASTIC": "1", "GRADWIRE_EPOCH": "3", "GRADWIRE_WORKERS": "1,2"}
    done = job(PLACES, ranks=None, GRADWIRE_WORKER="2", GRADWIRE_SERVERS="2", **stale)
    assert "RANK 0 of 1 local 0 of 1 sum 1.0" in done.stdout, done.stdout


def test_the_variables_of_a_launch_are_all_known() -> None:
    source = (Path(__file__).parents[2] / "settings" / "src" / "layers.rs").read_text()
    reserved = re.findall(r'^    "(GRADWIRE_\w+)",$', source, re.MULTILINE)
    names = ("ALONE", "BIND", "CONFIG", "RENDEZVOUS", "SECRET_FILE", "STDERR")
    of_users = {f"GRADWIRE_{name}" for name in names}
    assert set(reserved) - of_users == {*_start._LAUNCH, *_start._NUMBERS}


# Rank 0 starts jobs while it is a rank, and afterwards.
JOBS_IN_A_JOB = """
import os, subprocess, sys
import gradwire as gw, numpy as np
gw.init()
first = gw.rank() == 0
if first:
    print("INSIDE", gw.run(divmod, (7, 2), np=2), flush=True)
    print("ELASTIC", gw.run(divmod, (7, 2), np=2, min_np=1), flush=True)
gw.barrier()
gw.shutdown()
if first:
    print("AFTER", gw.run(divmod, (7, 2), np=2), flush=True)
    if sys.argv[1:] == ["child"]:
        child = "import gradwire as gw; gw.init(); print('CHILD', gw.rank(), gw.size(), flush=True)"
        subprocess.run([sys.executable, "-c", child], check=True)
        left = {name for name in os.environ if name.startswith("GRADWIRE_")}
        assert not {name for name in left if "__" not in name} - {"GRADWIRE_STDERR"}, left
        assert "GRADWIRE_ELASTIC__TIMEOUT_MS" not in left
"""


@pytest.mark.parametrize("options", [(), ("--min-np", "1")], ids=["plain", "elastic"])
def test_a_rank_can_start_jobs(tmp_path: Path, options: tuple[str, ...]) -> None:
    program = tmp_path / "program.py"
    program.write_text(JOBS_IN_A_JOB)
    words = [LAUNCHER, "run", "-np", "2", *options, "--", sys.executable, str(program)]
    done = subprocess.run(
        [*words, *(["child"] if options else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    for name in ("INSIDE", "ELASTIC", "AFTER"):
        assert f"{name} [(3, 1), (3, 1)]" in done.stdout, done.stdout
    assert ("CHILD 0 1" in done.stdout) == bool(options) and done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"DMLC_NUM_WORKER": "2", "DMLC_ROLE": "worker"}, "DMLC_NUM_WORKER=2 says"),
        ({"DMLC_NUM_WORKER": "1", "BYTEPS_TRACE_ON": "1"}, "BYTEPS_TRACE_ON, DMLC_NUM_WORKER"),
    ],
)
def test_variables_of_byteps(job: Job, variables: dict[str, str], said: str) -> None:
    pytest.importorskip("torch")
    program = """
        import gradwire.torch.byteps as bps
        bps.init()
        print("RANKS", bps.size())
        """
    done = job(program, None, **variables)
    assert said in done.stdout, done.stdout
    has_started = "RANKS 1" in done.stdout
    assert has_started == ("have no effect" in done.stdout) == (done.returncode == 0), done.stdout


# An existing optimizer continues to exchange, in the new job's memory.
KEPT = """
import torch
import gradwire.torch as gw

gw.init()
one = torch.nn.Parameter(torch.zeros(3))
optimizer = gw.DistributedOptimizer(torch.optim.SGD([one], lr=1.0))
for turn in range(3):
    for step in range(2):
        optimizer.zero_grad()
        (one * (gw.rank() + 1.0)).sum().backward()
        optimizer.step()
    if turn == 1:
        (one * 1.0).sum().backward()  # in flight or queued when the job ends
    total = int(gw.allreduce(torch.full((2,), gw.rank() + 1.0), op=gw.Sum)[0])
    print(f"TURN {turn} SUM {total} AT {one.tolist()[0]}\\n", end="", flush=True)
    gw.shutdown()
    gw.init()
"""


def test_the_launchers_ranks_again_and_again(job: Job) -> None:
    pytest.importorskip("torch")
    done = job(KEPT, ranks=2)
    # The average of 1 and 2, twice per round.
    for turn in range(3):
        assert done.stdout.count(f"TURN {turn} SUM 3 AT {-3.0 * (turn + 1)}\n") == 2, done.stdout
    assert done.returncode == 0, done.stdout


# Horovod's variables that scripts read, and other variables with its prefix.
NAMES = "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME"

VARIABLES = """
import os
import gradwire as gw
at_start = "HOROVOD_RANK" in os.environ
gw.init()
found = [os.environ[f"HOROVOD_{name}"] for name in "NAMES".split()]
ours = [gw.rank(), gw.size(), gw.local_rank(), gw.local_size(), gw.cross_rank(), gw.cross_size()]
assert found[:-1] == [str(number) for number in ours] and found[-1], found
gw.shutdown()
assert ("HOROVOD_RANK" in os.environ) == at_start
print(f"RIGHT {found[0]} of {found[1]} at {found[-1]}\\n", end="", flush=True)
""".replace("NAMES", NAMES)


@pytest.mark.parametrize("way", ["alone", "gradwire run", "torchrun", "gradwire.run"])
def test_horovods_variables_of_a_rank(way: str, job: Job, tmp_path: Path) -> None:
    if way == "gradwire.run":
        everybody = gradwire.run(horovods_variables, np=2)
        assert [(each["RANK"], each["SIZE"], each["LOCAL_RANK"]) for each in everybody] == [
            ("0", "2", "0"),
            ("1", "2", "1"),
        ]
        return
    if way == "torchrun":
        done, ranks = torchrun(VARIABLES, tmp_path, 2), 2
    else:
        ranks = 1 if way == "alone" else 2
        done = job(VARIABLES, ranks=None if way == "alone" else ranks)
    for rank in range(ranks):
        assert f"RIGHT {rank} of {ranks} at " in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout


TUNED = """
import gradwire as gw, numpy as np
gw.init()
assert gw.allreduce(np.ones(3), op=gw.Sum)[0] == gw.size()
gw.shutdown()
"""


@pytest.mark.parametrize("ranks", [None, 2])
def test_horovods_variables_that_tune(ranks: int | None, job: Job) -> None:
    done = job(
        TUNED,
        ranks=ranks,
        HOROVOD_FUSION_THRESHOLD="134217728",
        HOROVOD_CYCLE_TIME="(None,)",
        HOROVOD_TIMELINE_MARK_CYCLES="1",
        HOROVOD_STALL_CHECK_TIME_SECONDS="60",
        HOROVOD_LOG_LEVEL="WARNING",
        HOROVOD_HIERARCHICAL_ALLREDUCE="1",
    )
    assert done.returncode == 0, done.stdout
    [line] = [line for line in done.stdout.splitlines() if "HOROVOD" in line]
    assert "HOROVOD_CYCLE_TIME HOROVOD_TIMELINE_MARK_CYCLES" in line, line
    for variable, value in (
        ("FUSION_THRESHOLD", "(None,)"),
        ("LOG_LEVEL", "loud"),
        ("STALL_CHECK_TIME_SECONDS", "-1"),
    ):
        done = job(TUNED, ranks=ranks, **{f"HOROVOD_{variable}": value})
        assert done.returncode != 0, done.stdout
        assert f"(environment HOROVOD_{variable}): expected" in done.stdout, done.stdout


# Variables of a task that another starter started, and the command that works instead.
TASKS = [
    ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "8"}, "gradwire run -np 8 --"),
    ({"FLUX_JOB_SIZE": "4"}, "gradwire run -np 4 -H"),
    ({"JOB_COMPLETION_INDEX": "0"}, "let each run: gradwire join -- PROGRAM"),
    ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "torchrun or gradwire run"),
]


@pytest.mark.parametrize(("variables", "command"), TASKS)
def test_a_task_of_several_is_no_job(variables: dict[str, str], command: str, job: Job) -> None:
    done = job(PLACES, ranks=None, **variables)
    assert done.returncode == 1 and "RANK 0 of 1" not in done.stdout, done.stdout
    assert "NotLaunched" in done.stdout and command in done.stdout, done.stdout
    assert "-- python " in done.stdout or "-- PROGRAM" in done.stdout, done.stdout
    done = job(PLACES, ranks=None, GRADWIRE_ALONE="1", **variables)
    assert done.returncode == 0 and "RANK 0 of 1" in done.stdout, done.stdout


def test_an_incomplete_set_of_variables(job: Job) -> None:
    done = job(PLACES, ranks=None, OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="1")
    assert done.returncode == 1 and "NotLaunched" in done.stdout, done.stdout
    assert "mpirun has not set OMPI_COMM_WORLD_LOCAL_RANK; start" in done.stdout, done.stdout
    assert "GRADWIRE_ALONE=1" in done.stdout, done.stdout


def test_variables_of_one_rank_may_be_left_over(job: Job) -> None:
    for left in ({"WORLD_SIZE": "1", "RANK": "0"}, {"HOROVOD_SIZE": "1", "HOROVOD_RANK": "0"}):
        done = job(PLACES, ranks=None, **left)
        assert done.returncode == 0 and "RANK 0 of 1" in done.stdout, done.stdout
        done = job(PLACES, ranks=None, MVP_COMM_WORLD_SIZE="2", **left)
        assert done.returncode == 1 and "MVP_COMM_WORLD_SIZE=2" in done.stdout, done.stdout
    [port] = free_ports(1)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = job(PLACES, ranks=None, MVP_COMM_WORLD_SIZE="2", **alone)
    assert done.returncode == 1, done.stdout
    assert "NotLaunched: WORLD_SIZE=1, but MVP_COMM_WORLD_SIZE=2" in done.stdout, done.stdout


def test_torchruns_processes_may_train_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_ALONE", "1")
    done = torchrun(PLACES, tmp_path, 2)
    assert done.returncode == 0 and done.stdout.count("RANK 0 of 1") == 2, done.stdout


def test_a_settings_file_without_a_launcher(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[checks]\nfinite = "fail"\n[data]\nlanes = 3\n')
    text = """
        import os
        import numpy as np
        import gradwire as gw
        gw.init()
        print("LANES", os.environ.get("GRADWIRE_DATA__LANES"), flush=True)
        gw.shutdown()
        os.environ["GRADWIRE_CONFIG"] = ""
        gw.init()
        print("LANES", os.environ.get("GRADWIRE_DATA__LANES"), flush=True)
        gw.shutdown()
        os.environ["GRADWIRE_CONFIG"] = os.environ["TEST_FILE"]
        gw.init()
        gw.allreduce(np.array([np.nan]))
    """
    done = job(text, ranks=None, GRADWIRE_CONFIG=str(file), TEST_FILE=str(file))
    assert done.returncode == 1 and "contributes NaN" in done.stdout, done.stdout
    assert "LANES 3" in done.stdout and "LANES None" in done.stdout, done.stdout
    file.write_text("[data]\nlines = 3\n")
    done = job(PLACES, ranks=None, GRADWIRE_CONFIG=str(file))
    assert done.returncode == 1 and "unknown setting 'data.lines'" in done.stdout, done.stdout
    assert "Traceback" in done.stdout and "InvalidRequest: " in done.stdout, done.stdout


def test_the_launchers_file_is_not_read_by_ranks(job: Job, tmp_path: Path) -> None:
    """It may be on another host, or the path relative to another folder."""
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "settings.toml"
    file.write_text('[checks]\nfinite = "fail"\n')
    text = """
        import os
        import gradwire as gw
        for _ in range(2):
            gw.init()
            print("FINITE", os.environ["GRADWIRE_CHECKS__FINITE"], flush=True)
            gw.shutdown()
    """
    path = os.path.relpath(file)
    wdir = ("--wdir", str(tmp_path / "elsewhere"))
    done = job(text, options=wdir, GRADWIRE_CONFIG=path)
    assert done.returncode == 0 and done.stdout.count("FINITE fail") == 4, done.stdout


def test_ranks_read_settings_of_the_launcher(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[checks]\nfinite = "fail"\n[worker]\nmax_object_bytes = 1000\n')
    text = """
        import numpy as np
        import gradwire as gw
        gw.init()
        assert gw.broadcast_object("x" * 900 if gw.rank() == 1 else None, 1) == "x" * 900
        try:
            gw.broadcast_object("x" * 1100 if gw.rank() == 1 else None, 1)
        except gw.InvalidRequest as error:
            print("TOLD", error, flush=True)
        gw.allreduce(np.array([np.nan]))
    """
    done = job(text, options=("--config", str(file)))
    assert done.returncode == 1 and "contributes NaN" in done.stdout, done.stdout
    told = "bytes, but worker.max_object_bytes allows 1000"
    assert done.stdout.count(told) >= 2, done.stdout


def test_a_batch_script_runs_alone(job: Job) -> None:
    done = job(PLACES, ranks=None, SLURM_NTASKS="8", SLURM_PROCID="0", SLURM_NNODES="2")
    assert done.returncode == 0 and "RANK 0 of 1" in done.stdout, done.stdout
    # Tasks of gradwire run may be inside anything.
    done = job(PLACES, ranks=2, SLURM_STEP_NUM_TASKS="8", OMPI_COMM_WORLD_SIZE="4")
    assert done.returncode == 0 and "RANK 1 of 2" in done.stdout, done.stdout


def test_horovodruns_variables_without_it(job: Job) -> None:
    done = job(PLACES, ranks=None, HOROVOD_RANK="1", HOROVOD_SIZE="2")
    assert (
        done.returncode != 0 and "NotLaunched" in done.stdout and "gradwire run" in done.stdout
    ), done.stdout


def test_hosts_of_two_kinds_of_addresses(job: Job) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    done = job(PLACES, hosts="[::1]:1,127.0.0.1:1")
    assert done.returncode == 1, done.stdout
    assert "hint: one is an IPv4 and the other an IPv6 address" in done.stdout, done.stdout


def test_process_sets_at_the_start(job: Job) -> None:
    done = job(
        """
        import gradwire as gw, numpy as np
        sets = [gw.ProcessSet([0]), gw.ProcessSet([1, 2])]
        gw.init(process_sets=sets)
        own = sets[min(gw.rank(), 1)]
        print("SUM", gw.rank(), gw.allreduce(np.ones(1), op=gw.Sum, process_set=own)[0], flush=True)
        try:
            gw.init(comm=[0])
        except Exception as error:
            print("WRONG", error)
        """,
        ranks=3,
    )
    assert [
        f"SUM {rank} {total}" in done.stdout for rank, total in ((0, 1.0), (1, 2.0), (2, 2.0))
    ] == [True] * 3
    assert "WRONG" not in done.stdout and done.returncode == 0, done.stdout


def test_comm_with_a_part_of_the_job(job: Job) -> None:
    done = job("import gradwire as gw; gw.init(comm=[0])")
    assert done.returncode != 0 and "use process sets" in done.stdout, done.stdout


def test_a_function_of_the_notebook() -> None:
    pytest.importorskip("cloudpickle")
    there = {"factor": 3}
    # The function need not become a rank.
    assert gradwire.run(lambda x: x * there["factor"], (4,), np=2) == [12, 12]


def test_ctrl_c_ends_a_slow_look_up_of_a_name(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        try:
            silent.bind(("127.0.0.77", 53))
        except OSError as error:
            pytest.skip(f"only root may be a name server: {error}")
        silent.settimeout(LIMIT)
        settings = tmp_path / "resolv.conf"
        settings.write_text("nameserver 127.0.0.77\noptions timeout:30 attempts:5\n")
        mount = 'mount --make-rprivate / && mount --bind "$0" /etc/resolv.conf && exec "$@"'
        words = [LAUNCHER, "run", "-H", "slow.example.:1,localhost:1", "--", "true"]
        job = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", mount, str(settings), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            silent.recv(1 << 16)  # the question, which gets no answer
            job.send_signal(signal.SIGINT)
            said, _ = job.communicate(timeout=LIMIT)
        finally:
            job.kill()
    assert job.returncode == 130, said
    assert said == "gradwire: interrupted by SIGINT; everything was stopped\n"
