#!/bin/sh
# Installs Debian's packages with apt if programs are missing, for tests that need them:
#
#     scripts/apt.sh munged srun -- munge slurm-client
#
# Options of apt-get may precede the packages. Only root can install. Messages go to standard error.
# If the programs can't be installed, the reason is printed there, and the exit code is 3: tests
# that need them are skipped.
set -eu

folder=${CARGO_TARGET_DIR:-$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)/target}

# Programs of root are not on every user's PATH.
PATH=$PATH:/usr/sbin
programs=
while [ "$1" != -- ]; do
    programs="$programs $1"
    shift
done
shift

skip() { printf 'apt.sh: %s\n' "$*" >&2; exit 3; }
are_there() {
    for program in $programs; do
        command -v "$program" >/dev/null || return 1
    done
}

are_there && exit 0
for program in apt-get flock timeout; do
    command -v "$program" >/dev/null || skip "$program is missing; install$programs"
done
[ "$(id -u)" = 0 ] || skip "only root can install packages; install$programs"

mkdir -p "$folder"
# If another process is installing something, waits until it is done.
exec 9>"$folder/apt.lock"
flock -w 600 9 || skip "another process has been installing packages for ten minutes"
are_there && exit 0
log=$folder/apt.log
install() {
    DEBIAN_FRONTEND=noninteractive timeout 400 apt-get -q -y install "$@" >"$log" 2>&1 9>&-
}
# The package lists may be missing or outdated.
install "$@" || { timeout 300 apt-get -q update >"$log" 2>&1 9>&- && install "$@"; } ||
    skip "apt can't install $*: $(tail -n 1 "$log")"
are_there || skip "after the installation of $*, a program is still missing:$programs"
