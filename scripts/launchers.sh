#!/bin/sh
# Installs launchers of other systems, for the tests of `gradwire join`: Open MPI, MPICH, and Slurm
# with Munge.
#
#     scripts/launchers.sh && mpirun.openmpi --version
#
# About 30 MB to download, 130 MB on disk. Exit codes are those of apt.sh.
exec "$(dirname -- "$0")/apt.sh" mpirun.openmpi mpiexec.hydra srun slurmctld slurmd munged -- \
    --no-install-recommends openmpi-bin mpich slurm-wlm slurmctld slurmd munge
