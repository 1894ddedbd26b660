#!/bin/sh
# Prints the folder with Debian's `prometheus` and `promtool`:
#
#     programs=$(scripts/prometheus.sh) && "$programs/promtool" check config …
#
# If both are on the PATH, those are used. Otherwise, Debian's package is downloaded with apt and
# unpacked in target/prometheus (once; 20 MB to download, 100 MB on disk). It is not installed, so
# no service starts, and root is needed only to update apt's lists if they lack the package.
#
# Messages go to standard error. If the programs can't be downloaded, the reason is printed there,
# and the exit code is 3: tests that need them are skipped.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
folder=${CARGO_TARGET_DIR:-$root/target}/prometheus

skip() { printf 'prometheus.sh: %s\n' "$*" >&2; exit 3; }

if found=$(command -v promtool) && [ -x "$(dirname -- "$found")/prometheus" ]; then
    dirname -- "$found"
    exit 0
fi
for program in apt-get dpkg-deb flock timeout; do
    command -v "$program" >/dev/null ||
        skip "$program is missing, which downloads the package; install prometheus and promtool"
done

mkdir -p "$folder"
# If another process is downloading it, waits until it is done.
exec 9>"$folder/lock"
flock -w 600 9 || skip "another process has been downloading to $folder for ten minutes"
if [ ! -x "$folder/unpacked/usr/bin/prometheus" ]; then
    rm -rf "$folder/new" && mkdir "$folder/new"
    download() { (cd "$folder/new" && timeout 300 apt-get -q download prometheus >log 2>&1 9>&-); }
    update() { [ "$(id -u)" = 0 ] && timeout 300 apt-get -q update >"$folder/new/log" 2>&1 9>&-; }
    # The package lists may be missing or outdated.
    download || { update && download; } ||
        skip "apt can't download the package prometheus: $(tail -n 1 "$folder/new/log")"
    dpkg-deb -x "$folder/new"/prometheus_*.deb "$folder/new/unpacked"
    rm -rf "$folder/unpacked"
    # Renamed when complete.
    mv "$folder/new/unpacked" "$folder/unpacked"
    rm -rf "$folder/new"
fi
# The package may be for another system or a later release.
"$folder/unpacked/usr/bin/promtool" --version >/dev/null 2>&1 ||
    skip "promtool from Debian's package does not run on this system"
printf '%s\n' "$folder/unpacked/usr/bin"
