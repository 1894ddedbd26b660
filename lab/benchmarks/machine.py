"""The machine, and how quiet it was, for reading the figures."""

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from net import machine_congestion_control


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def describe() -> dict[str, str]:
    """Returns the properties that matter when figures are compared."""
    huge = Path("/sys/kernel/mm/transparent_hugepage")
    pages = {}
    for name in ("enabled", "shmem_enabled"):
        if (huge / name).exists():
            pages[name] = (huge / name).read_text().partition("[")[2].partition("]")[0]
    return {
        "processor": _field("/proc/cpuinfo", "model name"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int(_field('/proc/meminfo', 'MemTotal').split()[0]) / (1 << 20):.0f} GiB",
        "virtual": "yes" if "hypervisor" in _field("/proc/cpuinfo", "flags").split() else "no",
        "kernel": platform.release(),
        "huge pages": ", ".join(f"{name}: {value}" for name, value in pages.items()) or "unknown",
        "congestion control": machine_congestion_control(),
    }


def _cpu_times() -> list[int]:
    return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


@dataclass
class Noise:
    """Measures other activity: foreign load before each run, stolen time, and the time of equal
    work."""

    begin: list[int] = field(default_factory=_cpu_times)
    probes: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)

    def probe(self) -> None:
        """Takes a sample while none of the systems runs."""
        before = _cpu_times()
        time.sleep(0.25)
        after = _cpu_times()
        passed = [b - a for a, b in zip(before, after, strict=True)]
        idle = passed[3] + passed[4]
        self.foreign.append(1 - idle / max(1, sum(passed)))
        source = bytes(8 << 20)
        start = time.perf_counter()
        for _ in range(4):
            bytearray(source)
        self.probes.append(time.perf_counter() - start)

    def summary(self) -> dict[str, float]:
        """Returns the figures of the whole run, as shares."""
        passed = [b - a for a, b in zip(self.begin, _cpu_times(), strict=True)]
        middle = median(self.probes)
        return {
            "probes": len(self.probes),
            "foreign_load_median": median(self.foreign),
            "foreign_load_max": max(self.foreign),
            "stolen": passed[7] / max(1, sum(passed)),
            "probe_ms": middle * 1e3,
            "probe_spread": (max(self.probes) - min(self.probes)) / middle,
        }


def is_quiet(noise: dict[str, float]) -> bool:
    """Whether nothing else used the machine, so that figures can be compared."""
    return noise["foreign_load_median"] < 0.05 and noise["stolen"] < 0.02


def noise_text(noise: dict[str, float]) -> str:
    """Returns the noise as text."""
    word = "quiet" if is_quiet(noise) else "NOT quiet, so no result below counts as a win"
    return (
        f"the machine was {word}; with none of the systems running its cores were "
        f"{noise['foreign_load_median']:.0%} busy in the median and "
        f"{noise['foreign_load_max']:.0%} at most, "
        f"{noise['stolen']:.1%} of the time was stolen by other virtual machines, and the same "
        "copy of 32 MiB took "
        f"{noise['probe_ms']:.1f} ms ± {noise['probe_spread'] / 2:.0%}"
    )
