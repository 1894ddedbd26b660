#!/usr/bin/env python3
"""`make bench-frameworks`: the exchange of ResNet-50's gradients from each framework, in ordinary
memory, beside the framework's own ways: 20 minutes.

    lab/benchmarks/frameworks.py                        four ranks on one node, and two nodes of two
    lab/benchmarks/frameworks.py --hosts 1x4 --only jax

The ways of a framework take turns in the same processes (`framework_rank.py`), and the frameworks
are started in turn. The cost of an exchange is the difference between a step with it and the same
step without any exchange, round by round. For trainers whole steps are compared, because they use
the same exchange as PyTorch's own class.
"""

import argparse
import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from figures import MIN_ROUNDS, Figure, figure, time_text
from install import ROOT
from machine import Noise, describe, noise_text
from net import Network, machine_congestion_control, may_make_namespaces, network, sweep_stale
from plan import GBIT, Scenario
from shell import Process, Trouble, run_job, say

RANK = Path(__file__).resolve().with_name("framework_rank.py")
ENVIRONMENTS = {
    "torch": ".venv-python",
    "tensorflow": ".venv-tensorflow",
    "jax": ".venv-jax",
    "trainers": ".venv-trainers",
}
# A job that takes longer counts as hung.
JOB_SECONDS = 600


@dataclass
class Layout:
    """The measurements on one layout of ranks: for each framework and way, the median of each round
    in microseconds."""

    title: str
    rounds: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, said: dict[str, object]) -> None:
        """Adds the output of a job."""
        times = said["times_us"]
        assert isinstance(times, dict)
        ways = self.rounds.setdefault(str(said["kind"]), {})
        for way, rows in times.items():
            ways.setdefault(way, []).extend(median(row) for row in rows)

    def exchange(self, framework: str, way: str) -> Figure:
        """Returns the time that the exchange adds to a step."""
        ways = self.rounds[framework]
        pairs = zip(ways[way], ways["compute"], strict=True)
        return figure([max(with_it - without, 1.0) for with_it, without in pairs])

    def step(self, framework: str, way: str) -> Figure:
        """Returns the time of a whole step."""
        return figure(self.rounds[framework][way])

    def lines(self) -> list[str]:
        """Returns the tables in Markdown."""
        lines = ["", f"## {self.title}", ""]
        lines += [
            "| framework | exchange | step | ÷ `gradwire.torch` |",
            "| --- | --: | --: | --: |",
        ]
        base = self.exchange("torch", "gradwire").median if "torch" in self.rounds else None
        for framework, ways in self.rounds.items():
            for way in ways:
                if way == "compute":
                    continue
                step = self.step(framework, way)
                if framework == "trainers":
                    plain = self.step(framework, "gradwire").median
                    name = "plain DDP over the backend" if way == "gradwire" else way
                    cells = [name, "", time_text(step.median), ""]
                    cells[1] = "" if way == "gradwire" else f"{step.median / plain:.3f} of its step"
                else:
                    cost = self.exchange(framework, way)
                    own = self.exchange(framework, "gradwire").median
                    name = framework if way == "gradwire" else f"{framework}: {way}"
                    spread = f"{time_text(cost.median)} ±{cost.spread / 2:.0%}"
                    if way != "gradwire":
                        spread += f" (Gradwire: {own / cost.median:.2f} of it)"
                    share = "" if base is None else f"{cost.median / base:.2f}"
                    cells = [name, spread, time_text(step.median), share]
                lines.append(f"| {' | '.join(cells)} |")
        return lines


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default="1x4,2x2", help="layouts, NODESxRANKS [%(default)s]")
    parser.add_argument("--rate", type=float, default=10, help="in Gbit/s [%(default)s]")
    parser.add_argument("--only", default=",".join(ENVIRONMENTS), help="[%(default)s]")
    parser.add_argument("--jobs", type=int, default=MIN_ROUNDS, help="jobs of each [%(default)s]")
    parser.add_argument("--rounds", type=int, default=2, help="rounds in a job [%(default)s]")
    parser.add_argument("--steps", type=int, default=4, help="steps in a round [%(default)s]")
    parser.add_argument(
        "--package", type=Path, default=ROOT / "target" / "bench-torch", help="the wheel's folder"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results")
    chosen = parser.parse_args()
    if chosen.jobs * chosen.rounds < MIN_ROUNDS:
        parser.error(f"fewer than {MIN_ROUNDS} rounds can't be distinguished from noise")
    unknown = set(chosen.only.split(",")) - set(ENVIRONMENTS)
    if unknown:
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}")
    if not all(re.fullmatch(r"[1-9]\d*x[1-9]\d*", layout) for layout in chosen.hosts.split(",")):
        parser.error(f"--hosts {chosen.hosts}: expected nodes x ranks per node, such as 1x4,2x2")
    return chosen


def process(
    chosen: argparse.Namespace, net: Network, scenario: Scenario, framework: str
) -> Process:
    """Returns the launcher with the program of the ranks."""
    gradwire = chosen.package / "bin" / "gradwire"
    words = [str(gradwire), "run", "-np", str(scenario.ranks)]
    if scenario.nodes > 1:
        hosts = ",".join(f"{node.address}:{scenario.ranks_per_node}" for node in net.nodes)
        words += ["--hosts", hosts, "--set", f"launch.ssh={net.remote_shell}"]
        words += ["--set", f"launch.remote_gradwire={gradwire}"]
    python = ROOT / ENVIRONMENTS[framework] / "bin" / "python"
    program = [str(python), "-W", "ignore", str(RANK), "--framework", framework]
    program += ["--rounds", str(chosen.rounds), "--steps", str(chosen.steps)]
    environment = {
        "PYTHONPATH": str(chosen.package),
        "GLOO_SOCKET_IFNAME": net.nodes[0].device,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "KERAS_BACKEND": "tensorflow" if framework == "tensorflow" else "jax",
    }
    return Process(net.nodes[0].inside([*words, "--", *program]), environment)


def measure(chosen: argparse.Namespace, layout: str, namespaces: bool, noise: Noise) -> Layout:
    """Measures one layout of ranks."""
    nodes, each = map(int, layout.split("x"))
    where = f"one node, {each} ranks"
    if nodes > 1:
        where = f"{nodes} nodes × {each} ranks, {chosen.rate:g} Gbit/s"
    rate = round(chosen.rate * GBIT) if nodes > 1 else None
    scenario = Scenario(layout, where, nodes, each, (), rate=rate)
    result = Layout(where)
    frameworks = [name for name in ENVIRONMENTS if name in chosen.only.split(",")]
    frameworks = [name for name in frameworks if (ROOT / ENVIRONMENTS[name]).exists()]
    # JAX's Gloo looks up the name of its host, which a namespace need not have.
    with network(scenario, namespaces and nodes > 1) as net:
        net.congestion_control(machine_congestion_control())
        for job in range(chosen.jobs):
            for framework in frameworks if job % 2 == 0 else frameworks[::-1]:
                say(f"{where}: {framework}, job {job + 1} of {chosen.jobs}")
                noise.probe()
                said = run_job([process(chosen, net, scenario, framework)], JOB_SECONDS)
                found = re.findall(r"\{.*\}", said)
                if not found:
                    raise Trouble(f"{framework}: no figures: {said[-2000:]}")
                result.add(json.loads(found[-1]))
    return result


def main() -> int:
    """Runs the benchmark."""
    chosen = arguments()
    try:
        if not os.access(chosen.package / "bin" / "gradwire", os.X_OK):
            raise Trouble(f"{chosen.package} has no Gradwire: create it with make bench-frameworks")
        refusal = may_make_namespaces()
        if refusal is None:
            sweep_stale()
        noise, results = Noise(), list[Layout]()
        for layout in chosen.hosts.split(","):
            if refusal is not None and not layout.startswith("1x"):
                say(f"{layout} is left out: {refusal}")
                continue
            results.append(measure(chosen, layout, refusal is None, noise))
        machine = describe()
        lines = ["# The exchange of ResNet-50's gradients from each framework", ""]
        lines.append("- Machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()))
        lines.append(f"- Noise: {noise_text(noise.summary())}")
        for result in results:
            lines += result.lines()
        text = "\n".join(lines) + "\n"
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "frameworks.md").write_text(text)
        print(text)
    except Trouble as trouble:
        print(f"bench-frameworks: {trouble}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
