#!/usr/bin/env python3
"""`make bench`: Gradwire and its peers side by side, in one run.

    lab/benchmarks/run.py            everything, in less than half an hour on two cores
    lab/benchmarks/run.py --quick    the most informative part, in less than five minutes
    lab/benchmarks/run.py --targets  the targets, and whether they are met, in a quarter of an hour
    lab/benchmarks/run.py --overhead --base v0.1
                                 the cost of observing a job, compared with an older release

It installs the peers with their package managers, runs them and Gradwire in turn on the same sizes,
ranks and links, and writes tables, JSON and a plot to `bench-results/`. Installing takes additional
time, once.
"""

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

import install
import overhead
import plan
import resources
import targets
import verdicts
from figures import MIN_ROUNDS
from machine import Noise, describe
from measure import Bench, Result
from net import may_make_namespaces, sweep_stale
from report import as_json, as_markdown
from shell import Trouble, call, say

TABLE, TARGETS, DATA = "table.md", "targets.md", "results.json"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="fewer sizes, links and peers")
    kind.add_argument(
        "--targets",
        action="store_true",
        help="only the measurements for the targets, each with its verdict",
    )
    kind.add_argument(
        "--overhead", action="store_true", help="the cost of observing a job; no peers"
    )
    parser.add_argument(
        "--base",
        default="HEAD~1",
        metavar="REVISION",
        help="for --overhead: the older release, as a git revision [%(default)s]",
    )
    parser.add_argument(
        "--rounds", type=int, default=MIN_ROUNDS, help="how often each system runs [%(default)s]"
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="only scenarios whose name matches"
    )
    parser.add_argument(
        "--add",
        action="store_true",
        help="for --overhead: add rounds to those in the folder, to divide a run",
    )
    parser.add_argument("--list", action="store_true", help="list the scenarios without measuring")
    parser.add_argument(
        "--out", type=Path, default=install.ROOT / "bench-results", help="the folder for results"
    )
    chosen = parser.parse_args()
    if chosen.rounds < MIN_ROUNDS and not chosen.add:
        parser.error(
            f"--rounds {chosen.rounds}: fewer than {MIN_ROUNDS} can't be distinguished from noise"
        )
    try:
        re.compile(chosen.only)
    except re.error as error:
        parser.error(f"--only {chosen.only}: {error}")
    return chosen


def scenarios(chosen: argparse.Namespace) -> list[plan.Scenario]:
    """Returns the scenarios selected on the command line."""
    every = plan.quick() if chosen.quick else plan.for_targets() if chosen.targets else plan.full()
    found = [scenario for scenario in every if re.search(chosen.only, scenario.name)]
    if not found:
        names = ", ".join(scenario.name for scenario in every)
        raise Trouble(f"--only {chosen.only} matches none of {names}")
    return found


def measure(chosen: argparse.Namespace, planned: list[plan.Scenario], folder: Path) -> int:
    """Installs, measures and writes; returns the exit code."""
    tools = install.prepare(every=not chosen.quick)
    refusal = may_make_namespaces()
    if refusal is None:
        sweep_stale()
    else:
        say(
            f"{refusal}: only one node is measured, and all systems use the machine's "
            "congestion control"
        )
        tools.missing["more than one node"] = refusal
        planned = [scenario for scenario in planned if scenario.nodes == 1]
    noise = Noise()
    bench = Bench(
        tools=tools,
        rounds=chosen.rounds,
        seconds=0.6 if chosen.quick or chosen.targets else 1.0,
        namespaces=refusal is None,
        try_setups=not chosen.quick,
        folder=folder,
        noise=noise,
    )
    began, results = time.monotonic(), list[Result]()
    head: dict[str, object] = {}
    for scenario in planned:
        try:
            results.append(bench.scenario(scenario))
        except Trouble as trouble:
            say(f"{scenario.title} is left out: {trouble}")
            tools.missing[scenario.title] = str(trouble)
            continue
        # Written after each scenario, so that an interrupted run keeps its measurements.
        head = {
            "machine": describe(),
            "noise": noise.summary(),
            "versions": tools.versions,
            "missing": tools.missing,
            "rounds": chosen.rounds,
            "seconds": round(time.monotonic() - began),
        }
        write(chosen.out, head, results, None)
    if not results:
        raise Trouble("nothing could be measured")
    print((chosen.out / TABLE).read_text())
    if chosen.targets:
        watched = watch(tools, folder)
        head |= {"noise": noise.summary(), "seconds": round(time.monotonic() - began)}
        write(chosen.out, head, results, watched)
        print((chosen.out / TARGETS).read_text())
    plot(chosen.out)
    say(f"took {time.monotonic() - began:.0f} s; the results are in {chosen.out}")
    failed = [outcome for result in results for outcome in result.outcomes if outcome.trouble]
    return 1 if any(outcome.system.ours for outcome in failed) else 0


def watch(tools: install.Tools, folder: Path) -> dict[str, object] | None:
    """Measures the resources of a job."""
    say("measuring the resources of a job")
    try:
        return resources.watch(tools, folder)
    except Trouble as trouble:
        say(f"resources are left out: {trouble}")
        tools.missing["resources"] = str(trouble)
        return None


def write(
    out: Path, head: dict[str, object], results: list[Result], watched: dict[str, object] | None
) -> None:
    """Writes the tables and the JSON; the targets are compared with all measurements."""
    out.mkdir(parents=True, exist_ok=True)
    (out / TABLE).write_text(as_markdown(head, results))
    judgements = targets.judge(results)
    document = as_json(head, results) | {
        "targets": verdicts.as_json(judgements),
        "resources": watched,
    }
    (out / DATA).write_text(json.dumps(document, indent=1) + "\n")
    noise = head["noise"]
    assert isinstance(noise, dict)
    (out / TARGETS).write_text(verdicts.as_markdown(judgements, watched, noise))


def plot(out: Path) -> None:
    """Draws the plot of the results."""
    try:
        install.plot_library()
        call(
            [
                install.PYTHON,
                install.HERE / "plot.py",
                out / DATA,
                out / "bandwidth.svg",
                out / "bandwidth.png",
            ],
            120,
        )
    except Trouble as trouble:
        say(f"the plot is left out: {trouble}")


def stopped(number: int, _: FrameType | None) -> NoReturn:
    """Ends the run and reports that: a missing table must not look like one that was not
    requested."""
    say(f"stopped by {signal.Signals(number).name}; finished scenarios are in the results folder")
    sys.exit(128 + number)


def main() -> int:
    """Runs the benchmark and always cleans up (CLEAN)."""
    chosen = arguments()
    signal.signal(signal.SIGTERM, stopped)
    signal.signal(signal.SIGINT, stopped)
    try:
        if chosen.overhead:
            with tempfile.TemporaryDirectory(prefix="gwb") as folder:
                choice = overhead.Choice(
                    chosen.base, chosen.rounds, chosen.only, chosen.add, chosen.out
                )
                return overhead.main(choice, Path(folder))
        planned = scenarios(chosen)
        if chosen.list:
            print("\n".join(f"{scenario.name:12} {scenario.title}" for scenario in planned))
            return 0
        with tempfile.TemporaryDirectory(prefix="gwb") as folder:
            return measure(chosen, planned, Path(folder))
    except Trouble as trouble:
        print(f"bench: {trouble}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
