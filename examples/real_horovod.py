r"""Runs a script written for Horovod, changing only its imports.

    git clone --depth 1 --branch v0.28.1 https://github.com/horovod/horovod
    python examples/real_horovod.py horovod/examples/pytorch/pytorch_synthetic_benchmark.py \
        --model resnet18 --no-cuda
    python examples/real_horovod.py -np 4 train.py --epochs 3

It prints the changed lines and starts the changed copy with `gradwire run`; the script itself is
not modified. Arguments after the script are passed to it. (The first one needs torchvision.)
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from gradwire._programs import find

# `import horovod.torch as hvd`, `from horovod.torch.mpi_ops import …`, `from horovod.common.util
# import …`, and `import horovod` for `horovod.run`.
IMPORTS = [
    (
        re.compile(r"^(\s*(?:import|from)\s+)horovod\.(torch|tensorflow|keras|common)\b"),
        r"\1gradwire.\2",
    ),
    (re.compile(r"^(\s*import\s+)horovod\s*$"), r"\1gradwire as horovod"),
]


def changed(line: str) -> str:
    for pattern, replacement in IMPORTS:
        line = pattern.sub(replacement, line)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-np", dest="ranks", default="2", help="number of ranks (default: 2)")
    parser.add_argument(
        "-H", dest="hosts", help="hosts with slots, such as a:2,b:2 (default: this machine)"
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    given = parser.parse_args()

    before = given.script.read_text().splitlines()
    after = [changed(line) for line in before]
    differences = [number for number, line in enumerate(before) if after[number] != line]
    if not differences:
        raise SystemExit(f"{given.script}: no line imports horovod")
    for number in differences:
        print(
            f"line {number + 1}: {before[number].strip()}  ->  {after[number].strip()}", flush=True
        )
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, given.script.name)
        copy.write_text("\n".join(after) + "\n")
        # Imports from the script's own folder still work.
        paths = [str(given.script.parent.resolve()), os.environ.get("PYTHONPATH", "")]
        words = [find("gradwire"), "run", "-np", given.ranks]
        words += ["-H", given.hosts] if given.hosts else []
        words += ["--", sys.executable, str(copy), *given.arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with subprocess.Popen(words, env=environment) as job:
            # The launcher stops its ranks, which would otherwise keep running.
            signal.signal(signal.SIGTERM, lambda *_: job.terminate())
            return job.wait()


if __name__ == "__main__":
    sys.exit(main())
