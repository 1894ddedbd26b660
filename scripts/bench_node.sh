#!/bin/sh
# Measures all_reduce on all cores of a machine without network access, within 5 minutes:
#
#     scripts/bench_node.sh python/dist/gradwire-*.whl --out results
#
# It needs Python with PyTorch 2.11 or newer; PYTHON selects the interpreter (python3). mpi4py, a C
# compiler and a GPU are used if they are there. The wheel is installed in a temporary virtual
# environment. `--help` shows the options.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python=${PYTHON:-python3}
command -v "$python" >/dev/null || {
    echo "bench_node: $python not found; select another one with PYTHON=/path/to/python" >&2
    exit 1
}
exec "$python" "$root/lab/benchmarks/node.py" "$@"
