"""How processes end, and what the other ranks see: Ctrl-C, exceptions, exits, forks, deaths."""

from __future__ import annotations

import os
import re
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Job

MEMORY = 512 << 20


@pytest.fixture
def little_memory() -> Iterator[list[str]]:
    """Words that run a command in a control group with `MEMORY` bytes."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    paths = [line.split(":", 2)[2] for line in own if ":memory:" in line]
    first, last = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit = (first, "memory.limit_in_bytes") if paths else (last, "memory.max")
    inside = root / paths[0].lstrip("/") if paths else root
    group = (inside if inside.exists() else root) / f"gradwire-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        try:
            (group / limit).write_text(str(MEMORY))
        except OSError as error:
            pytest.skip(f"the memory of a control group can't be limited: {error}")
        yield ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"]
    finally:
        until = time.monotonic() + 30
        while True:
            try:
                group.rmdir()
                break
            except OSError:
                assert time.monotonic() < until, (group / "cgroup.procs").read_text()
                time.sleep(0.05)


def test_an_exception_is_reported_to_the_others(job: Job) -> None:
    done = job(
        """
        import gradwire as gw, numpy as np
        gw.init()
        gw.barrier()
        if gw.rank() == 1:
            raise ValueError("the data has a hole")
        try:
            gw.allreduce(np.ones(3), name="waits")
        except gw.GradwireError as error:
            print("TOLD", error.rank, error, flush=True)
        """
    )
    assert done.returncode != 0
    [reported] = [line for line in done.stdout.splitlines() if "TOLD" in line]
    assert "TOLD 1 " in reported and "ValueError: the data has a hole" in reported, done.stdout


def test_a_killed_rank_is_named(job: Job) -> None:
    done = job(
        """
        import os, signal
        import gradwire as gw, numpy as np
        gw.init()
        gw.barrier()
        if gw.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            gw.allreduce(np.ones(3), name="waits")
        except gw.PeerLost as error:
            print("TOLD", error.kind, error.rank, bool(error.host), flush=True)
        """
    )
    assert "TOLD worker-lost 1 True" in done.stdout, done.stdout


def test_abort_reports_its_reason(job: Job) -> None:
    done = job(
        """
        import gradwire as gw, numpy as np
        gw.init()
        gw.barrier()
        if gw.rank() == 1:
            gw.abort("the data is used up")
        try:
            gw.allreduce(np.ones(3), name="waits")
        except gw.GradwireError as error:
            known = "the data is used up" in str(error)
            print("TOLD", type(error).__name__, error.rank, known, flush=True)
        """
    )
    assert done.returncode != 0
    # The aborting rank does not count itself as a peer.
    assert (
        "[0] TOLD PeerLost 1 True" in done.stdout and "[1] TOLD Cancelled None True" in done.stdout
    ), done.stdout


def test_ctrl_c_interrupts_a_wait(job: Job) -> None:
    done = job(
        """
        import os, pathlib, signal, threading, time
        import gradwire as gw, numpy as np
        gw.init()
        flag = pathlib.Path(os.environ["TEST_FOLDER"]) / "interrupted"
        if gw.rank() == 0:
            counted = 0
            def count():
                global counted
                while not flag.exists():
                    counted += 1
                    time.sleep(0.01)
                    if counted == 30:
                        os.kill(os.getpid(), signal.SIGINT)
            threading.Thread(target=count).start()
            handle = gw.allreduce_async(np.ones(3), name="waits", op=gw.Sum)
            try:
                handle.wait()
            except KeyboardInterrupt:
                print("INTERRUPTED", counted >= 30)
            flag.touch()
            print("WENT ON", handle.wait()[0])
        else:
            while not flag.exists():
                time.sleep(0.05)
            gw.allreduce(np.ones(3), name="waits", op=gw.Sum)
        """
    )
    assert "INTERRUPTED True" in done.stdout and "WENT ON 2.0" in done.stdout, done.stdout
    assert done.returncode == 0, done.stdout


def test_an_exit_with_work_in_flight(job: Job) -> None:
    done = job(
        """
        import gradwire as gw, numpy as np
        gw.init()
        handles = [gw.allreduce_async(np.ones(100_000), name=f"n{at}") for at in range(8)]
        if gw.rank() == 1:
            lonely = gw.allreduce_async(np.ones(10), name="nobody else has it")
        print("LEAVES", gw.rank())
        """
    )
    assert done.stdout.count("LEAVES") == 2, done.stdout
    # No rank aborts or hangs. Which rank fails depends on which one leaves first.
    assert "SIGABRT" not in done.stdout and "SIGSEGV" not in done.stdout, done.stdout


def test_a_resumed_daemon_writes_to_no_array(job: Job) -> None:
    """The daemon is stopped during an operation until every wait has failed, then resumed."""
    done = job(
        """
        import os, pathlib, signal, threading, time
        import gradwire as gw, numpy as np
        from gradwire._world import session
        gw.init()
        folder = pathlib.Path(os.environ["TEST_FOLDER"])

        def daemon():
            job = ("GRADWIRE_JOB=" + os.environ["GRADWIRE_JOB"]).encode()
            for process in pathlib.Path("/proc").glob("[0-9]*"):
                try:
                    is_daemon = (process / "comm").read_text() == "gradwired\\n"
                    if is_daemon and job in (process / "environ").read_bytes().split(b"\\0"):
                        return int(process.name)
                except OSError:
                    pass

        buffer = session().buffer("f32", [8_000_000])
        array = np.asarray(buffer)  # on the memory that the daemon writes to
        steps = 0
        try:
            while True:
                array[:] = gw.rank() + 1
                session().allreduce([buffer], "sum", name="gradient").wait()
                steps += 1
                if steps == 3 and gw.rank() == 0:
                    threading.Timer(0.2, os.kill, (daemon(), signal.SIGSTOP)).start()
        except gw.PeerLost as error:
            print("TOLD", "no sign of life" in str(error), flush=True)
        before = array.copy()
        (folder / str(gw.rank())).touch()
        while not all((folder / rank).exists() for rank in "01"):
            time.sleep(0.01)
        if gw.rank() == 0:
            os.kill(daemon(), signal.SIGCONT)
        time.sleep(1)
        print("CHANGED", int((array != before).sum()), flush=True)
        """
    )
    assert done.stdout.count("TOLD True") == 2, done.stdout
    assert done.stdout.count("CHANGED 0") == 2, done.stdout


def test_a_good_end_is_quiet(job: Job) -> None:
    done = job("import gradwire as gw; gw.init(); gw.barrier(); print('RANK', gw.rank())")
    assert done.returncode == 0
    assert sorted(done.stdout.split()) == ["RANK", "RANK", "[0]", "[1]", "0", "1"] or (
        sorted(done.stdout.splitlines()) == ["[0] RANK 0", "[1] RANK 1"]
    ), done.stdout


@pytest.mark.parametrize("ranks", [None, 2])
def test_daemon_threads_do_not_crash_the_end(job: Job, ranks: int | None) -> None:
    """They are inside of calls when the interpreter ends."""
    text = """
        import sys, threading, time
        import numpy as np
        import gradwire as gw
        gw.init()
        def waits():
            gw.allreduce(np.ones(2), name=f"only.{gw.rank()}")
        def works():
            while True:
                gw.allreduce(np.ones(2), name="all")
        def polls():
            handle = gw.allreduce_async(np.ones(2), name=f"poll.{gw.rank()}")
            while True:
                handle.poll() if hasattr(handle, "poll") else gw.poll(handle)
        for function in (waits, works, polls) * 2:
            threading.Thread(target=function, daemon=True).start()
        time.sleep(0.3)
        sys.exit(7)
    """
    for _ in range(3):
        done = job(text, ranks=ranks)
        assert done.returncode == 7, done.stdout


def test_a_forked_child_is_inert_and_says_so(job: Job) -> None:
    done = job(
        """
        import os, sys
        import gradwire as gw, numpy as np
        gw.init()
        kept = gw.allreduce_async(np.ones(3), name="before", op=gw.Sum)
        child = os.fork()
        if child == 0:
            for call in (lambda: gw.allreduce(np.ones(3)), gw.init, kept.wait, gw.barrier):
                try:
                    call()
                except gw.Forked as error:
                    print("CHILD", "forked" in str(error), flush=True)
            # Data loaders may query the rank and its place.
            place = (gw.rank(), gw.size(), gw.local_rank(), gw.local_size())
            place += (gw.cross_rank(), gw.cross_size())
            place += (gw.is_homogeneous(), gw.is_initialized())
            where = int(os.environ["RANK"])
            print("CHILD IS", place == (where, 2, where, 2, 0, 1, True, True), flush=True)
            gw.shutdown()
            sys.exit(0)  # runs all exit handlers
        assert os.waitpid(child, 0)[1] == 0
        print("PARENT", kept.wait()[0], gw.allreduce(np.ones(3), name="after", op=gw.Sum)[0])
        """
    )
    assert done.stdout.count("CHILD True") == 8, done.stdout
    assert done.stdout.count("CHILD IS True") == 2, done.stdout
    assert done.stdout.count("PARENT 2.0 2.0") == 2, done.stdout
    assert done.returncode == 0


def test_without_init(job: Job) -> None:
    done = job(
        """
        import gradwire as gw, numpy as np
        gw.shutdown()
        for call in (gw.rank, gw.barrier, lambda: gw.allreduce(np.ones(3))):
            try:
                call()
            except ValueError as error:
                print("TOLD", "init()" in str(error), isinstance(error, gw.NotInitialized))
        """,
        ranks=None,
    )
    assert done.stdout.count("TOLD True True") == 3, done.stdout


# Rank 1's action and exit code.
ENDS = {
    "sys.exit(3)": 3,
    "sys.exit('the data is missing')": 1,
    "sys.exit(256 + 9)": 9,
    "raise SystemExit(4)": 4,
    "argparse.ArgumentParser().parse_args(['--zonk'])": 2,
    "exit(6)": 6,
    "os._exit(5)": 5,
    "raise LookupError('the data is missing')": 1,
    "sys.excepthook(OSError, OSError('told by hand'), None); sys.exit(7)": 7,
}


@pytest.mark.parametrize(("how", "code"), ENDS.items(), ids=ENDS)
def test_exit_codes_are_reported(job: Job, how: str, code: int) -> None:
    done = job(
        f"""
        import argparse, os, sys
        import gradwire as gw, numpy as np
        gw.init()
        if gw.rank() == 1:
            {how}
        try:
            gw.allreduce(np.ones(3), name="waits")
        except gw.GradwireError as error:
            print("TOLD", error.rank, error, flush=True)
            sys.exit(8)  # later, as a consequence
        """,
        ranks=3,
    )
    reported = [line for line in done.stdout.splitlines() if "TOLD" in line]
    assert len(reported) == 2 and all("TOLD 1 rank 1 on host" in line for line in reported), (
        done.stdout
    )
    assert all(f"exit code {code}" in line or "Error: t" in line for line in reported), done.stdout
    assert "gradwire: rank 1 on host localhost (pid " in done.stdout, done.stdout
    assert f") ended with exit code {code}, " in done.stdout and done.returncode == code, (
        done.stdout
    )


GOOD_ENDS = {
    "caught": "try: sys.exit(3)\nexcept SystemExit: pass",
    "none": "sys.exit()",
    "zero": "sys.exit(0)",
    "a thread": "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
    "atexit": "atexit.register(lambda: 1 / 0)",
    "shown": "sys.excepthook(OSError, OSError('shown by hand'), None)",
}


@pytest.mark.parametrize("how", GOOD_ENDS.values(), ids=GOOD_ENDS)
def test_an_exit_code_of_zero_is_a_good_end(job: Job, how: str) -> None:
    text = "import atexit, sys, threading\nimport gradwire as gw\ngw.init()\n"
    done = job(f"{text}if gw.rank() == 1:\n" + textwrap.indent(how, "    "))
    assert done.returncode == 0 and "gradwire:" not in done.stdout, done.stdout


def test_threads_do_not_hide_an_exception(job: Job) -> None:
    """The process of rank 1 waits for its threads, and the others do not wait for it."""
    done = job(
        """
        import concurrent.futures, threading, time
        import gradwire as gw
        gw.init()
        if gw.rank() == 1:
            threading.Thread(target=time.sleep, args=(600,)).start()
            concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 600)
            raise LookupError("the data is missing")
        try:
            gw.barrier()
        except gw.GradwireError as error:
            print("TOLD", error.rank, error)
        """
    )
    [told] = [line for line in done.stdout.splitlines() if "TOLD" in line]
    assert "TOLD 1 " in told and "LookupError: the data is missing" in told, done.stdout
    assert "gradwire: the job failed: rank 1 on host localhost" in done.stdout, done.stdout
    assert done.returncode == 1, done.stdout


def test_the_out_of_memory_killer_is_named(job: Job, little_memory: list[str]) -> None:
    done = job(
        f"""
        import gradwire as gw, numpy as np
        gw.init()
        gw.barrier()
        if gw.rank() == 1:
            np.ones({MEMORY // 8})
        try:
            gw.allreduce(np.ones(3), name="waits")
        except gw.GradwireError as error:
            print("TOLD", error.rank, error, flush=True)
        """,
        before=little_memory,
    )
    assert "rank 1 on host localhost (pid " in done.stdout, done.stdout
    killed = "was killed by the kernel's out-of-memory killer"
    assert f") {killed}, " in done.stdout and "use less memory" in done.stdout, done.stdout
    assert f") {killed} without leaving the job; use less memory" in done.stdout, done.stdout
    assert done.returncode == 128 + 9, done.stdout


def test_a_process_that_skips_exit_handlers(job: Job) -> None:
    done = job(
        """
        import os
        import gradwire as gw
        gw.init()
        if gw.rank() == 1:
            os._exit(0)
        gw.barrier()
        """
    )
    assert ") ended with exit code 0 without leaving the job; " in done.stdout, done.stdout
    assert "out-of-memory" not in done.stdout and done.returncode == 1, done.stdout


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize(
    ("ends", "code", "told"),
    [
        ("pass", 0, None),
        ("sys.exit(3)", 3, "gave up: sys.exit(3)"),
        ("raise ValueError('a hole')", 1, "gave up: ValueError: a hole"),
    ],
)
def test_a_rank_of_multiprocessing_ends(
    job: Job, ends: str, code: int, told: str | None, context: str
) -> None:
    done = job(
        f"""
        import multiprocessing, sys
        import gradwire as gw, numpy as np

        def target():
            gw.init()
            gw.allreduce(np.ones(3), name="first")
            if gw.rank() == 1:
                {ends}
            if {told is not None}:
                gw.allreduce(np.ones(3), name="second")

        if __name__ == "__main__":
            process = multiprocessing.get_context({context!r}).Process(target=target)
            process.start()
            process.join()
            sys.exit(process.exitcode)
        """
    )
    assert done.returncode == code, done.stdout
    assert "was killed or crashed" not in done.stdout, done.stdout
    assert told is None or told in done.stdout, done.stdout


def test_a_fork_does_not_hide_its_parents_death(job: Job) -> None:
    done = job(
        """
        import os, time
        import gradwire as gw
        gw.init()
        if gw.rank() == 1:
            if os.fork() == 0:
                time.sleep(600)
            os._exit(7)
        try:
            gw.barrier()
        except gw.PeerLost as error:
            print("TOLD", error.rank, error, flush=True)
        """
    )
    assert (
        ") ended with exit code 7 without leaving the job" in done.stdout
        and "TOLD 1 " in done.stdout
    ), done.stdout
    assert done.returncode == 7, done.stdout


@pytest.mark.parametrize("end", ["sys.exit(3)", "os._exit(3)", "exec('raise SystemExit(3)')"])
def test_a_rank_fails_after_it_has_left(job: Job, end: str) -> None:
    done = job(
        f"""
        import os, sys, time
        import gradwire as gw
        gw.init()
        gw.barrier()
        if gw.rank() == 1:
            gw.shutdown()
            {end}
        time.sleep(1000)
        """,
        hosts="127.0.0.1:1,127.0.0.2:1",
    )
    assert done.returncode == 3, done.stdout
    [report] = [line for line in done.stdout.splitlines() if line.startswith("gradwire: rank")]
    assert report.startswith("gradwire: rank 1 on host 127.0.0.2"), done.stdout
    assert "ended with exit code 3" in report and "was asked to end" not in done.stdout, done.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_what_libraries_print_gets_into_no_socket(job: Job, closed: str) -> None:
    done = job(
        """
        import ctypes, os
        import gradwire as gw, numpy as np
        gw.init()
        library = ctypes.CDLL(None)
        library.puts(b"a message of a library")
        library.fflush(None)
        library.perror(b"another one")
        for descriptor in (1, 2):
            os.write(descriptor, b"x" * 1000)
        total = gw.allreduce(np.ones(3), op=gw.Sum)
        with open(f"{os.environ['TEST_FOLDER']}/{gw.rank()}", "w") as file:
            print(*total, file=file)
        """,
        options=["--", "sh", "-c", f'shift; exec "$@" {closed}', "sh"],
    )
    assert done.returncode == 0, done.stdout


def test_a_rank_interrupted_while_submitting(job: Job) -> None:
    """It can't know what the others wait for, so the next call ends the job on all ranks."""
    done = job(
        """
        import torch
        import gradwire.torch as hvd
        from gradwire.torch import _agreement

        hvd.init()
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        exchange = _agreement.Agreement.exchange

        def step():
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()

        def interrupted(*arguments):
            next(exchange(*arguments))  # the operation is in flight
            raise KeyboardInterrupt
            yield

        step()
        if hvd.rank() == 0:
            _agreement.Agreement.exchange = interrupted
            try:
                step()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            _agreement.Agreement.exchange = exchange
        try:
            step()
            step()
        except hvd.GradwireError as error:
            print(f"TOLD {hvd.rank()} {error}".replace(chr(10), " "), flush=True)
            raise
        """,
        ranks=3,
    )
    assert done.returncode != 0 and "interrupted" in done.stdout, done.stdout
    for rank in range(3):
        text = rf"TOLD {rank} .*has interrupted step\(\) or backward\(\) while this rank started"
        assert re.search(text, done.stdout), done.stdout
