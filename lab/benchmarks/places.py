"""The places where algorithms are compared: nodes on slow links, and how to run the program there.

The rates are so low that the lines are the limit, not the processors. Eight nodes at 10 Gbit/s
would measure the processors.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from net import Network, Node, network
from plan import GBIT, Scenario
from shell import Process, call, end, run_job

# The time limit of one run.
SECONDS = 300

COORDINATOR_PORT = 29400


@dataclass(frozen=True)
class Place:
    """Nodes, their racks, and the rate of each node's link. An uplink has a quarter of the combined
    rate of its rack's nodes."""

    nodes: int
    rate: float
    racks: int = 1

    @property
    def name(self) -> str:
        """Returns its name in tables."""
        racks = f" in {self.racks} racks" if self.racks > 1 else ""
        return f"{self.nodes} nodes{racks}, {self.rate:g} Gbit/s"

    @property
    def scenario(self) -> Scenario:
        """Returns the links."""
        rate = int(self.rate * GBIT)
        return Scenario(self.name, self.name, self.nodes, 1, (), rate=rate, racks=self.racks)


PLACES = (
    Place(2, 0.2),
    Place(4, 0.2),
    Place(8, 0.2),
    Place(2, 1),
    Place(4, 1),
    Place(8, 1),
    Place(2, 10),
    Place(4, 1, racks=2),
    Place(8, 1, racks=2),
)


def is_wanted(name: str, only: str) -> bool:
    """Returns whether a name contains one of the texts in `only`, separated by `;`. Every name
    contains the empty text."""
    return any(text.strip() in name for text in only.split(";"))


@dataclass
class Site:
    """A place while its links exist, and a folder for files."""

    net: Network
    folder: Path
    gradwire: Path
    at: list[str] = field(default_factory=list)

    def run(self, *words: str) -> None:
        """Runs the program on the first node, as a job with one rank per node."""
        own = [str(self.gradwire), *words, *self.at]
        run_job([Process(self.net.nodes[0].inside(own))], SECONDS)

    def probe(self) -> Path:
        """Measures the links. Returns the file that describes the cluster."""
        cluster = self.folder / "cluster.toml"
        self.run("probe", "--out", str(cluster))
        return cluster

    def watched_bench(self, *words: str) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
        """Measures a collective. Returns the rows of its table, and the last description of the
        coordinator's choices (`gradwire explain --json`)."""
        said = self.folder / "said.json"
        said.unlink(missing_ok=True)
        node = self.net.nodes[0]
        address = f"{node.address}:{COORDINATOR_PORT}"
        loop = 'while :; do "$0" explain --json "$1" >"$2.new" && mv "$2.new" "$2"; sleep 0.2; done'
        words = (*words, "--set", f"coordinator.listen={address}")
        watch = node.inside(["sh", "-c", loop, str(self.gradwire), address, str(said)])
        # It fails until there is a job.
        with subprocess.Popen(
            watch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        ) as watcher:
            try:
                rows = self.bench(*words)
            finally:
                end([watcher])
        return rows, list(json.loads(said.read_text())["choices"]) if said.exists() else []

    def bench(self, *words: str) -> list[dict[str, float]]:
        """Measures a collective. Returns the rows of its table."""
        answer = self.folder / "answer.json"
        self.run("bench", *words, "--json", str(answer))
        return list(json.loads(answer.read_text())["rows"])


@contextmanager
def site(place: Place, gradwire: Path, folder: Path) -> Iterator[Site]:
    """Makes the links of a place, which exist until the block ends."""
    with network(place.scenario, True) as net:
        hosts = folder / "hosts"
        hosts.write_text(hosts_text(place, net.nodes))
        at = ["--hostfile", str(hosts), "--set", f"launch.ssh={net.remote_shell}"]
        at += ["--set", f"launch.remote_gradwire={gradwire}"]
        yield Site(net, folder, gradwire, at)


def hosts_text(place: Place, nodes: list[Node]) -> str:
    """Returns the hostfile, with racks."""
    racks = (at * place.racks // place.nodes for at in range(place.nodes))
    lines = zip(nodes, racks, strict=True)
    return "".join(f"{node.address} slots=1 rack=r{rack}\n" for node, rack in lines)


def allreduces(gradwire: Path, nodes: int) -> list[str]:
    """Returns every algorithm for an allreduce between `nodes` nodes."""
    words = [str(gradwire), "algorithms", "--nodes", str(nodes), "--json"]
    return [row["algorithm"] for row in json.loads(call(words))["schedules"]]
