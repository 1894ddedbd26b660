#!/bin/sh
# Prints the `export` lines that let cargo find libtorch for `gradwire-tch`:
#
#     eval "$(scripts/libtorch.sh)"
#     cargo build --release -p gradwire-tch --example digits
#
# LIBTORCH and LIBTORCH_USE_PYTORCH are used unchanged if set. Otherwise, torch is installed from
# PyPI in .venv, without the 3.5 GB of CUDA libraries that its wheel requires: the CPU part of
# libtorch needs only two small ones. The needed libraries are linked in .venv/libtorch, which looks
# like an unpacked libtorch without CUDA. Running `pip install torch==<version>` in .venv later
# completes the installation for Python.
#
# Messages go to standard error; standard output is for eval.
set -eu

version=2.13.0 # required by the tch version in Cargo.toml; torch-sys rejects any other
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
venv=$root/.venv
view=$venv/libtorch

say() { printf 'libtorch.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
# Shows pip's output only if it fails: other dependencies of torch are omitted on purpose.
install() {
    words=$("$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 2>&1) ||
        die "pip could not install $*: $words"
}
quote() { printf "'%s'" "$(printf %s "$1" | sed "s/'/'\\\\''/g")"; }

if [ -n "${LIBTORCH_USE_PYTORCH:-}" ]; then
    printf 'export LIBTORCH_USE_PYTORCH=%s\n' "$(quote "$LIBTORCH_USE_PYTORCH")"
    exit 0
fi
if [ -n "${LIBTORCH:-}" ]; then
    [ -e "$LIBTORCH/lib/libtorch_cpu.so" ] ||
        die "LIBTORCH is $LIBTORCH, which does not contain lib/libtorch_cpu.so; unset it or point" \
            "it at an unpacked libtorch $version"
    printf 'export LIBTORCH=%s\n' "$(quote "$LIBTORCH")"
    exit 0
fi

command -v c++ >/dev/null || die "a C++ compiler is needed (Debian and Ubuntu: apt install g++)"
command -v python3 >/dev/null ||
    die "Python 3.10 or newer is needed (Debian and Ubuntu: apt install python3 python3-venv)"

# The version is written last, after everything else succeeded. The links are checked because a
# checkout may be moved.
if [ "$(cat "$venv/libtorch-version" 2>/dev/null)" != "$version" ] ||
    [ ! -e "$view/lib/libtorch_cpu.so" ]; then
    if [ ! -x "$venv/bin/python" ]; then
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
            die "torch $version needs Python 3.10 or newer, this is $(python3 --version)"
        python3 -m venv "$venv" >&2 ||
            die "can't create a virtual environment in $venv" \
                "(Debian and Ubuntu: apt install python3-venv)"
    fi
    say "installing torch $version in $venv (once; about 500 MB to download, 1.3 GB on disk)"
    install --no-deps "torch==$version"
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    torch=$site/torch

    # The wheel's metadata names the CUDA release that it was built with.
    toolkit=$(sed -n 's/^Requires-Dist: cuda-toolkit\[[^]]*\]\(==[0-9.]*\).*/\1/p' \
        "$site/torch-$version"*.dist-info/METADATA)
    [ -z "$toolkit" ] || install "cuda-toolkit[cudart,cupti]$toolkit"

    rm -rf "$view"
    mkdir -p "$view/lib"
    ln -s "$torch/include" "$view/include"
    for library in "$torch"/lib/*.so* \
        "$site"/nvidia/*/lib/libcudart.so.* "$site"/nvidia/*/lib/libcupti.so.*; do
        case ${library##*/} in
        libtorch.so | *_cuda* | *_python.so | *nvrtc* | *nvshmem*) ;;
        libshm.so | *_global_deps.so | '*'*) ;;
        *) ln -s "$library" "$view/lib/" ;;
        esac
    done
    # libtorch.so is an empty library that loads the CPU and CUDA parts; here it is the CPU part.
    ln -s libtorch_cpu.so "$view/lib/libtorch.so"
    missing=$(ldd "$view/lib/libtorch_cpu.so" | awk '/not found/ { print $1 }' | tr '\n' ' ')
    if [ -n "$missing" ]; then
        say "libtorch_cpu.so also needs $missing; installing all of torch's dependencies"
        install "torch==$version"
        rm -rf "$view"
        ln -s "$torch" "$view"
    fi
    echo "$version" >"$venv/libtorch-version"
fi
printf 'export LIBTORCH=%s\n' "$(quote "$view")"
