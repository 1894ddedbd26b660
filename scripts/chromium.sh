#!/bin/sh
# Prints the path of Chromium, for the tests of the status page:
#
#     chromium=$(scripts/chromium.sh) && "$chromium" --version
#
# If it is on the PATH, that one is used. Otherwise, root installs Debian's package with apt (once;
# about 100 MB to download, 400 MB on disk), because it needs many libraries.
#
# Messages go to standard error. If it can't be installed, the reason is printed there, and the exit
# code is 3: tests that need it are skipped.
set -eu

folder=${CARGO_TARGET_DIR:-$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)/target}

skip() { printf 'chromium.sh: %s\n' "$*" >&2; exit 3; }

command -v chromium && exit 0
for program in apt-get flock timeout; do
    command -v "$program" >/dev/null || skip "$program is not installed; install chromium"
done
[ "$(id -u)" = 0 ] || skip "only root can install Debian's package; install chromium"

mkdir -p "$folder"
# If another process is installing something, waits until it is done.
exec 9>"$folder/apt.lock"
flock -w 600 9 || skip "another process has been installing packages for ten minutes"
command -v chromium && exit 0
log=$folder/chromium.log
install() {
    DEBIAN_FRONTEND=noninteractive timeout 400 \
        apt-get -q -y install chromium >"$log" 2>&1 9>&-
}
# The package lists may be missing or outdated.
install || { timeout 300 apt-get -q update >"$log" 2>&1 9>&- && install; } ||
    skip "apt can't install the package chromium: $(tail -n 1 "$log")"
command -v chromium || skip "Debian's package has no chromium here"
