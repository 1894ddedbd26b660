#!/bin/sh
# Checks and measures Gradwire on a machine with a GPU, without network access, within 8 minutes:
#
#     scripts/gpu_check.sh python/dist/gradwire-*.whl --out results
#
# It needs Python with PyTorch 2.11 or newer and pytest; PYTHON selects the interpreter (python3).
# The wheel is installed in a temporary virtual environment. `--help` shows the options, and
# lab/docs/results.md has results.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python=${PYTHON:-python3}
command -v "$python" >/dev/null || {
    echo "gpu_check: $python not found; select another one with PYTHON=/path/to/python" >&2
    exit 1
}
exec "$python" "$root/lab/benchmarks/gpu_check.py" "$@"
