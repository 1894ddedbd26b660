"""Ranks that end, or wait for others, in ``init()``."""

from __future__ import annotations

import pytest
from launching import Job


def test_init_waits_for_all(job: Job) -> None:
    done = job(
        """
        import os, pathlib, time
        import gradwire as gw
        flag = pathlib.Path(os.environ["TEST_FOLDER"]) / "late"
        if os.environ["GRADWIRE_RANK"] == "1":
            time.sleep(1)
            flag.touch()
        gw.init()
        print("ALL HERE", flag.exists())
        """
    )
    assert done.stdout.count("ALL HERE True") == 2 and done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("how", "code"), [("sys.exit(0)", 1), ("sys.exit(3)", 3), ("os._exit(0)", 1)]
)
def test_init_notices_a_missing_rank(job: Job, how: str, code: int) -> None:
    done = job(
        f"""
        import os, sys
        import gradwire as gw
        if os.environ["GRADWIRE_RANK"] == "1":
            {how}
        try:
            gw.init()
        except gw.PeerLost as error:
            print("TOLD", error.rank, gw.is_initialized(), error, flush=True)
            sys.exit(1)
        """,
        ranks=3,
    )
    reported = [line for line in done.stdout.splitlines() if "TOLD" in line]
    assert len(reported) == 2 and all("TOLD 1 False " in line for line in reported), done.stdout
    assert all(
        "rank 1 on host localhost" in line and " before it had joined the job" in line
        for line in reported
    ), done.stdout
    assert done.returncode == code, done.stdout


@pytest.mark.parametrize("options", [[], ["--min-np", "1"]], ids=["fixed", "elastic"])
def test_the_report_names_who_left_before_init(job: Job, options: list[str]) -> None:
    done = job(
        """
        import os, sys
        import gradwire as gw
        if os.environ["GRADWIRE_RANK"] == "1":
            sys.exit(0)
        gw.init()
        """,
        options=options,
    )
    report = done.stdout.rpartition("gradwire: ")[2]
    assert report.startswith("the job failed: rank 1 on host localhost"), done.stdout
    assert "its process ended with exit code 0 before it had joined the job" in report, done.stdout
    assert "program.py:6 in <module>)" in report, done.stdout
    assert done.returncode == 1, done.stdout


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("sys.exit(5)", 5, "in init(), SystemExit: 5"),
        ("raise KeyError('a hole')", 1, "in init(), KeyError: 'a hole'"),
    ],
)
def test_a_rank_gives_up_while_another_is_late(job: Job, how: str, code: int, says: str) -> None:
    done = job(
        f"""
        import os, signal, sys, time
        import gradwire as gw

        def give_up(*_):
            {how}

        if os.environ["GRADWIRE_RANK"] == "0":
            signal.signal(signal.SIGALRM, give_up)
            signal.setitimer(signal.ITIMER_REAL, 1.0)
        if os.environ["GRADWIRE_RANK"] == "2":
            time.sleep(5)
        gw.init()
        """,
        ranks=3,
    )
    assert done.returncode == code and says in done.stdout, done.stdout
    report = "gradwire: rank 0 on host localhost (pid "
    assert report in done.stdout and f"exit code {code}" in done.stdout, done.stdout


def test_a_rank_that_lacks_descriptors_in_init(job: Job) -> None:
    done = job(
        """
        import os, resource
        import gradwire as gw
        if os.environ["GRADWIRE_RANK"] == "1":
            resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))
        gw.init()
        """,
        hosts="127.0.0.1:1,127.0.0.2:1",
    )
    assert done.returncode == 1 and "has left the job" not in done.stdout, done.stdout
    assert "gave up: in init(), OutOfResources: " in done.stdout, done.stdout
    assert "gradwire: rank 1 on host 127.0.0.2 (pid " in done.stdout, done.stdout
