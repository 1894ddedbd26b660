"""The daemon's metrics of this rank."""

from __future__ import annotations

import os
import urllib.request

import gradwire

ADDRESS = os.environ.get("GRADWIRE_DAEMON_METRICS", "")


def steps() -> int:
    """Returns this rank's number of steps."""
    with urllib.request.urlopen(f"http://{ADDRESS}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    own = f'rank="{gradwire.rank()}"'
    lines = [line for line in text.splitlines() if line.startswith("gradwire_daemon_rank_steps")]
    [value] = [line.rpartition(" ")[2] for line in lines if own in line]
    return int(float(value))
