"""The targets as a table and as JSON."""

import resources
from machine import is_quiet
from resources import Fact
from targets import Judgement, Verdict


def as_json(judgements: list[Judgement]) -> list[dict[str, object]]:
    """Returns all judgements."""
    return [
        {
            "scenario": judgement.target.scenario,
            "size": judgement.size,
            "system": judgement.target.system,
            "against": judgement.against,
            "target": judgement.target.text,
            "reached": judgement.reached,
            "ours_us": judgement.ours and judgement.ours.median,
            "theirs_us": judgement.theirs and judgement.theirs.median,
            "verdict": judgement.verdict.value,
        }
        for judgement in judgements
    ]


def as_markdown(
    judgements: list[Judgement], watched: dict[str, object] | None, noise: dict[str, float]
) -> str:
    """Returns a line for each target and size, in the order of the targets, and then the
    resources."""
    facts = resources.judge(watched) if watched else []
    quiet = is_quiet(noise)
    lines = ["# The targets", ""]
    if not quiet:
        lines += [
            "The machine was NOT quiet: the verdicts are not reliable.",
            "",
        ]
    lines += [
        "| work | size | of | against | target | reached | times | |",
        "| --- | --- | --- | --- | --- | --: | --- | --- |",
    ]
    for judgement in judgements:
        of = {"gradwire": "", "gradwire-ordinary": "ordinary memory", "gradwire-bf16": "bf16"}
        cells = [
            judgement.title,
            judgement.size,
            of.get(judgement.target.system, judgement.target.system),
        ]
        cells += [
            judgement.against,
            judgement.target.text,
            judgement.reached,
            judgement.times,
            _word(judgement.verdict),
        ]
        lines.append(_row(cells))
    for fact in facts:
        lines.append(
            _row([fact.work, "", "", "", fact.target, fact.reached, "", _word(_verdict(fact))])
        )
    found = [judgement.verdict for judgement in judgements] + [_verdict(fact) for fact in facts]
    lines += ["", "; ".join(f"{found.count(verdict)} {verdict.value}" for verdict in Verdict) + "."]
    if watched:
        lines += ["", "## Resources", "", *resources.as_markdown(watched)]
    return "\n".join(lines) + "\n"


def _verdict(fact: Fact) -> Verdict:
    return Verdict.MET if fact.met else Verdict.MISSED


def _word(verdict: Verdict) -> str:
    return f"**{verdict.value}**" if verdict is Verdict.MISSED else verdict.value


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
