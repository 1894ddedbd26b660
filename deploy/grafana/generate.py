#!/usr/bin/env python3
"""Generates the dashboards in deploy/grafana/dashboards/: `make dashboards`.

    generate.py # writes them generate.py --check # exits with 1 if they differ from what would be
    written

It needs grafana-foundation-sdk, which python/make_venv.py installs. The queries use the metrics of
docs/metrics.md; python/tests/test_deploy.py checks that.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from host_dashboards import network, node
from job_dashboards import overview, stragglers

FOLDER = Path(__file__).resolve().parent / "dashboards"


def generated() -> dict[str, str]:
    """Returns the content of each file, by name."""
    files = {}
    for make in (overview, stragglers, network, node):
        built = make().build()
        for count, panel in enumerate(built.panels or [], 1):
            panel.id_val = count
        text = json.dumps(built, cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False)
        files[f"{make.__name__}.json"] = text + "\n"
    return files


def main() -> int:
    """Writes the files, or compares them with the existing ones."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare without writing")
    check = parser.parse_args().check
    different = []
    for name, text in generated().items():
        path = FOLDER / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        different.append(name)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if check and different:
        print(f"{', '.join(different)} differ: run make dashboards", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
