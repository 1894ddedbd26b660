"""The report: tables in Markdown, and everything in JSON."""

from figures import Figure, Verdict, ratio, time_text, verdict
from machine import is_quiet, noise_text
from measure import Outcome, Result
from net import line_text
from plan import MIB, bus_bytes, line_bits, size_text

FAMILIES = {
    "gradwire": "Gradwire",
    "gloo": "Gloo",
    "openmpi": "Open MPI",
    "intelmpi": "Intel MPI",
    "oneccl": "oneCCL",
    "horovod": "Horovod",
}


def as_json(head: dict[str, object], results: list[Result]) -> dict[str, object]:
    """Returns all measurements."""
    return {**head, "scenarios": [_scenario_json(result) for result in results]}


def _scenario_json(result: Result) -> dict[str, object]:
    scenario, line = result.scenario, result.line
    return {
        "name": scenario.name,
        "title": scenario.title,
        "nodes": scenario.nodes,
        "ranks": scenario.ranks,
        "rate_bits": scenario.rate,
        "delay_ms": scenario.delay_ms,
        "line": line and vars(line),
        "systems": [_outcome_json(result, outcome) for outcome in result.outcomes],
    }


def _outcome_json(result: Result, outcome: Outcome) -> dict[str, object]:
    rows = []
    for size, rounds in sorted(outcome.rounds.items()):
        figure = outcome.figure(size)
        assert figure is not None
        rows.append(
            {
                "bytes": size,
                "rounds_us": rounds,
                "median_us": figure.median,
                "range_us": [figure.low, figure.high],
                "bus_gb_s": bus_bytes(result.scenario, size) / figure.median / 1e3,
                "line_share": _share(result, size, figure),
                "baseline_us": outcome.baselines.get(size),
                "baseline_share": outcome.baseline_share(size),
                "setup": outcome.chosen[size].label,
            }
        )
    system = outcome.system
    return {
        "name": system.name,
        "title": system.title,
        "tuned": system.tuned,
        "trouble": outcome.trouble,
        "tried_us": outcome.tried,
        "rows": rows,
    }


def _share(result: Result, size: int, figure: Figure) -> float | None:
    """Returns the share of the line's rate both ways that was reached."""
    if result.line is None:
        return None
    return line_bits(result.scenario, size) / result.line.both_ways / (figure.median * 1e-6)


def as_markdown(head: dict[str, object], results: list[Result]) -> str:
    """Returns the tables."""
    machine, versions = head["machine"], head["versions"]
    missing, noise = head["missing"], head["noise"]
    assert isinstance(machine, dict) and isinstance(versions, dict)
    assert isinstance(missing, dict) and isinstance(noise, dict)
    lines = ["# Gradwire and its peers", ""]
    lines.append("- Machine: " + ", ".join(f"{name} {value}" for name, value in machine.items()))
    lines.append(
        "- Versions: " + ", ".join(f"{FAMILIES.get(k, k)} {v}" for k, v in sorted(versions.items()))
    )
    lines.append(f"- Noise: {noise_text(noise)}")
    lines.append(
        f"- {head['rounds']} rounds with the systems in turn; float32, sum, in place; times are "
        "the slowest rank's, "
        "the median of the rounds' medians, ± half the range that the rounds may as well have "
        "been in"
    )
    lines += [
        f"- Left out: {FAMILIES.get(name, name)}: {reason}"
        for name, reason in sorted(missing.items())
    ]
    for result in results:
        lines += ["", f"## {result.scenario.title}", ""]
        if result.line:
            text = line_text(result.line)
            lines.append(f"{text[0].upper()}{text[1:]}.")
            lines.append("")
        lines += _times(result)
        lines += ["", *_ratios(result, is_quiet(noise))]
        lines += _remarks(result)
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _name(result: Result, size: int) -> str:
    return f"model, {size / MIB:.1f} MiB" if result.scenario.model else size_text(size)


def _times(result: Result) -> list[str]:
    outcomes = [outcome for outcome in result.outcomes if outcome.rounds]
    lines = [_row(["size", *(outcome.system.title for outcome in outcomes)])]
    lines.append(_row(["---", *("--:" for _ in outcomes)]))
    for size in result.sizes:
        cells = []
        for outcome in outcomes:
            figure = outcome.figure(size)
            text = "–"
            if figure:
                text = f"{time_text(figure.median)} ±{figure.spread / 2:.0%}"
                share = _share(result, size, figure)
                if share is not None and outcome.system.ours and size >= MIB:
                    text += f", {share:.0%} of the line"
                baseline = outcome.baseline_share(size)
                if baseline is not None and size >= MIB:
                    text += f", {baseline:.0%} of the baseline"
            cells.append(text)
        lines.append(_row([_name(result, size), *cells]))
    return lines


def _ratios(result: Result, quiet: bool) -> list[str]:
    """Returns how many times faster than its peers Gradwire is, with a verdict beyond the noise."""
    ours = [
        outcome
        for outcome in result.outcomes
        if outcome.system.ours and outcome.system.tuned and outcome.rounds
    ]
    peers = [outcome for outcome in result.outcomes if not outcome.system.ours and outcome.rounds]
    if not ours or not peers:
        return ["No ratios: nothing to compare was measured."]
    lines = ["How many times as fast Gradwire is:", ""]
    lines.append(_row(["size", "of", *(f"÷ {peer.system.title}" for peer in peers)]))
    lines.append(_row(["---", "---", *("--:" for _ in peers)]))
    for size in result.sizes:
        for our in ours:
            mine = our.figure(size)
            cells = [_name(result, size), our.system.title]
            for peer in peers:
                theirs = peer.figure(size)
                cells.append(_verdict(mine, theirs, quiet) if mine and theirs else "–")
            lines.append(_row(cells))
    return lines


def _verdict(ours: Figure, theirs: Figure, quiet: bool) -> str:
    text = f"{ratio(ours, theirs):.2f}×"
    if not quiet:
        return text  # other load slows some systems more than others, which no range shows
    found = verdict(ours, theirs)
    return f"**{text}** {found.value}" if found is not Verdict.NOISE else f"{text} ({found.value})"


def _remarks(result: Result) -> list[str]:
    lines = []
    for outcome in result.outcomes:
        labels = dict.fromkeys(setup.label for setup in outcome.chosen.values())
        if outcome.tried and labels:
            used = []
            for label in labels:
                sizes = [
                    _name(result, size)
                    for size, setup in outcome.chosen.items()
                    if setup.label == label
                ]
                used.append(f"{label} ({', '.join(sizes)})")
            lines.append(f"- {outcome.system.title}: {'; '.join(used)}.")
        elif len(outcome.system.setups) > 1 and outcome.rounds:
            lines.append(
                f"- {outcome.system.title}: only '{outcome.system.setups[0].label}'; --quick "
                "skips other setups."
            )
        if outcome.trouble:
            first = outcome.trouble.splitlines()
            lines.append(
                f"- {outcome.system.title} failed: {' '.join(line.strip() for line in first)}"
            )
    return ["", *lines] if lines else []
