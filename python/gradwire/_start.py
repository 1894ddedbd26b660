"""How a process finds or starts its job.

- Under ``gradwire run``, the variables ``GRADWIRE_...`` describe the job.
- Under torchrun (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``,
  ``MASTER_PORT``) the first rank of each node starts its daemon, and the first daemon hosts the
  coordinator. The ranks exchange the job's id, secret and addresses through torch's store. Anyone
  who can read that store can join the job, as with torch itself.
- If the variables of a starter such as srun or mpirun show that this process is one of several
  tasks (``worker-lib/src/starters.rs``), ``gradwire join`` makes a job of them.
- Otherwise, this process becomes the only rank of a new job.

Processes started here end with this process, however it ends (CLEAN).

After ``shutdown``, the ranks may form a new job through the store. Its keys contain the number of
the job, which is the same on all ranks. Ranks of ``gradwire run`` do the same: the launcher's job
is over, and the launcher has set torchrun's variables as well.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import json
import os
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from gradwire import _agent, _answers, _native, _roll, _settings_file, _variables
from gradwire._errors import InvalidRequest, NotLaunched, PeerLost
from gradwire._programs import find

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Variables that a launcher sets for the processes of a job. Other jobs must not read them.
_LAUNCH = tuple(
    f"GRADWIRE_{name}"
    for name in [
        "JOB",
        "SECRET",
        "SOCKET",
        "LOCAL_RANK",
        "ELASTIC",
        "EPOCH",
        "WORKER",
        "WORKERS",
        "SURVIVORS",
        "HOST",
        "ADDRESS",
        "SLOTS",
        "ORDER",
        "PATIENCE_MS",
        "NODES",
        "SERVERS",
        "RANKS",
        "COORDINATOR",
        "LAUNCHED",
        "DAEMON_METRICS",
        "COORDINATOR_METRICS",
        "RECORD",
        "RECORD_BYTES",
        "REPLAY",
    ]
)
# These remain after ``shutdown`` from a job whose ranks don't change: scripts may read them.
_NUMBERS = tuple(
    f"GRADWIRE_{name}" for name in ("RANK", "SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
)
_GRACE_SECONDS = 5.0
# As in launcher/src/join/known.rs.
_UNKNOWN_LAUNCHER = 3
# How many characters of a command line a message shows.
_SHOWN = 200
_services: list[subprocess.Popen[str]] = []
# The services of jobs that this process has left, while other ranks still use them.
_former: list[subprocess.Popen[str]] = []
# How many jobs of a starter's tasks this process has joined.
_joined = 0
# Variables of the user that a job replaces, kept for later jobs of this process.
_given: dict[str, str] = {}
# Counts the jobs that this process has formed without a launcher.
_jobs = itertools.count()
# Whether the environment variables describe a job formed without a launcher.
_launched_here = False


def prepare() -> None:
    """Ensures that the variables ``GRADWIRE_...`` are set and that a daemon is running."""
    if _has_job():
        return
    # The ranks of a launcher's job form their next one, with the variables that they have. The
    # launcher's file may be on another host.
    if "GRADWIRE_SIZE" not in os.environ:
        _settings_file.take()
        if os.environ.get("GRADWIRE_ALONE", "").strip() == "1":
            _alone()
            return
    if all(name in os.environ for name in _TORCHRUN):
        _join_torchrun()
        return
    why = _why_not_alone()
    if why is None:
        _alone()
    else:
        _join_tasks(why)


def _has_job() -> bool:
    return any(name in os.environ for name in ("GRADWIRE_JOB", "GRADWIRE_SOCKET"))


def _why_not_alone() -> str | None:
    """Returns why this process is one of several tasks of a starter, if it is."""
    words = sys.orig_argv[1:]
    return _native.why_not_alone(_shown(["python", *words]), _shown(sys.argv))


def check_alone() -> None:
    """Raises ``NotLaunched`` if a starter has started several tasks."""
    why = _why_not_alone()
    if why is not None:
        raise NotLaunched(why, kind="not-launched")


def _join_tasks(why: str) -> None:
    """Joins the job of all tasks of a starter.

    ``why`` is the error if their variables don't say which rank this process is.
    """
    global _joined
    words = [find("gradwire"), "join", "--for", str(os.getpid()), "--session", str(_joined)]
    # Standard error is not captured: the daemon inherits it, and outlives the command.
    done = subprocess.run(
        words,
        env=os.environ | _given,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode == _UNKNOWN_LAUNCHER:
        raise NotLaunched(why, kind="not-launched")
    if done.returncode != 0:
        raise NotLaunched(done.stdout.strip() or "gradwire join failed", kind="not-launched")
    # The number must be the same on all ranks, even if one of them has failed to join before.
    _joined += 1
    told = dict(line.split("=", 1) for line in done.stdout.splitlines())
    if "GRADWIRE_SECRET" in os.environ:
        _given["GRADWIRE_SECRET"] = os.environ["GRADWIRE_SECRET"]
    name, local_rank = told.pop("GRADWIRE_SOCKET"), int(told.pop("GRADWIRE_LOCAL_RANK"))
    set_variables(told, name, local_rank)


def _shown(words: list[str]) -> str:
    """Returns a command line for a message; a long one is cut."""
    text = shlex.join(words).encode(errors="replace").decode()  # names need not be UTF-8
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _stale() -> set[str]:
    """Returns the variables that describe the job of this process, if it has one."""
    names = set(_LAUNCH)
    if "GRADWIRE_ELASTIC" in os.environ:
        # The launcher has set it, to a time that depends on the process.
        names.add("GRADWIRE_ELASTIC__TIMEOUT_MS")
    return names & os.environ.keys()


def environment_outside() -> dict[str, str]:
    """Returns this process's environment for a process that belongs to another job, or to none."""
    stale = _stale().union(_NUMBERS, _TORCHRUN, _variables.NAMES)
    return {name: text for name, text in os.environ.items() if name not in stale}


def _timeout() -> float:
    """Returns the start timeout in seconds. Gradwire's variable takes precedence over Horovod's."""
    for name, unit, per_second in (
        ("GRADWIRE_LAUNCH__START_TIMEOUT_MS", "milliseconds", 1000),
        ("HOROVOD_START_TIMEOUT", "seconds", 1),
    ):
        text = os.environ.get(name, "").strip()
        if not text:
            continue
        if not text.isdecimal():
            raise InvalidRequest(f"{name}={text!r}: it must be a number of {unit}", kind="invalid")
        return int(text) / per_second
    return 30.0


def _in_lasting_thread(start: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Starts a process whose life is tied to a thread that lives as long as this process."""
    if threading.current_thread() is threading.main_thread():
        return start()
    started: concurrent.futures.Future[subprocess.Popen[str]] = concurrent.futures.Future()

    def run() -> None:
        try:
            started.set_result(start())
        except BaseException as error:
            started.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=run, name="gw-services", daemon=True).start()
    return started.result()


def _serve(words: list[str], variables: dict[str, str]) -> dict[str, str]:
    """Starts a service; returns its report once it is ready."""
    gradwire = find("gradwire")
    # Gently: if this process dies, the daemon still has time to report that to the others.
    command = [gradwire, "exec-child", "--gently", str(os.getpid()), *words]
    service = _in_lasting_thread(
        lambda: subprocess.Popen(
            command,
            env=environment_outside() | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C should reach only the training process, which then leaves the job.
            start_new_session=True,
        )
    )
    _services.append(service)
    assert service.stdout is not None
    deadline = time.monotonic() + _timeout()
    while True:
        ready, _, _ = select.select([service.stdout], [], [], max(0.0, deadline - time.monotonic()))
        line = service.stdout.readline() if ready else ""
        if not line:
            program = os.path.basename(words[0])
            how = "was not ready in time" if not ready else "exited before it was ready"
            raise NotLaunched(f"{program} {how}; its output is above", kind="not-launched")
        report: dict[str, str] = json.loads(line)
        if report.get("event") == "serving":
            return report


def stop(left: bool = False) -> str:
    """Waits for the services, which exit when all ranks have left.

    If this rank has ``left`` cleanly, the other ranks may still need the services, so it waits
    without a limit, as rank 0 does for torch's own store. Otherwise it terminates them after a
    grace period.

    Returns:
        How the first failed service ended; empty if the job has succeeded, as far as the services
        know.
    """
    how = ""
    deadline = time.monotonic() + _GRACE_SECONDS
    while _services:
        service = _services.pop()
        try:
            service.wait(None if left else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _terminate(service)
        how = how or _bad_end(service)
        if service.stdout is not None:
            service.stdout.close()
    return how


def _bad_end(service: subprocess.Popen[str]) -> str:
    """How a service ended; empty if it ended well or still runs."""
    code = service.poll()
    if not code:
        return ""
    who = f"gradwired (pid {service.pid}), which this rank has started,"
    if code > 0:
        return f"{who} ended with exit code {code}: see its output above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; the kernel's log names processes that ran out of memory" if code == -9 else ""
    return f"{who} was killed by {name}{hint}"


def _terminate(service: subprocess.Popen[str]) -> None:
    service.terminate()
    try:
        service.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        service.kill()
        service.wait()


def let_go() -> None:
    """Forgets a job that this process has left, so that it can form another one.

    The services end when the other ranks have left, or with this process.
    """
    global _launched_here
    for name in _stale():
        os.environ.pop(name, None)
    _launched_here = False
    _former.extend(_services)
    _services.clear()
    for service in list(_former):
        if service.poll() is not None:
            _former.remove(service)
            if service.stdout is not None:
                service.stdout.close()


def is_launched() -> bool:
    """Returns whether a launcher has started the job of this process."""
    return not _launched_here and _has_job()


def hand_over() -> list[int]:
    """Returns the process ids of the services; ``at_exit`` waits for them."""
    ids = []
    while _former:
        _terminate(_former.pop())
    while _services:
        service = _services.pop()
        if service.poll() is None:
            ids.append(service.pid)
            service.returncode = 0  # keeps Popen from warning about it
        if service.stdout is not None:
            service.stdout.close()
    return ids


def explain_lost_daemon(error: PeerLost) -> PeerLost | None:
    """Returns a clearer error if this node's daemon or the rank that started it is lost."""
    if not _launched_here or error.kind != "node-lost":
        return None
    host = socket.gethostname()
    if _services:
        how = next(filter(None, map(_bad_end, _services)), "")
        return PeerLost(f"{how}: {error}", kind=error.kind, host=host) if how else None
    rank = _number("RANK") - _number("LOCAL_RANK")
    text = f"rank {rank}, which runs this node's daemon, has exited or is stopped: {error}"
    return PeerLost(text, kind=error.kind, rank=rank, host=host)


def _job(prefix: str) -> dict[str, str]:
    return {
        "GRADWIRE_JOB": f"{prefix}-{os.getpid()}-{secrets.token_hex(4)}",
        "GRADWIRE_SECRET": secrets.token_hex(32),
    }


def _first_daemon(
    job: dict[str, str], nodes: int, ranks: int, address: str, slots: int
) -> tuple[str, str]:
    """Starts the first node's daemon; returns its socket and the coordinator's address."""
    where = {
        "GRADWIRE_COORDINATOR": "here",
        "GRADWIRE_NODES": str(nodes),
        "GRADWIRE_RANKS": str(ranks),
    }
    name, report = _daemon(job | where, address, slots, order=0)
    return name, report["grpc"]


def _daemon(
    job: dict[str, str], address: str, slots: int, order: int
) -> tuple[str, dict[str, str]]:
    name = f"@gradwire-{job['GRADWIRE_JOB']}-{order}"
    where = {
        "GRADWIRE_HOST": socket.gethostname(),
        "GRADWIRE_ADDRESS": address,
        "GRADWIRE_SLOTS": str(slots),
        "GRADWIRE_ORDER": str(order),
        "GRADWIRE_SOCKET": name,
    }
    return name, _serve([find("gradwired")], job | where)


def job_store(store: Any) -> Any:
    """Returns the part of a store for the next job, apart from the keys of earlier jobs."""
    from torch.distributed.distributed_c10d import PrefixStore

    # Torchrun may start all of its processes again with the same store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"gradwire/{attempt}/{next(_jobs)}", store)


def set_variables(job: dict[str, str], name: str, local_rank: int) -> None:
    """Sets the variables of a rank whose job was formed here."""
    global _launched_here
    _launched_here = True
    for stale in _stale():
        del os.environ[stale]
    os.environ.update(job)
    os.environ["GRADWIRE_SOCKET"] = name
    os.environ["GRADWIRE_LOCAL_RANK"] = str(local_rank)


def clear_variables(left: bool, attached: bool = True) -> str:
    """Removes the variables of a job that this process was part of.

    ``init`` can then start a new one. Variables set by a launcher remain if this process did not
    join its job.

    Returns:
        The result of ``stop``.
    """
    global _launched_here
    if _launched_here or attached:
        stale = _stale()
        if "GRADWIRE_ELASTIC" in os.environ:
            # This process can't come back to the elastic job, and these describe its first epoch.
            stale.update(_NUMBERS, _TORCHRUN, _variables.NAMES)
        for name in stale:
            os.environ.pop(name, None)
        _launched_here = False
    return stop(left)


def _alone() -> None:
    job = _job("alone")
    name, _ = _first_daemon(job, nodes=1, ranks=1, address="127.0.0.1", slots=1)
    set_variables(job, name, local_rank=0)


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise InvalidRequest(
            f"{name}={os.environ[name]!r}: it must be a number", kind="invalid"
        ) from None


def _torchrun_place() -> tuple[int, int, int, int]:
    """Returns torchrun's numbers: the rank, all ranks, the local rank, the ranks of this node.

    If the numbers contradicted each other, ranks would wait for a rank that does not exist.
    """
    rank, size, local_rank, slots, port = map(_number, (*_TORCHRUN[:4], "MASTER_PORT"))
    first = rank - local_rank
    for holds, name, expected in (
        (size >= 1, "WORLD_SIZE", "1 or more"),
        (0 <= rank < size, "RANK", f"from 0 to {size - 1}, since WORLD_SIZE is {size}"),
        (1 <= slots <= size, "LOCAL_WORLD_SIZE", f"from 1 to {size}, since WORLD_SIZE is {size}"),
        (
            0 <= local_rank < slots,
            "LOCAL_RANK",
            f"from 0 to {slots - 1}, since LOCAL_WORLD_SIZE is {slots}",
        ),
        (
            0 <= first <= size - slots,
            "LOCAL_RANK",
            f"the rank's place on its node, whose {slots} ranks follow each other: RANK is {rank} "
            f"and WORLD_SIZE is {size}",
        ),
        (1 <= port <= 65535, "MASTER_PORT", "from 1 to 65535"),
    ):
        if not holds:
            text = f"{name}={os.environ[name]}: it must be {expected}"
            raise InvalidRequest(text, kind="invalid")
    return rank, size, local_rank, slots


def _own_address(master: str, port: int) -> str:
    """Returns this machine's address on the route to the master, where others can reach it."""
    family, _, _, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _store() -> _answers.Store:
    """Returns the part of torchrun's store for the next job."""
    global _torchrun_store
    try:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise NotLaunched(
            "under torchrun, and when init() is called again, ranks connect through PyTorch's "
            "store, but PyTorch is not installed: use gradwire run, and call init() once",
            kind="not-launched",
        ) from None
    within = timedelta(seconds=_timeout())
    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    answers = _answers.Answers(f"the ranks' store at {host}:{port}", within)
    if _torchrun_store is None:
        # As torch's rendezvous, except that rank 0 does not wait here: an error of that wait would
        # not name the missing ranks. Torch uses the same server for its own groups.
        hosts = _number("RANK") == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        _roll.wait_for_address(host, port, within)
        if not hosts:
            _roll.wait_for_store(host, port, within)
        make = functools.partial(TCPStore, wait_for_workers=False, multi_tenant=hosts)
        try:
            store = answers.to(make, host, port, None, hosts, within)
        except NotLaunched:
            raise
        except RuntimeError as error:
            raise _roll.taken(host, port, error, hosts) from None
        _torchrun_store = PrefixStore("gradwire", store)
    _torchrun_store.set_timeout(within)
    return _answers.Store(job_store(_torchrun_store), answers)


def _join_torchrun() -> None:
    rank, size, local_rank, slots = _torchrun_place()
    if os.environ.get("GRADWIRE_SIZE") == str(size):  # of a job that a launcher has started
        _agent.forms_another_job()
    elif size == 1 and (why := _why_not_alone()) is not None:
        raise NotLaunched(f"WORLD_SIZE=1, but {why}", kind="not-launched")
    store = _store()
    first = rank - local_rank
    address = _own_address(os.environ["MASTER_ADDR"], _number("MASTER_PORT"))
    within = timedelta(seconds=_timeout())
    with _roll.Named(store, rank, size, within):
        _roll.come(store, rank)
        if local_rank == 0:
            store.set(f"slots/{first}", str(slots))
        nodes: list[int] = []
        while rank == 0 and sum(nodes) < size:
            nodes.append(int(store.get(f"slots/{sum(nodes)}")))
        form_job("torchrun", store, rank, first, nodes, slots, address, within)


def form_job(
    prefix: str,
    store: Any,
    rank: int,
    first: int,
    nodes: list[int],
    slots: int,
    address: str,
    within: timedelta,
) -> None:
    """Forms a job through a store.

    Each node's ``first`` rank starts its daemon, and the first daemon hosts the coordinator.
    ``nodes`` is each node's number of ranks, needed on rank 0.
    """
    if rank == 0:
        job = _job(prefix)
        name, coordinator = _first_daemon(job, len(nodes), sum(nodes), address, slots)
        store.set("socket/0", name)
        firsts = list(itertools.accumulate(nodes, initial=0))
        _roll.publish(store, {"job": job, "coordinator": coordinator, "firsts": firsts})
    report = _roll.read(store, rank, within)
    if rank == first and rank > 0:
        order = report["firsts"].index(first)
        where = {"GRADWIRE_COORDINATOR": report["coordinator"]}
        name, _ = _daemon(report["job"] | where, address, slots, order)
        store.set(f"socket/{first}", name)
    store.wait([f"socket/{first}"], within)
    set_variables(report["job"], store.get(f"socket/{first}").decode(), rank - first)


# Rank 0 may host the store: it must outlive all readers.
_torchrun_store: Any = None
