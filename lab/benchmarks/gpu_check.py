#!/usr/bin/env python3
"""`scripts/gpu_check.sh WHEEL`: tests and measures Gradwire on a machine with a GPU.

    scripts/gpu_check.sh python/dist/gradwire-*.whl --out results   8 minutes at most
    scripts/gpu_check.sh python/dist/gradwire-*.whl --device cpu    a small rehearsal

The wheel is installed in a fresh virtual environment on top of this Python's packages. Each part
has its own time limit. If a part fails, this is reported, and the other parts still run. The
results are in `gpu_check.json` and, as a table, in `gpu_check.md`; `failures.txt` has the output of
failed parts. The exit code is 1 if anything failed.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from figures import time_text
from machine import describe
from plan import size_text
from shell import Process, Trouble, call, clean_environment, run_job
from torch_model import Result, row

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "python" / "tests"
OLDEST_TORCH = (2, 11)
KIB, MIB = 1 << 10, 1 << 20
# The test files that do not depend on the device of tensors.
FUNCTIONS = ("tensors", "random_calls", "matrix", "derivatives", "joins", "adasum")
ASK = """
import json, sys, sysconfig
paths = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
found = {"torch": None, "gpus": [], "why": "", "pip": True}
found["packages"] = paths if sys.prefix != sys.base_prefix else []
try:
    import pip
except ImportError:
    found["pip"] = False
try:
    import torch
    found["torch"] = torch.__version__
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        found["gpus"] = [torch.cuda.get_device_name(at) for at in range(count)]
    else:
        found["why"] = "it was built without CUDA" if torch.version.cuda is None else ""
except ImportError as error:
    found["why"] = str(error)
print(json.dumps(found))
"""


@dataclass
class Here:
    """The environment of the check."""

    device: str
    # The folder of the virtual environment's programs.
    programs: Path
    # A folder for files that only the check reads.
    folder: Path

    @property
    def small(self) -> bool:
        """Whether this is a rehearsal, which only shows that all parts work."""
        return self.device == "cpu"

    def patience(self, limit: float) -> float:
        """Returns the time limit of a part: a rehearsal may share the machine with others."""
        return 4 * limit if self.small else limit

    def job(self, ranks: int, words: list[str], limit: float, **variables: str) -> str:
        """Runs a program as the ranks of a job on this machine; returns its output."""
        limit = self.patience(limit)
        words = [str(self.programs / "gradwire"), "run", "-np", str(ranks), "--", *words]
        # Names and addresses of other hosts are not needed.
        return run_job([Process(words, {"GLOO_SOCKET_IFNAME": "lo", **variables})], limit)


@dataclass
class Outcome:
    """The result of a part."""

    name: str
    failure: str | None = None
    seconds: float = 0.0
    # Its measurements.
    figures: list[dict[str, Any]] = field(default_factory=list)
    # The lines of its table.
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """A part of the check, with its time limit."""

    name: str
    limit: float
    run: Callable[[Here, float, Outcome], None]


def reported(said: str) -> list[dict[str, Any]]:
    """Returns the output of a job's first rank: a line of JSON for each item."""
    found = [re.search(r"\{.*\}", line) for line in said.splitlines()]
    return [json.loads(match[0]) for match in found if match]


def tests(ranks: int) -> Callable[[Here, float, Outcome], None]:
    """Runs the tests of tensors on a GPU; in a rehearsal, on a simulated one."""

    def run(here: Here, limit: float, outcome: Outcome) -> None:
        name = "test_staging.py" if here.small else "test_cuda.py"
        words = [str(here.programs / "python"), "-m", "pytest", "-x"]
        words += ["-p", "no:cacheprovider", str(TESTS / "ranks" / name)]
        said = here.job(ranks, words, limit, GWTEST_RANK="1", OMP_NUM_THREADS="1")
        if "skipped" in said or "passed" not in said:
            trouble = Trouble(f"not all tests of {name} have run")
            trouble.output = said
            raise trouble
        counts = [int(count) for count in re.findall(r"(\d+) passed", said)]
        outcome.figures = [{"ranks": ranks, "passed": min(counts)}]
        outcome.lines = [f"{min(counts)} tests of {name} pass on each of {ranks} ranks."]

    return run


def tests_by_default(ranks: int) -> Callable[[Here, float, Outcome], None]:
    """Runs the tests of functions, the backend and random calls with tensors on the device."""
    groups = TESTS / "distributed" / "ranks"
    jobs = {
        "functions": [TESTS / "ranks" / f"test_{name}.py" for name in FUNCTIONS],
        "the backend": [groups / "collectives.py", groups / "random_calls.py"],
    }

    def run(here: Here, limit: float, outcome: Outcome) -> None:
        begin = time.monotonic()
        for what, files in jobs.items():
            words = [str(here.programs / "python"), "-m", "pytest", "-x", "-p", "gpu_by_default"]
            words += ["-W", "ignore", "-p", "no:cacheprovider", *map(str, files)]
            variables = {"GWTEST_DEVICE": here.device, "PYTHONPATH": str(TESTS)}
            variables |= {"GWTEST_RANK": "1", "OMP_NUM_THREADS": "1"}
            used = (time.monotonic() - begin) * limit / here.patience(limit)
            said = here.job(ranks, words, max(limit - used, 1.0), **variables)
            counts = [int(count) for count in re.findall(r"(\d+) passed", said)]
            if not counts:
                trouble = Trouble(f"no tests of {what} have run")
                trouble.output = said
                raise trouble
            outcome.figures.append({"ranks": ranks, "of": what, "passed": min(counts)})
            outcome.lines.append(f"{min(counts)} tests of {what} pass on each of {ranks} ranks.")

    return run


def allreduce(ranks: int) -> Callable[[Here, float, Outcome], None]:
    """Runs an allreduce of tensors on the device, in each way."""

    def run(here: Here, limit: float, outcome: Outcome) -> None:
        last = MIB if here.small else 256 * MIB
        sizes = [4 * KIB << at for at in range(0, 18, 2) if 4 * KIB << at <= last]
        words = [str(here.programs / "python"), str(HERE / "gpu_rank.py")]
        words += ["--device", here.device, "--sizes", ",".join(map(str, sizes))]
        words += ["--seconds", "0.01" if here.small else "0.3"]
        outcome.figures = reported(here.job(ranks, words, limit))
        outcome.lines = allreduce_lines(outcome.figures)

    return run


def allreduce_lines(figures: list[dict[str, Any]]) -> list[str]:
    """Returns the table of an allreduce."""
    titles = ["size", "copies out and back", "both at once", "Gloo", "backend", "`allreduce_`"]
    titles += ["backend ÷ Gloo", "backend ÷ copies"]
    lines = [row(titles), row(["---", *("--:" for _ in titles[1:])])]
    for figure in figures:
        times = {way: median(own) for way, own in figure["times_us"].items()}
        cells = [size_text(figure["bytes"]), *map(time_text, times.values())]
        cells += [f"{times['backend'] / times[other]:.2f}" for other in ("gloo", "copies")]
        lines.append(row(cells))
    return lines


def model(ranks: int) -> Callable[[Here, float, Outcome], None]:
    """Runs a training step of ResNet-50."""

    def run(here: Here, limit: float, outcome: Outcome) -> None:
        words = [str(here.programs / "python"), "-W", "ignore", str(HERE / "torch_rank.py")]
        words += ["--device", here.device, "--ways", "gloo,optimizer,optimizer-new,backend,hook"]
        if here.small:
            words += ["--kinds", "none", "--rounds", "1", "--steps", "1"]
        else:
            words += ["--kinds", "none,resnet50", "--rounds", "3", "--steps", "4"]
            words += ["--batch", "16", "--pixels", "112"]
        outcome.figures = reported(here.job(ranks, words, limit))
        result = Result("")
        for figure in outcome.figures:
            result.add(figure)
        outcome.lines = result.lines(quiet=False)[2:]

    return run


def bench(ranks: int) -> Callable[[Here, float, Outcome], None]:
    """Runs `gradwire bench` on as many cores as there are ranks."""

    def run(here: Here, limit: float, outcome: Outcome) -> None:
        cores = sorted(os.sched_getaffinity(0))[:ranks]
        file = here.folder / f"bench{ranks}.json"
        words = ["taskset", "--cpu-list", ",".join(map(str, cores))]
        words += [str(here.programs / "gradwire"), "bench", "allreduce", "-np", str(ranks)]
        words += ["-b", "4", "-e", "1M" if here.small else "256M", "-f", "4", "--json", str(file)]
        run_job([Process(words)], here.patience(limit))
        outcome.figures = json.loads(file.read_text())["rows"]
        lines = [f"{ranks} ranks on {len(cores)} cores, tensors in shared memory:", ""]
        lines += [row(["size", "time", "share of the baseline"]), "| --- | --: | --: |"]
        for figure in outcome.figures:
            cells = [size_text(figure["bytes"]), time_text(figure["median_us"])]
            lines.append(row([*cells, f"{figure['baseline_share']:.0%}"]))
        outcome.lines = lines

    return run


INSTALL_SECONDS = 40.0
# The sum of all limits, including the installation and the time to end parts that take too long, is
# at most 8 minutes.
PARTS = (
    Part("tests, 2 ranks", 40, tests(2)),
    Part("tests with the GPU as default device, 2 ranks", 60, tests_by_default(2)),
    Part("allreduce, 2 ranks", 50, allreduce(2)),
    Part("allreduce, 4 ranks", 60, allreduce(4)),
    Part("ResNet-50, 2 ranks", 60, model(2)),
    Part("ResNet-50, 4 ranks", 65, model(4)),
    Part("bench, 2 ranks", 20, bench(2)),
    Part("bench, 4 ranks", 25, bench(4)),
)


def check_torch(device: str) -> dict[str, Any]:
    """Returns a description of this Python's packages.

    Raises `Trouble` if they are not sufficient.
    """
    found: dict[str, Any] = json.loads(call([sys.executable, "-c", ASK], 60).splitlines()[-1])
    if found["torch"] is None:
        raise Trouble(
            f"{sys.executable} can't import torch ({found['why']}): set PYTHON=/path/to/python "
            "to one that can"
        )
    version = tuple(int(part) for part in re.findall(r"\d+", found["torch"])[:2])
    if version < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise Trouble(f"PyTorch {found['torch']} is too old: {wanted} or newer is needed")
    if device == "cuda" and not found["gpus"]:
        why = f" ({found['why']})" if found["why"] else ""
        raise Trouble(
            f"PyTorch {found['torch']} finds no GPU{why}; --device cpu rehearses without one"
        )
    return found


def install(wheel: Path, folder: Path, found: dict[str, Any]) -> Path:
    """Installs the wheel in a virtual environment; returns the folder of its programs."""
    begin = time.monotonic()
    environment = folder / "venv"
    words = [sys.executable, "-m", "venv", "--system-site-packages"]
    call([*words, *(["--without-pip"] if found["pip"] else []), environment], INSTALL_SECONDS)
    programs = environment / "bin"
    path = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(call([programs / "python", "-c", path]).strip())
    # System packages are those of the base Python, which would hide a PyTorch installed in this
    # Python's virtual environment.
    (site / "below.pth").write_text("".join(f"{path}\n" for path in found["packages"]))
    # A gradwire installed in the system is ignored.
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--disable-pip-version-check", "--ignore-installed", wheel]
    call(pip, INSTALL_SECONDS - (time.monotonic() - begin), env=clean_environment())
    said = call([programs / "python", "-c", "import gradwire; print(gradwire.__file__)"])
    if not Path(said.strip()).is_relative_to(environment):
        raise Trouble(f"python finds another gradwire first, {said.strip()}: unset PYTHONPATH")
    return programs


def attempt(part: Part, here: Here) -> tuple[Outcome, str]:
    """Runs a part; returns its result, and all output if it failed."""
    outcome, output = Outcome(part.name), ""
    begin = time.monotonic()
    try:
        part.run(here, part.limit, outcome)
    except Trouble as trouble:
        outcome.failure, output = str(trouble), trouble.output
    except Exception as error:  # the output of a part may be anything
        outcome.failure = f"invalid output: {error!r}"
    outcome.seconds = time.monotonic() - begin
    verdict = "failed" if outcome.failure else "ok"
    print(f"gpu_check: {part.name}: {verdict}, {outcome.seconds:.0f} s", file=sys.stderr)
    return outcome, output


def machine() -> dict[str, str]:
    """Returns the known properties of the machine: not every kernel reports all of them."""
    try:
        return describe()
    except OSError:
        return {"cores": str(len(os.sched_getaffinity(0)))}


def report(head: dict[str, Any], outcomes: list[Outcome]) -> str:
    """Returns the results in Markdown."""
    lines = ["# Gradwire on a GPU", ""]
    if head["device"] == "cpu":
        lines += ["A rehearsal without a GPU, with small sizes: the times mean nothing.", ""]
    lines += [f"- {name}: {value}" for name, value in head.items() if name != "machine"]
    lines += [f"- {name}: {value}" for name, value in head["machine"].items()]
    lines += ["", row(["part", "result", "seconds"]), "| --- | --- | --: |"]
    for outcome in outcomes:
        verdict = "**failed**" if outcome.failure else "ok"
        lines.append(row([outcome.name, verdict, f"{outcome.seconds:.0f}"]))
    for outcome in outcomes:
        lines += ["", f"## {outcome.name}", ""]
        lines += ["```", outcome.failure, "```"] if outcome.failure else outcome.lines
    return "\n".join(lines) + "\n"


def write(out: Path, head: dict[str, Any], results: list[tuple[Outcome, str]]) -> str:
    """Writes the results so far; returns them in Markdown."""
    outcomes = [outcome for outcome, _ in results]
    text = report(head, outcomes)
    data = {**head, "parts": [asdict(outcome) for outcome in outcomes]}
    (out / "gpu_check.json").write_text(json.dumps(data, indent=1) + "\n")
    (out / "gpu_check.md").write_text(text)
    failures = [f"# {outcome.name}\n\n{said}\n" for outcome, said in results if outcome.failure]
    (out / "failures.txt").unlink(missing_ok=True)
    if failures:
        (out / "failures.txt").write_text("\n".join(failures))
    return text


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="the Python package, built by `make wheel`")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-check-results"),
        help="the folder for the results [%(default)s]",
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a small rehearsal"
    )
    parser.add_argument("--only", default="", help="only parts with this in their names")
    return parser.parse_args()


def main() -> int:
    """Runs the check."""
    chosen = arguments()
    parts = [part for part in PARTS if chosen.only in part.name]
    try:
        if not chosen.wheel.is_file():
            raise Trouble(
                f"wheel {chosen.wheel} not found: build one with `make wheel` in python/dist"
            )
        if not parts:
            names = ", ".join(part.name for part in PARTS)
            raise Trouble(f"--only {chosen.only} matches none of the parts: {names}")
        chosen.out.mkdir(parents=True, exist_ok=True)
        found = check_torch(chosen.device)
        with tempfile.TemporaryDirectory(prefix="gpu-check") as folder:
            programs = install(chosen.wheel.resolve(), Path(folder), found)
            version = call([programs / "gradwire", "--version"]).strip()
            head = {
                "device": chosen.device,
                "GPUs": ", ".join(found["gpus"]) or "none",
                "PyTorch": found["torch"],
                "gradwire": version.removeprefix("gradwire "),
                "machine": machine(),
            }
            here = Here(chosen.device, programs, Path(folder))
            results: list[tuple[Outcome, str]] = []
            for part in parts:
                results.append(attempt(part, here))
                text = write(chosen.out, head, results)
    except (Trouble, OSError) as trouble:
        print(f"gpu_check: {trouble}", file=sys.stderr)
        return 1
    print(text, end="")
    return 1 if any(outcome.failure for outcome, _ in results) else 0


if __name__ == "__main__":
    sys.exit(main())
