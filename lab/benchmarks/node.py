#!/usr/bin/env python3
"""`make bench-node`: all_reduce on all cores of one machine, beside Gloo and Open MPI.

    scripts/bench_node.sh python/dist/gradwire-*.whl --out results   5 minutes at most on 16 cores
    scripts/bench_node.sh python/dist/gradwire-*.whl --small         a small rehearsal

2, 4, 8, 16 … ranks call all_reduce from Python, one job for each system. The last column is a plain
program: as many threads as there are cores sum as many arrays as there are ranks, and write the sum
to all of them. A system that is not installed has no column: Open MPI needs `mpirun` and mpi4py,
the plain program a C compiler. With a GPU, there is a second table for tensors on it.

The wheel is installed in a fresh virtual environment on top of this Python's packages. The results
are in `node.json` and, as a table, in `node.md`. The exit code is 1 if a job failed.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import time_text
from gpu_check import check_torch, install, machine
from plan import size_text
from shell import Process, Trouble, call, run_job, say
from torch_model import row

HERE = Path(__file__).resolve().parent
SIZES = [4, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
SMALL_SIZES = [4, 64 << 10, 2 << 20]
# The least size for which the plain program says something: below, its threads only wait.
LEAST_PLAIN = 64 << 10
NAMES = {"gradwire": "Gradwire", "gloo": "Gloo", "mpi": "Open MPI", "plain": "plain program"}
# With more ranks, a GPU has little to do with the time.
CUDA_RANKS = (2, 4)
# A part of the memory that the arrays of all ranks may take, with their copies in shared memory.
MEMORY_SHARE = 0.25
COMPILE = ["-O3", "-march=native", "-pthread"]


@dataclass
class Cell:
    """What one system took with a number of ranks on a device."""

    device: str
    ranks: int
    system: str
    # Microseconds by size.
    us: dict[int, float]
    failure: str | None = None


def rank_counts(cores: int) -> list[int]:
    """Returns the numbers of ranks: powers of two up to the cores, and at least two."""
    return [1 << power for power in range(1, max(2, cores.bit_length()))]


def fitting(sizes: list[int], ranks: int, memory: float) -> list[int]:
    """Returns the sizes whose arrays fit the machine's memory."""
    return [nbytes for nbytes in sizes if ranks * nbytes <= MEMORY_SHARE * memory]


def table(cells: list[Cell], device: str) -> list[str]:
    """Returns the lines of a table; the fastest system of a row is bold."""
    here = [cell for cell in cells if cell.device == device]
    systems = [name for name in NAMES if any(cell.system == name for cell in here)]
    lines = [row(["ranks", "bytes", *(NAMES[name] for name in systems)])]
    lines += [f"| --: | --: |{' --: |' * len(systems)}"]
    for ranks in sorted({cell.ranks for cell in here}):
        found = {cell.system: cell for cell in here if cell.ranks == ranks}
        for nbytes in sorted({size for cell in found.values() for size in cell.us}):
            times = {name: cell.us[nbytes] for name, cell in found.items() if nbytes in cell.us}
            best = min((us for name, us in times.items() if name != "plain"), default=0.0)
            words = []
            for name in systems:
                text = time_text(times[name]) if name in times else "–"
                words.append(f"**{text}**" if name != "plain" and times.get(name) == best else text)
            lines.append(row([str(ranks), size_text(nbytes), *words]))
    return lines


def report(head: dict[str, Any], cells: list[Cell]) -> str:
    """Returns the results in Markdown."""
    lines = ["# all_reduce on one machine", ""]
    if head["rehearsal"]:
        lines += ["A rehearsal with small sizes: the times mean nothing.", ""]
    lines += ["f32, from Python, in place; medians of the slowest rank; OMP_NUM_THREADS=1.", ""]
    lines += [f"- {name}: {head[name]}" for name in ("PyTorch", "gradwire")]
    lines += [f"- {name}: {value}" for name, value in head["machine"].items()]
    for device in dict.fromkeys(cell.device for cell in cells):
        lines += ["", f"## {'CPU' if device == 'cpu' else head['GPUs']}", "", *table(cells, device)]
    for cell in cells:
        if cell.failure:
            name = f"{NAMES[cell.system]}, {cell.ranks} ranks, {cell.device}"
            lines += ["", f"**{name} failed:**", "", "```", cell.failure, "```"]
    return "\n".join(lines) + "\n"


class Bench:
    """Starts the jobs."""

    def __init__(self, programs: Path, folder: Path, seconds: float, limit: float) -> None:
        """Compiles the plain program. `seconds` is spent on each size, `limit` on each job."""
        self.seconds, self.limit = seconds, limit
        self._python = str(programs / "python")
        self._variables = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        }
        self._cores = len(os.sched_getaffinity(0))
        self._plain = folder / "node_memory"
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler:
            call([compiler, *COMPILE, HERE / "node_memory.c", "-o", self._plain])

    def systems(self, device: str) -> Iterator[str]:
        """Returns the systems of this machine."""
        yield from ("gradwire", "gloo")
        if device == "cpu" and shutil.which("mpirun") and self._has_mpi4py():
            yield "mpi"
        if device == "cpu" and self._plain.exists():
            yield "plain"

    def _has_mpi4py(self) -> bool:
        try:
            call([self._python, "-c", "import mpi4py.MPI"])
        except Trouble:
            return False
        return True

    def words(self, system: str, device: str, ranks: int, sizes: list[int]) -> list[str]:
        """Returns the command of a job."""
        what = [str(self.seconds), ",".join(map(str, sizes))]
        if system == "plain":
            return [str(self._plain), str(self._cores), str(ranks), *what]
        rank = [str(HERE / "node_rank.py"), system, device, *what]
        if system == "mpi":
            mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks)]
            return [*mpirun, self._python, *rank]
        torchrun = [self._python, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc-per-node", str(ranks), *rank]

    def run(self, system: str, device: str, ranks: int, sizes: list[int]) -> Cell:
        """Runs one job."""
        if system == "plain":
            sizes = [nbytes for nbytes in sizes if nbytes >= LEAST_PLAIN]
        cell = Cell(device, ranks, system, {})
        try:
            process = Process(self.words(system, device, ranks, sizes), self._variables)
            times = json.loads(run_job([process], self.limit).splitlines()[-1])
            cell.us = dict(zip(sizes, times, strict=True))
        except (Trouble, ValueError, IndexError) as trouble:
            cell.failure = str(trouble) or "it printed nothing"
        return cell


def measure(
    bench: Bench, devices: list[str], ranks: list[int], sizes: Callable[[int], list[int]]
) -> Iterator[Cell]:
    """Runs all jobs."""
    for device in devices:
        systems = list(bench.systems(device))
        for count in ranks:
            for system in systems if device == "cpu" or count in CUDA_RANKS else []:
                say(f"{NAMES[system]}, {count} ranks, {device}")
                yield bench.run(system, device, count, sizes(count))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_node", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="the Python package, built by `make wheel`")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench-node-results"),
        help="the folder for the results [%(default)s]",
    )
    parser.add_argument("--small", action="store_true", help="a rehearsal: 2 ranks, small sizes")
    return parser.parse_args()


def main() -> int:
    """Runs the benchmark."""
    chosen = arguments()
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    all_sizes, ranks = (SMALL_SIZES, [2]) if chosen.small else (SIZES, rank_counts(cores))
    try:
        if not chosen.wheel.is_file():
            raise Trouble(
                f"wheel {chosen.wheel} not found: build one with `make wheel` in python/dist"
            )
        chosen.out.mkdir(parents=True, exist_ok=True)
        found = check_torch("cpu")
        with tempfile.TemporaryDirectory(prefix="bench-node") as folder:
            programs = install(chosen.wheel.resolve(), Path(folder), found)
            head = {
                "rehearsal": chosen.small,
                "GPUs": ", ".join(found["gpus"]),
                "PyTorch": found["torch"],
                "gradwire": call([programs / "gradwire", "--version"]).split()[-1],
                "machine": machine(),
            }
            seconds, limit = (0.05, 240) if chosen.small else (0.25, 90)
            bench = Bench(programs, Path(folder), seconds, limit)
            devices = ["cpu", "cuda"] if found["gpus"] and not chosen.small else ["cpu"]
            cells: list[Cell] = []
            for cell in measure(
                bench, devices, ranks, lambda count: fitting(all_sizes, count, memory)
            ):
                cells.append(cell)
                data = {**head, "cells": [vars(each) for each in cells]}
                (chosen.out / "node.json").write_text(json.dumps(data, indent=1) + "\n")
                (chosen.out / "node.md").write_text(report(head, cells))
    except (Trouble, OSError) as trouble:
        print(f"bench_node: {trouble}", file=sys.stderr)
        return 1
    print(report(head, cells), end="")
    return 1 if any(cell.failure for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
