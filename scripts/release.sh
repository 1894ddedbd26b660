#!/usr/bin/env bash
# `make release`: builds and checks all files of a release, in target/release-files.
#
#     scripts/release.sh             # a rehearsal: any commit, the notes of the next version
#     scripts/release.sh v1.2.3      # the release of this tag, which HEAD has
#
# Variables:
#     REPOSITORY   the address of the project, for the package's metadata; a release needs it
#     PROFILE      what Cargo builds: release (default), or dev for a quick rehearsal
#     ARCHS        wheels to build: "x86_64 aarch64" by default
#     CHECKS       what to try of the result: "wheel old sdist" by default
#
# Everything is built from a clone of the commit, so that nothing else gets in. A second run starts
# anew, but compiles nothing twice. The tools are those of `make release`, in .venv-lint.
set -euo pipefail
cd "$(dirname "$0")/.."

tag=${1:-}
profile=${PROFILE:-release}
archs=${ARCHS:-x86_64 aarch64}
checks=${CHECKS:-wheel old sdist}
root=$PWD
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target} CARGO_INCREMENTAL=0
export PATH=$root/.venv-lint/bin:$PATH
files=$root/target/release-files
tree=$root/target/release-tree
log=$root/target/release.log
built=$profile
[ "$profile" != dev ] || built=debug

refuse() {
    printf 'release: %s\n' "$*" >&2
    exit 1
}
# stage TEXT COMMAND…: runs a command, and says how long it took or how it failed.
stage() {
    local text=$1 start=$SECONDS
    shift
    printf '%-56s' "$text"
    # A subshell with set -e, which an `if` would turn off.
    set +e
    (set -e && "$@") >>"$log" 2>&1
    local code=$?
    set -e
    if [ $code != 0 ]; then
        printf 'failed after %d s\n\n' $((SECONDS - start))
        tail -n 30 "$log" >&2
        printf '\nrelease: a stage failed: %s. Its output is in %s.\n' "$text" "$log" >&2
        exit 1
    fi
    printf '%4d s\n' $((SECONDS - start))
}
parts() { (cd "$tree" && python3 "$tree/scripts/release_parts.py" "$@"); }
fresh_venv() {
    rm -rf "$1" && python3 -m venv "$1"
    "$1/bin/pip" install --quiet --disable-pip-version-check numpy
}
# The programs of a virtual environment work, also the ranks in Python.
try_venv() {
    "$1/bin/gradwire" bench allreduce -np 2 -b 4 -e 4M -f 32
    "$1/bin/gradwire" demo
}

# What can be refused at once.
[ -z "$(git status --porcelain)" ] || refuse "the working tree has changes: commit or stash them"
version=$(python3 scripts/release_parts.py version ${tag:+"$tag"})
python3 scripts/release_parts.py notes ${tag:+"$tag"} >/dev/null
if [ -n "$tag" ]; then
    at=$(git rev-parse --quiet --verify "refs/tags/$tag^{commit}") || refuse "there is no tag $tag"
    [ "$at" = "$(git rev-parse HEAD)" ] || refuse "HEAD is not the commit of the tag $tag"
    [ -n "${REPOSITORY:-}" ] || refuse "REPOSITORY must be the address of the project"
    [ "$profile" = release ] || refuse "a release has the profile release, not $profile"
fi
for tool in maturin cargo-zigbuild auditwheel; do
    [ -x ".venv-lint/bin/$tool" ] || refuse "$tool is missing: run make release"
done
mkdir -p target && : >"$log"
rm -rf "$files" && mkdir -p "$files"
echo "Gradwire $version${tag:- (a rehearsal)}, profile $profile"

# A clone keeps its files between runs, and with them what Cargo has compiled.
take_tree() {
    [ -e "$tree/.git" ] || git clone --quiet --shared --no-checkout . "$tree"
    git -C "$tree" checkout --quiet --force --detach "$(git rev-parse HEAD)"
    git -C "$tree" clean --quiet --force -d -x
    cd "$tree"
    python3 scripts/release_crates.py licences x86_64-unknown-linux-gnu >THIRD-PARTY-LICENCES.txt
    sed -i 's|^license-files = \[|&"THIRD-PARTY-LICENCES.txt", |' pyproject.toml
    git add THIRD-PARTY-LICENCES.txt
    python3 scripts/release_crates.py sbom x86_64-unknown-linux-gnu >gradwire.cdx.json
    [ -z "${REPOSITORY:-}" ] || python3 scripts/release_parts.py urls "$REPOSITORY" ${tag:+"$tag"}
}
# binutils of each architecture strip their own programs only.
strip_for() {
    if [ "$1" = "$(uname -m)" ]; then
        echo strip
    else
        scripts/apt.sh "$1-linux-gnu-strip" -- "binutils-${1//_/-}-linux-gnu"
        echo "$1-linux-gnu-strip"
    fi
}
# Both at once: each alone would have its own features of the crates that both need.
build_programs() {
    local target=$1-unknown-linux-gnu program strip
    strip=$(strip_for "$1")
    cd "$tree"
    cargo-zigbuild zigbuild --locked --profile "$profile" --target "$target.2.28" \
        -p gradwire-cli -p gradwire-daemon
    rm -rf python/gradwire.data && mkdir -p python/gradwire.data/scripts
    for program in gradwire gradwired; do
        "$strip" -o "python/gradwire.data/scripts/$program" \
            "$CARGO_TARGET_DIR/$target/$built/$program"
    done
}
# maturin gives zig other options than cargo-zigbuild does: in one folder, each would compile again
# what the other one has compiled.
build_wheel() {
    cd "$tree"
    CARGO_TARGET_DIR=$CARGO_TARGET_DIR/module maturin build --locked --zig --strip \
        --profile "$profile" --target "$1" --compatibility manylinux_2_28 \
        --compression-level 9 --sbom-include gradwire.cdx.json --out "$files"
}
check_wheel() {
    local arch=$1
    parts wheel "$arch" "$files"/*_"$arch".whl
    .venv-lint/bin/auditwheel show "$files"/*_"$arch".whl | tee "$log.audit"
    grep -q "manylinux_2_28_$arch" "$log.audit"
}
sysroot=$(rustc --print sysroot)
stage "take the commit" take_tree
mkdir -p "$tree/python/gradwire.data/scripts"
wheels=
for arch in $archs; do
    target=$arch-unknown-linux-gnu
    if [ ! -d "$sysroot/lib/rustlib/$target/lib" ]; then
        echo "$arch: skipped, because this Rust has no standard library for $target"
        continue
    fi
    stage "$arch: build the programs" build_programs "$arch"
    stage "$arch: build the wheel" build_wheel "$target"
    stage "$arch: check the wheel" check_wheel "$arch"
    wheels="$wheels $arch"
done
[ -n "$wheels" ] || refuse "no wheel was built"
[ -z "$tag" ] || [ "$wheels" = " $archs" ] || refuse "a release needs the wheels of $archs"

build_sdist() { cd "$tree" && maturin sdist --out "$files"; }
stage "build the sdist" build_sdist
stage "check the sdist" parts sdist "$files"/gradwire-*.tar.gz
# The SBOM is in the wheels, and beside them.
cp "$tree/gradwire.cdx.json" "$files/gradwire-$version.cdx.json"
parts notes ${tag:+"$tag"} >"$files/NOTES.md"

# What runs here, runs.
try_wheel() {
    fresh_venv target/release-venv
    target/release-venv/bin/pip install --quiet --disable-pip-version-check --no-deps \
        "$files"/*_"$(uname -m)".whl
    try_venv target/release-venv
}
# Not optimized: it shows that pip can build it, and the wheel is the same source.
try_sdist() {
    fresh_venv target/release-venv
    CARGO_TARGET_DIR=$CARGO_TARGET_DIR/sdist target/release-venv/bin/pip install --quiet \
        --disable-pip-version-check --no-deps --config-settings profile=dev \
        "$files"/gradwire-*.tar.gz
    try_venv target/release-venv
}
for check in $checks; do
    case $check in
        wheel)
            [ -n "$(ls "$files"/*_"$(uname -m)".whl 2>/dev/null)" ] || continue
            stage "install the wheel, run bench and demo" try_wheel ;;
        old)
            if reason=$(scripts/old_system.sh --missing); then
                stage "run bench on Debian 11" scripts/old_system.sh "$files"/*_x86_64.whl
            else
                echo "Debian 11: skipped, because $reason"
            fi ;;
        sdist) stage "install the sdist, run bench and demo" try_sdist ;;
        *) refuse "CHECKS knows wheel, old and sdist, not $check" ;;
    esac
done

(cd "$files" && sha256sum -- * >"../SHA256SUMS" && mv ../SHA256SUMS .)
echo
(cd "$files" && ls -l)
