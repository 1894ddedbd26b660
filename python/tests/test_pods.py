"""Pods with exactly what the manifests of ``deploy/kubernetes`` give them become one job."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launchers import Tasks
from launching import LAUNCHER, PLACES, until
from pods import Cluster, Manifest, cluster
from test_launchers import ENDS

SHORT = {"GRADWIRE_LAUNCH__START_TIMEOUT_MS": "4000"}
LASTS = """
import os, signal, time
import gradwire as gw
gw.init()
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"ASKED\\n") and os._exit(4))
gw.barrier()
print("READY", flush=True)
time.sleep(250)
"""


EARLY = """
import os, sys
if os.environ["GRADWIRE_RANK"] == "1":
    os.kill(os.getpid(), 9)
import gradwire as gw
try:
    gw.init()
    gw.barrier()
except gw.GradwireError as error:
    print("TOLD", error.rank, error, flush=True)
    sys.exit(8)
"""
COMPUTES = """
import os, time
import gradwire as gw
gw.init()
gw.barrier()
if gw.rank() == 1:
    os.kill(os.getpid(), 9)
time.sleep(250)
"""


@pytest.fixture(params=["jobset"])
def pods(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster for the pods of a manifest."""
    with cluster(tmp_path, Manifest.read(request.param)) as one:
        yield one


def python(text: str, *arguments: str) -> list[str]:
    return ["python", "-c", text, *arguments]


def test_the_manifest_trains_the_digits(pods: Cluster) -> None:
    """Exactly as it is. The pod with rank 0 comes last."""
    started = [pods.start(node) for node in (1, 0)]
    assert [pod.wait() for pod in started] == [0, 0], [pod.text for pod in started]
    assert "the same bits on 4 of 4 ranks" in started[1].text, started[1].text


@pytest.mark.parametrize("pods", ["job", "kubeflow"], indirect=True)
def test_every_kind_of_manifest_makes_a_job(pods: Cluster) -> None:
    started = [pods.start(node, *python(PLACES)) for node in (0, 1)]
    assert [pod.wait() for pod in started] == [0, 0], [pod.text for pod in started]
    for rank in range(4):
        line = f"RANK {rank} of 4 local {rank % 2} of 2 sum 10.0"
        assert line in started[rank // 2].text, started[rank // 2].text


def test_a_killed_rank_ends_all_pods(pods: Cluster) -> None:
    """All ranks get the cause. When the pods start again, they form a new job."""
    how = "gw.rank() == 1 and os.kill(os.getpid(), 9)"
    started = [pods.start(node, *python(ENDS, how)) for node in (0, 1)]
    assert [pod.wait() for pod in started] == [137, 8], [pod.text for pod in started]
    assert "rank 1 was killed by SIGKILL" in started[0].text, started[0].text
    assert "TOLD 1 rank 1" in started[1].text, started[1].text
    again = [pods.start(node, *python(PLACES)) for node in (1, 0)]
    assert [pod.wait() for pod in again] == [0, 0], [pod.text for pod in again]


def test_a_rank_that_is_killed_early_is_named(pods: Cluster) -> None:
    started = [pods.start(node, *python(EARLY)) for node in (0, 1)]
    assert [pod.wait() for pod in started] == [137, 8], [pod.text for pod in started]
    assert started[1].text.count("TOLD 1 rank 1 ") == 2, started[1].text
    assert "TOLD 1 rank 1 " in started[0].text, started[0].text


def test_ranks_that_compute_end_with_the_others(pods: Cluster) -> None:
    grace = {"GRADWIRE_LAUNCH__GRACE_MS": "2000"}
    started = [pods.start(node, *python(COMPUTES), **grace) for node in (0, 1)]
    assert [pod.wait() for pod in started] == [137, 1], [pod.text for pod in started]
    says = "error: the job has failed, so the ranks of this host are ended"
    assert says in started[1].text, started[1].text


def test_pods_that_disagree_are_refused(pods: Cluster) -> None:
    started = [pods.start(0, *python(PLACES)), pods.start(1, *python(PLACES), PET_NNODES="3")]
    assert 0 not in [pod.wait() for pod in started], [pod.text for pod in started]
    for pod in started:
        assert "a job of 6 ranks on 3 hosts, and the coordinator for one of 4" in pod.text, pod.text
        assert "RANK" not in pod.text, pod.text


def test_a_pod_that_is_started_again_joins(pods: Cluster) -> None:
    early = pods.start(1, *python(PLACES))
    until("it waits", lambda: pods.inside(1, "ss", "-Hltn").stdout.strip(), of=early.process)
    early.kill()
    started = [pods.start(node, *python(PLACES)) for node in (1, 0)]
    assert [pod.wait() for pod in started] == [0, 0], [pod.text for pod in started]


def test_probes_and_sigterm(pods: Cluster) -> None:
    """The probes are answered. SIGTERM lets the ranks end by themselves."""
    started = [pods.start(node, *python(LASTS)) for node in (0, 1)]
    for node, pod in enumerate(started):
        until("both ranks are ready", lambda pod=pod: pod.text.count("READY") == 2, of=pod.process)
        for path in ("healthz", "readyz", "metrics"):
            address = f"http://{'127.0.0.1' if node else '10.77.0.1'}:9401/{path}"
            seen = pods.inside(node, "curl", "--silent", "--fail", address)
            assert seen.returncode == 0 and seen.stdout, f"{address}: {seen.stdout}"
    for pod in started:
        pod.signal(signal.SIGTERM)
    assert [pod.wait() for pod in started] == [143, 143], [pod.text for pod in started]
    assert all(pod.text.count("ASKED") == 2 for pod in started), [pod.text for pod in started]


def test_what_is_missing_is_named(pods: Cluster) -> None:
    for variables, says in (
        ({"SECRET": ""}, "GRADWIRE_SECRET_FILE=/run/secrets/gradwire/secret: No such file"),
        ({"GRADWIRE_SECRET_FILE": ""}, "kubectl create secret generic"),
        ({"SECRET": "cafe"}, "64"),
        ({"PET_NNODES": ""}, "JOB_COMPLETION_INDEX=1 is the number of this pod: set PET_NNODES"),
        ({"PET_MASTER_ADDR": ""}, "set GRADWIRE_RENDEZVOUS=HOST:PORT"),
        ({"PET_MASTER_ADDR": "nobody"}, "no address for host nobody, where rank 0 is to be"),
        ({"PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE=many: it must be a number"),
    ):
        pod = pods.start(1, *python(PLACES), **SHORT, **variables)
        assert pod.wait() in (1, 2) and says in pod.text, pod.text
        assert "RANK" not in pod.text and "panicked" not in pod.text, pod.text
    pod = pods.start(1, "no-such-program")
    assert pod.wait() == 127 and "can't run no-such-program" in pod.text, pod.text


def test_a_pod_that_does_not_come_is_named(pods: Cluster) -> None:
    """With the wrong secret, it does not come either."""
    pod = pods.start(0, *python(PLACES), **SHORT)
    assert pod.wait() == 1 and "1 of 2 nodes" in pod.text, pod.text
    started = [pods.start(0, *python(PLACES), **SHORT)]
    started.append(pods.start(1, *python(PLACES), SECRET="ab" * 32, **SHORT))
    assert [pod.wait() for pod in started] == [1, 1], [pod.text for pod in started]
    assert "the job secret of this node differs" in started[1].text, started[1].text


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("os.kill(os.getpid(), 9)", 137, "error: rank 1 was killed by SIGKILL"),
        ("sys.exit(3)", 3, "error: rank 1 ended with exit code 3"),
    ],
)
def test_a_single_pod_names_the_rank_that_failed(
    how: str, code: int, says: str, tmp_path: Path
) -> None:
    """Without any rights, and without a network."""
    variables = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}
    words = [LAUNCHER, "join", "--"]
    done = Tasks(tmp_path, variables).run(words, ENDS, f"gw.rank() == 1 and {how}")
    assert done.code == code and says in done.text, done.text


def test_a_program_without_join_is_refused(pods: Cluster) -> None:
    pods.manifest.command = ["python", "-c", PLACES]
    pod = pods.start(0)
    assert pod.wait() == 1 and "let the pod run: gradwire join -- PROGRAM" in pod.text, pod.text
