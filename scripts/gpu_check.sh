#!/bin/sh
# Checks and measures Gradwire on a machine with a GPU, without the network, in 8 minutes at most:
#
#     scripts/gpu_check.sh python/dist/gradwire-*.whl --out results
#
# It needs Python with PyTorch 2.11 or newer and pytest; PYTHON says which one (python3). The wheel
# is installed in a virtual environment of its own, which is removed afterwards. `--help` shows the
# options, and lab/docs/results.md has results.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python=${PYTHON:-python3}
command -v "$python" >/dev/null || {
    echo "gpu_check: there is no $python here; PYTHON=/path/to/python names another one" >&2
    exit 1
}
exec "$python" "$root/lab/benchmarks/gpu_check.py" "$@"
