"""`plot.py RESULTS.json OUT…`: bandwidth by size, with a line for each system and a panel for each
scenario.

It runs in the virtual environment of the benchmark, which has matplotlib.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

COLOURS = {
    "gradwire": "#c1272d",
    "gloo": "#0072b2",
    "openmpi": "#009e73",
    "intelmpi": "#cc79a7",
    "oneccl": "#e69f00",
    "horovod": "#56b4e9",
}
# The line styles of our systems.
DASHES = {"gradwire-ordinary": "--", "gradwire-bf16": "-."}
COLUMNS = 2


def size_text(size: float) -> str:
    """Returns a size for an axis."""
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if size >= unit:
            return f"{size / unit:g}{name}"
    return f"{size:g}"


def panel(axes: plt.Axes, scenario: dict) -> None:
    """Draws one scenario, with the range of the rounds as a band."""
    sizes = set()
    for system in scenario["systems"]:
        rows = system["rows"]
        if not rows:
            continue
        family = system["name"].split("-")[0]
        x = [row["bytes"] for row in rows]
        y = [row["bus_gb_s"] for row in rows]
        sizes.update(x)
        dashes = DASHES.get(system["name"], "-") if system["tuned"] else ":"
        width = 2.2 if family == "gradwire" else 1.3
        axes.plot(
            x,
            y,
            dashes,
            color=COLOURS[family],
            linewidth=width,
            marker="o",
            markersize=3,
            label=system["title"],
        )
        carried = [row["bus_gb_s"] * row["median_us"] for row in rows]
        slow = [bits / row["range_us"][1] for bits, row in zip(carried, rows, strict=True)]
        fast = [
            bits / max(row["range_us"][0], 1e-3) for bits, row in zip(carried, rows, strict=True)
        ]
        fast = [min(a, 3 * b) for a, b in zip(fast, y, strict=True)]
        axes.fill_between(x, slow, fast, color=COLOURS[family], alpha=0.08, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(sizes), [size_text(size) for size in sorted(sizes)], minor=False)
    axes.set_ylim(bottom=0)
    axes.set_title(scenario["title"], fontsize=10)
    axes.set_xlabel("bytes", fontsize=8)
    axes.set_ylabel("bus bandwidth, GB/s", fontsize=8)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=6)


def main() -> None:
    """Draws the results."""
    results = json.loads(Path(sys.argv[1]).read_text())
    scenarios = [
        s for s in results["scenarios"] if any(len(system["rows"]) > 1 for system in s["systems"])
    ]
    if not scenarios:
        sys.exit("plot: no scenario has more than one size")
    rows = -(-len(scenarios) // COLUMNS)
    figure, grid = plt.subplots(
        rows, COLUMNS, figsize=(12, 4 * rows), squeeze=False, layout="constrained"
    )
    cells = grid.flatten()
    for axes, scenario in zip(cells, scenarios, strict=False):
        panel(axes, scenario)
    for axes in cells[len(scenarios) :]:
        axes.set_visible(False)
    for out in sys.argv[2:]:
        figure.savefig(out, dpi=130)


if __name__ == "__main__":
    main()
