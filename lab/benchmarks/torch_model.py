#!/usr/bin/env python3
"""`make bench-torch`: a training step in PyTorch with each way to exchange the gradients of
ResNet-50.

    lab/benchmarks/torch_model.py                        four ranks and two, on one node: 15 minutes
    lab/benchmarks/torch_model.py --hosts 2x2 --rate 1   two nodes of two ranks, joined by 1 Gbit/s

The ways take turns in the same processes (`torch_rank.py`). The processes are started several
times, with the order of setups reversed each time: with defaults, and tuned (TCP with reno, a
malloc that keeps large blocks), equally for all ways. The cost of an exchange is the difference
between the step's time and that of the same step without any exchange. With a backward pass that
only hands out gradients, this is the whole exchange. With the real network, it is the part that the
backward pass does not hide; one minus the quotient of the two is the overlap.
"""

import argparse
import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from figures import MIN_ROUNDS, Figure, Verdict, figure, time_text, verdict
from install import ROOT
from machine import Noise, describe, is_quiet, noise_text
from net import Network, machine_congestion_control, may_make_namespaces, network, sweep_stale
from plan import GBIT, Scenario
from shell import Process, Trouble, call, run_job, say
from systems import MALLOC, TUNED_CONGESTION_CONTROL

RANK = Path(__file__).resolve().with_name("torch_rank.py")
WAYS = {
    "compute": "no exchange",
    "ddp": "DDP without an exchange",
    "gloo": "DDP over Gloo, views of buckets",
    "gloo-copied": "DDP over Gloo",
    "optimizer": "`DistributedOptimizer`",
    "optimizer-new": "`DistributedOptimizer`, `model.zero_grad()`",
    "backend": "DDP over `gradwire`",
    "hook": "DDP with `ddp_hook`",
}
CALLS = {"gloo": "Gloo", "backend": "`gradwire` backend", "allreduce_": "`allreduce_`"}
KINDS = {
    "latency": "`all_reduce` of one element, blocking",
    "none": "a backward pass that only hands out the gradients: the exchange by itself",
    "resnet50": "the real network",
}
PEERS = ("gloo", "gloo-copied")
# A job that takes longer counts as hung.
JOB_SECONDS = 900


@dataclass
class Table:
    """The measurements of one kind of step: for each way, the median of each round in
    microseconds."""

    rounds: dict[str, list[float]] = field(default_factory=dict)
    # The processor time of all ranks and daemons in a step.
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def add(self, said: dict[str, object]) -> None:
        """Adds the output of a job."""
        times, cpu = said["times_us"], said.get("cpu_us", {})
        assert isinstance(times, dict) and isinstance(cpu, dict)
        for way, rows in times.items():
            self.rounds.setdefault(way, []).extend(median(row) for row in rows)
        for way, used in cpu.items():
            self.cpu.setdefault(way, []).append(used)

    def exchange(self, way: str) -> Figure:
        """Returns the time that the exchange adds to a step, round by round."""
        pairs = zip(self.rounds[way], self.rounds["compute"], strict=True)
        return figure([max(with_it - without, 1.0) for with_it, without in pairs])

    def best_peer(self) -> str | None:
        """Returns the way that Gradwire is compared with: the faster one of Gloo."""
        peers = [way for way in PEERS if way in self.rounds]
        return min(peers, key=lambda way: self.exchange(way).median) if peers else None


def overlap(hidden: Table, bare: Table, way: str) -> float:
    """Returns the part of an exchange that a backward pass hides; less than 0 if the pass makes it
    longer."""
    return 1 - hidden.exchange(way).median / bare.exchange(way).median


def spread(value: Figure) -> str:
    """Returns a figure as text."""
    return f"{time_text(value.median)} ±{value.spread / 2:.0%}"


def against(ours: Figure, theirs: Figure, quiet: bool) -> str:
    """Returns our time relative to a peer's, with a verdict if the noise allows it."""
    text = f"{ours.median / theirs.median:.2f}"
    found = verdict(ours, theirs)
    if not quiet:
        return text
    return f"{text} ({found.value})" if found is Verdict.NOISE else f"**{text}** {found.value}"


def row(cells: list[str]) -> str:
    """Returns a line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def latency_lines(table: Table, quiet: bool) -> list[str]:
    """Returns the table of blocking calls."""
    lines = [row(["call", "time", "÷ Gloo's"]), "| --- | --: | --: |"]
    for name, rounds in table.rounds.items():
        mine, theirs = figure(rounds), figure(table.rounds["gloo"])
        lines.append(
            row([CALLS[name], spread(mine), "" if name == "gloo" else against(mine, theirs, quiet)])
        )
    return lines


def step_lines(table: Table, bare: Table | None, quiet: bool) -> list[str]:
    """Returns the table of steps; `bare` has the same without arithmetic, to compute the hidden
    part."""
    peer = table.best_peer()
    titles = ["way", "step", "exchange", f"÷ {WAYS[peer]}" if peer else "–", "processor time"]
    titles += ["hidden"] if bare else []
    lines = [row(titles), row(["---", *("--:" for _ in titles[1:])])]
    for way, rounds in table.rounds.items():
        cells = [WAYS[way], spread(figure(rounds))]
        if way == "compute":
            cells += ["", ""]
        else:
            mine = table.exchange(way)
            cells += [
                spread(mine),
                "" if peer in (None, way) else against(mine, table.exchange(str(peer)), quiet),
            ]
        cells.append(time_text(median(table.cpu[way])))
        if bare:
            cells.append("" if way == "compute" else f"{overlap(table, bare, way):.0%}")
        lines.append(row(cells))
    return lines


@dataclass
class Result:
    """The results of one layout of ranks with one setup."""

    title: str
    tables: dict[str, Table] = field(default_factory=dict)

    def add(self, said: dict[str, object]) -> None:
        """Adds the output of a job."""
        self.tables.setdefault(str(said["kind"]), Table()).add(said)

    def lines(self, quiet: bool) -> list[str]:
        """Returns its tables."""
        lines = ["", f"## {self.title}"]
        for kind, table in self.tables.items():
            lines += ["", f"{KINDS[kind][0].upper()}{KINDS[kind][1:]}:", ""]
            bare = self.tables.get("none") if kind == "resnet50" else None
            lines += (
                latency_lines(table, quiet) if kind == "latency" else step_lines(table, bare, quiet)
            )
        return lines


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hosts", default="1x4,1x2", help="layouts, NODESxRANKS each [%(default)s]"
    )
    parser.add_argument(
        "--rate", type=float, help="of the link between nodes, in Gbit/s [unlimited]"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=MIN_ROUNDS,
        help="how often the ranks are started [%(default)s]",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds in each job [%(default)s]")
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of each way in a round [%(default)s]"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="[%(default)s]")
    parser.add_argument("--ways", default=",".join(WAYS), help="[%(default)s]")
    parser.add_argument("--setups", default="tuned,plain", help="[%(default)s]")
    parser.add_argument("--batch", type=int, default=2, help="pictures on each rank [%(default)s]")
    parser.add_argument(
        "--pixels", type=int, default=64, help="their height and width [%(default)s]"
    )
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-python" / "bin" / "python")
    parser.add_argument(
        "--package", type=Path, default=ROOT / "target" / "bench-torch", help="the wheel's folder"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench-results", help="the folder for results"
    )
    chosen = parser.parse_args()
    if chosen.jobs * chosen.rounds < MIN_ROUNDS:
        parser.error(f"fewer than {MIN_ROUNDS} rounds can't be distinguished from noise")
    for name, known in (("kinds", KINDS), ("ways", WAYS), ("setups", {"tuned", "plain"})):
        unknown = set(getattr(chosen, name).split(",")) - set(known)
        if unknown:
            wrong, choices = ", ".join(sorted(unknown)), ", ".join(known)
            parser.error(f"--{name}: unknown {wrong}; choose from {choices}")
    if not all(re.fullmatch(r"[1-9]\d*x[1-9]\d*", layout) for layout in chosen.hosts.split(",")):
        parser.error(f"--hosts {chosen.hosts}: expected nodes x ranks per node, such as 1x4,2x2")
    return chosen


def process(chosen: argparse.Namespace, net: Network, scenario: Scenario, setup: str) -> Process:
    """Returns the launcher with the program of the ranks."""
    gradwire = chosen.package / "bin" / "gradwire"
    words = [str(gradwire), "run", "-np", str(scenario.ranks)]
    environment = {"PYTHONPATH": str(chosen.package), "GLOO_SOCKET_IFNAME": net.nodes[0].device}
    if setup == "tuned":
        environment |= MALLOC
    program = [str(chosen.python), "-W", "ignore", str(RANK)]
    for name in ("kinds", "ways", "rounds", "steps", "batch", "pixels"):
        program += [f"--{name}", str(getattr(chosen, name))]
    if scenario.nodes > 1:
        hosts = ",".join(f"{node.address}:{scenario.ranks_per_node}" for node in net.nodes)
        words += ["--hosts", hosts, "--set", f"launch.ssh={net.remote_shell}"]
        words += ["--set", f"launch.remote_gradwire={gradwire}"]
    return Process(net.nodes[0].inside([*words, "--", *program]), environment)


def measure(
    chosen: argparse.Namespace, layout: str, namespaces: bool, noise: Noise
) -> list[Result]:
    """Measures one layout of ranks in all setups, in turn."""
    nodes, each = map(int, layout.split("x"))
    rate = round(chosen.rate * GBIT) if chosen.rate else None
    where = f"{each} ranks" if nodes == 1 else f"{nodes} nodes × {each} ranks"
    if nodes == 1:
        where = f"one node, {where}"
    elif rate:
        where += f", {chosen.rate:g} Gbit/s"
    scenario = Scenario(layout, where, nodes, each, (), rate=rate)
    setups = chosen.setups.split(",")
    titles = {"tuned": "tuned", "plain": "default"}
    results = {setup: Result(f"{where}, {titles[setup]}") for setup in setups}
    with network(scenario, namespaces) as net:
        for job in range(chosen.jobs):
            for setup in setups if job % 2 == 0 else reversed(setups):
                say(f"{results[setup].title}: job {job + 1} of {chosen.jobs}")
                noise.probe()
                net.congestion_control(
                    TUNED_CONGESTION_CONTROL if setup == "tuned" else machine_congestion_control()
                )
                said = run_job([process(chosen, net, scenario, setup)], JOB_SECONDS)
                for line in said.splitlines():
                    found = re.search(r"\{.*\}", line)
                    if found:
                        results[setup].add(json.loads(found[0]))
    return list(results.values())


def report(chosen: argparse.Namespace, noise: Noise, results: list[Result]) -> str:
    """Returns the report in Markdown; writes the figures as JSON, too."""
    torch = call([chosen.python, "-c", "import torch; print(torch.__version__)"]).strip()
    gradwire = call([chosen.package / "bin" / "gradwire", "--version"]).strip()
    summary, machine = noise.summary(), describe()
    lines = ["# A step of ResNet-50 in PyTorch", ""]
    lines.append("- Machine: " + ", ".join(f"{name} {value}" for name, value in machine.items()))
    lines.append(f"- Versions: PyTorch {torch}, {gradwire}")
    lines.append(f"- Noise: {noise_text(summary)}")
    lines.append(
        f"- {chosen.jobs} jobs of {chosen.rounds} rounds with the ways in turn, {chosen.steps} "
        "steps each; 161 float32 "
        f"tensors, 97.5 MiB; the real network has {chosen.batch} pictures of {chosen.pixels} × "
        f"{chosen.pixels} on each "
        "rank; times are the slowest rank's, the median of the rounds' medians, ± half the range "
        "that the rounds may "
        "as well have been in; every round's gradients are checked"
    )
    for result in results:
        lines += result.lines(is_quiet(summary))
    chosen.out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines) + "\n"
    (chosen.out / "torch.md").write_text(text)
    figures = {
        result.title: {kind: vars(table) for kind, table in result.tables.items()}
        for result in results
    }
    data = {
        "machine": machine,
        "noise": summary,
        "torch": torch,
        "gradwire": gradwire,
        "us": figures,
    }
    (chosen.out / "torch.json").write_text(json.dumps(data, indent=1) + "\n")
    return text


def main() -> int:
    """Runs the benchmark."""
    chosen = arguments()
    try:
        for needed in (chosen.python, chosen.package / "bin" / "gradwire"):
            if not os.access(needed, os.X_OK):
                raise Trouble(f"{needed} does not exist: create it with make bench-torch")
        refusal = may_make_namespaces()
        if refusal is None:
            sweep_stale()
        else:
            say(f"{refusal}: only one node is measured, with the machine's own congestion control")
        noise, results = Noise(), list[Result]()
        for layout in chosen.hosts.split(","):
            if refusal is not None and not layout.startswith("1x"):
                say(f"{layout} is left out: {refusal}")
                continue
            results += measure(chosen, layout, refusal is None, noise)
            if results:
                text = report(chosen, noise, results)
        if not results:
            raise Trouble("nothing could be measured")
        print(text)
    except Trouble as trouble:
        print(f"bench-torch: {trouble}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
