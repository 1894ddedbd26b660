"""An invented job behind the real files of the status page, for pictures that are always alike.

The server has the paths of the API of `viewer/src/pages.rs`, and the same content security policy.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from deployed import ROOT

VIEWER = ROOT / "viewer"
PAGES = (VIEWER / "src" / "pages.rs").read_text()
STRAGGLER = 5
SLOTS = 8
FAILURE = {
    "kind": "worker_lost",
    "what": "its process was killed by SIGKILL",
    "lines": [],
    "site": "train.py:31 in step",
    "hint": "the kernel kills processes when memory runs out: see dmesg on the host",
    "rank": 9,
    "host": "node01",
    "tensor": "layer3.weight",
}


def assets() -> dict[str, tuple[str, bytes]]:
    """The files of the page by path, as `pages.rs` lists them."""
    kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    listed = re.findall(r'\("(/assets/[^"]+)", [^,]+, include_str!\("../([^"]+)"\)\)', PAGES)
    assert len(listed) > 8, listed
    return {
        path: (kinds.get(path.rsplit(".", 1)[1], "text/plain"), (VIEWER / file).read_bytes())
        for path, file in listed
    }


def policy() -> str:
    """The content security policy of the page."""
    found = re.search(r'const POLICY: &str = "((?:[^"\\]|\\\s)*)"', PAGES)
    assert found
    return re.sub(r"\\\n\s*", "", found[1])


def rank(number: int) -> dict[str, Any]:
    """The report of one rank: all wait for the straggler."""
    if number == STRAGGLER:
        shares = {"compute": 0.96, "ranks": 0.01, "negotiation": 0.01, "transfer": 0.02}
    else:
        waits = 0.38 + 0.05 * math.sin(number)
        shares = {"ranks": waits, "negotiation": 0.02, "transfer": 0.06}
        shares["compute"] = 1 - sum(shares.values()) - 0.01
    shares["copies"] = max(0.0, 1 - sum(shares.values()))
    return {
        "rank": number,
        "steps": 4210,
        "step_seconds": 0.212,
        "exposed": 1 - shares["compute"],
        "since_step_seconds": 0.05,
        "time": shares,
    }


def node(number: int, hosts: int, *, failed: bool) -> dict[str, Any]:
    """One host with eight ranks."""
    first = number * SLOTS
    peers = {(number + 1) % hosts, (number - 1) % hosts}
    host = f"node{number:02}"
    return {
        "host": host,
        "first_rank": first,
        "ranks": SLOTS,
        "rack": f"rack{number // 8}",
        "health": "failed" if failed and host == FAILURE["host"] else "ok",
        "silent_seconds": 0.2,
        "left_ranks": [],
        "reconnections": 0,
        "report": {
            "age_seconds": 0.4,
            "ranks": [rank(first + at) for at in range(SLOTS)],
            "peers": [
                {
                    "node": peer,
                    "sent_bytes_per_second": 4e8 + 1e7 * number,
                    "received_bytes_per_second": 4e8,
                }
                for peer in peers
            ],
            "line_bytes_per_second": 1_250_000_000,
            "resident_bytes": 900 << 20,
            "shared_bytes": 700 << 20,
            "pieces_in_flight": 4,
            "queued_tensors": 12,
            "stalled_tensors": 0,
            "operations_per_second": 160.0,
        },
    }


def status(hosts: int, *, failed: bool = False) -> dict[str, Any]:
    """The state of a job with eight ranks on each of these hosts."""
    reason = f"the ring is cheapest for {hosts} nodes: 9.8 ms, before halving-doubling"
    choice = {
        "collective": "allreduce",
        "nodes": hosts,
        "pieces": 8,
        "operations": 31_200,
        "reason": reason,
    }
    sizes = [(8 << 20, "ring(segments=4)", 9.8e-3, 10.4e-3), (64 << 10, "circulant", 4e-4, None)]
    return {
        "job": "gw5f2c81d0a9",
        "version": "0.1.0",
        "phase": "failed" if failed else "running",
        "reason": "rank 9 was lost" if failed else f"the world is complete: {hosts} nodes",
        "page": None,
        "epoch": 1,
        "uptime_seconds": 912.5,
        "failure": FAILURE if failed else None,
        "steps_per_second": 4.71,
        "straggler": STRAGGLER,
        "nodes": [node(at, hosts, failed=failed) for at in range(hosts)],
        "operations": {
            "started": 31_204,
            "done": 31_200,
            "running": [
                {
                    "sequence": 31_204,
                    "seconds": 0.021,
                    "tensors": ["layer3.weight"],
                    "tensor_count": 3,
                    "missing_nodes": [0],
                }
            ],
        },
        "pending_count": 1,
        "pending": [
            {
                "process_set": 0,
                "name": "layer2.weight",
                "waiting_seconds": 0.08,
                "missing_ranks": [STRAGGLER],
            }
        ],
        "process_set_count": 1,
        "process_sets": [{"process_set": 0, "ranks": [], "joined_ranks": []}],
        "lags": [
            {"rank": STRAGGLER, "seconds": 350.0, "tensors": 9000, "share": 0.39},
            {"rank": 12, "seconds": 20.0, "tensors": 800, "share": 0.02},
        ],
        "choices": [
            choice
            | {
                "bytes": size,
                "algorithm": spec.split("(")[0],
                "spec": spec,
                "predicted_seconds": predicted,
                "observed_seconds": observed,
            }
            for size, spec, predicted, observed in sizes
        ],
        "decisions": [{"seconds": 2.0, "text": reason}],
        "events": [{"seconds": 1.5, "text": f"the world is complete: {hosts} nodes"}]
        + ([{"seconds": 912.0, "text": "the job failed"}] if failed else []),
    }


def history(hosts: int) -> dict[str, Any]:
    """The last 15 minutes: after ten of them, a rank becomes slow."""
    times = [5.0 * (at + 1) for at in range(180)]
    slow = [max(0.0, min(1.0, (at - 600) / 60)) for at in times]
    wave = [math.sin(at / 9) for at in times]

    def line(base: float, more: float, noise: float) -> list[float]:
        return [base + more * s + noise * w for s, w in zip(slow, wave, strict=True)]

    links = [(at, (at + 1) % hosts) for at in range(min(hosts, 8))]
    return {
        "point_seconds": 5.0,
        "most_points": 180,
        "seconds": times,
        "step_seconds": line(0.13, 0.08, 0.004),
        "blocked": line(0.12, 0.35, 0.01),
        "operations_per_second": line(240, -90, 4),
        "resident_bytes": [round(at) for at in line(29e9, 1e9, 1e8)],
        "shared_bytes": [round(at) for at in line(22e9, 0, 0)],
        "ranks": [
            {"rank": STRAGGLER, "waited": line(0.02, 0.37, 0.01)},
            {"rank": 12, "waited": line(0.03, 0, 0.02)},
        ],
        "links": [
            {"from": a, "to": b, "bytes_per_second": line(5e8 - 2e7 * a, -1.8e8, 1e7)}
            for a, b in links
        ],
    }


def one_rank(number: int) -> dict[str, Any]:
    """What a rank does now."""
    operation = {"name": "layer3.weight", "call": "allreduce", "age_seconds": 0.08}
    frames = ["train.py:81 in augment", "train.py:120 in step", "train.py:164 in <module>"]
    return {
        "rank": number,
        "host": f"node{number // SLOTS:02}",
        "pid": 40_000 + number,
        "doing": "running",
        "cpu": 0.97,
        "kernel_call": None,
        "answered": True,
        "submitted": 31_203,
        "operations": [operation | {"outcome": "in-flight"}, operation | {"outcome": "done"}],
        "stacks": [{"name": "MainThread", "frames": frames}],
    }


class Invented:
    """A server for the page of the invented job."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.failed = threading.Event()


@contextlib.contextmanager
def serving(hosts: int) -> Iterator[Invented]:
    """Serves the page. It shows a failed job once `failed` is set."""
    files, headers = assets(), {"Content-Security-Policy": policy()}
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def answer(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            for name, value in ({"Content-Type": kind} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def event(self, name: str, data: dict[str, Any]) -> None:
            self.wfile.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())

        def watch(self) -> None:
            self.answer("text/event-stream", b"")
            while not over.is_set() and not invented.failed.wait(0.5):
                self.event("status", status(hosts))
            self.event("status", status(hosts, failed=invented.failed.is_set()))
            self.event("end", {"reason": "the job is over"})

        def do_GET(self) -> None:
            if self.path == "/":
                page = (VIEWER / "assets" / "page.html").read_bytes()
                self.answer("text/html; charset=utf-8", page)
            elif self.path in files:
                self.answer(*files[self.path])
            elif self.path == "/api/v1/watch":
                with contextlib.suppress(ConnectionError):
                    self.watch()
            elif self.path == "/api/v1/history":
                self.answer("application/json", json.dumps(history(hosts)).encode())
            elif found := re.fullmatch(r"/api/v1/ranks/(\d+)", self.path):
                self.answer("application/json", json.dumps(one_rank(int(found[1]))).encode())
            else:
                self.send_error(404)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    invented = Invented(f"http://127.0.0.1:{server.server_port}/")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield invented
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()
