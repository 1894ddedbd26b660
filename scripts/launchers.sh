#!/bin/sh
# Installs launchers of other systems, for the tests of `gradwire join`: Open MPI, MPICH, and Slurm
# with Munge.
#
#     scripts/launchers.sh && mpirun.openmpi --version
#
# Where they are missing, root installs Debian's packages with apt (once; about 30 MB to download,
# 130 MB on disk). Messages go to standard error. If they can't be installed, the reason is printed
# there, and the exit code is 3: tests that need them are skipped.
set -eu

folder=${CARGO_TARGET_DIR:-$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)/target}

skip() { printf 'launchers.sh: %s\n' "$*" >&2; exit 3; }

# Programs of root are not on every user's PATH.
PATH=$PATH:/usr/sbin
are_there() {
    for program in mpirun.openmpi mpiexec.hydra srun slurmctld slurmd munged; do
        command -v "$program" >/dev/null || return 1
    done
}

are_there && exit 0
for program in apt-get flock timeout; do
    command -v "$program" >/dev/null || skip "$program is missing; install MPI and Slurm"
done
[ "$(id -u)" = 0 ] || skip "only root can install packages; install MPI and Slurm"

mkdir -p "$folder"
# If another process is installing something, waits until it is done.
exec 9>"$folder/apt.lock"
flock -w 600 9 || skip "another process has been installing packages for ten minutes"
are_there && exit 0
log=$folder/launchers.log
install() {
    DEBIAN_FRONTEND=noninteractive timeout 400 apt-get -q -y install --no-install-recommends \
        openmpi-bin mpich slurm-wlm slurmctld slurmd munge >"$log" 2>&1 9>&-
}
# The package lists may be missing or outdated.
install || { timeout 300 apt-get -q update >"$log" 2>&1 9>&- && install; } ||
    skip "apt can't install Open MPI, MPICH and Slurm: $(tail -n 1 "$log")"
are_there || skip "Debian's packages lack a program here"
