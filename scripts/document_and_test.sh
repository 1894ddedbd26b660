#!/usr/bin/env bash
# In place of `rustdoc` in `cargo test --doc`: documents a library, then tests its examples.
#
# `cargo doc` checks all crates once more, without code. Here rustdoc uses the libraries that the
# tests were built with, and takes a third of the time. As there, a warning is an error.
set -euo pipefail

words=() is_test=no
while [ $# -gt 0 ]; do
    case $1 in
    --test) is_test=yes ;;
    --test-run-directory) folder=$2 && shift ;;
    *) words+=("$1") ;;
    esac
    shift
done
if [ $is_test = no ]; then
    exec rustdoc "${words[@]}"
fi
rustdoc "${words[@]}" -D warnings --out-dir "${CARGO_TARGET_DIR:-target}/doc"
exec rustdoc --test --test-run-directory "$folder" "${words[@]}"
