#!/usr/bin/env bash
# `make demo`: builds Gradwire, fetches PyTorch beside that, and trains a small network. It prints
# one line for each stage. What the stages print is in target/demo.log.
#
#     scripts/demo.sh HOSTS [OPTIONS OF THE EXAMPLE]
set -euo pipefail
cd "$(dirname "$0")/.."
hosts=$1
shift
log=${CARGO_TARGET_DIR:-target}/demo.log
mkdir -p "$(dirname "$log")"
: >"$log"

# stage TEXT COMMAND…: runs a command, and says how long it took or how it failed.
stage() {
    local text=$1 start=$SECONDS
    shift
    printf '%-52s' "$text"
    if ! "$@" >>"$log" 2>&1; then
        printf 'failed after %d s\n\n' $((SECONDS - start))
        tail -n 30 "$log" >&2
        printf '\nmake demo: a stage failed: %s. Its output is in %s.\n' "$text" "$log" >&2
        exit 1
    fi
    printf '%4d s\n' $((SECONDS - start))
}

python3 python/make_venv.py --without-tools >"$log.fetch" 2>&1 &
fetch=$!
trap 'kill $fetch 2>/dev/null || true' EXIT
# The end of a fetch that began long ago.
fetched() {
    wait $fetch && return
    cat "$log.fetch"
    return 1
}
install() {
    .venv-python/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps \
        python/dist/gradwire-*.whl
}

stage "1/5  build gradwire and gradwired" make --no-print-directory programs
stage "2/5  build the Python package" make --no-print-directory wheel PROGRAMS=built
stage "3/5  fetch PyTorch (beside 1 and 2)" fetched
stage "4/5  install the package in .venv-python" install
trap - EXIT
echo "5/5  train on the ranks of $hosts"
start=$SECONDS
.venv-python/bin/gradwire run -H "$hosts" -- .venv-python/bin/python examples/digits_horovod.py "$@"
printf '%-52s%4d s\n\n' "     trained" $((SECONDS - start))
cat <<'END'
Next:
  source .venv-python/bin/activate
  gradwire run -np 4 -- python examples/digits_ddp.py   DistributedDataParallel, the same data
  gradwire bench allreduce -np 4                        how fast it is on this machine
  gradwire top                                          watch a running job
  docs/running.md                                       your own program, several hosts
END
