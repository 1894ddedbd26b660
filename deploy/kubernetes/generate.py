#!/usr/bin/env python3
"""Writes the manifests of kustomize/ from the Helm chart: `make kubernetes`.

    generate.py          # writes them
    generate.py --check  # exits with 1 if they differ from what would be written

It needs helm-python-sdk and PyYAML, which `make kubernetes` installs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from helm_python.chart import Chart

HERE = Path(__file__).resolve().parent
CHART, FOLDER = HERE / "chart", HERE / "kustomize"
KINDS = ("jobset", "job", "kubeflow")

NOTE = "# Generated from ../../chart by `make kubernetes`: don't edit it, patch it.\n"


def rendered(values: dict[str, Any], name: str = "gradwire") -> list[dict[str, Any]]:
    """Returns the objects of the chart."""
    with Chart.load(CHART) as chart:
        texts = chart.render(values=values, name=name, namespace="default")
    return [one for _, text in sorted(texts.items()) for one in yaml.safe_load_all(text) if one]


def _text(objects: list[dict[str, Any]]) -> str:
    return NOTE + yaml.safe_dump_all(objects, sort_keys=False, width=100)


def generated() -> dict[Path, str]:
    """Returns the content of each file."""
    files = {FOLDER / kind / "objects.yaml": _text(rendered({"kind": kind})) for kind in KINDS}
    with_monitoring = rendered({"monitoring": {"enabled": True}})
    added = [one for one in with_monitoring if one["kind"] in ("PodMonitor", "PrometheusRule")]
    files[FOLDER / "monitoring" / "objects.yaml"] = _text(added)
    return files


def main() -> int:
    """Writes the files, or compares them with the existing ones."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare without writing")
    check = parser.parse_args().check
    different = []
    for path, text in generated().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        different.append(str(path.relative_to(HERE)))
        if not check:
            path.write_text(text, encoding="utf-8")
    if check and different:
        print(f"{', '.join(different)} differ: run make kubernetes", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
