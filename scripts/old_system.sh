#!/usr/bin/env bash
# Runs a wheel's programs on Debian 11, in a root file system that debootstrap makes in target/.
#
#     scripts/old_system.sh WHEEL        # gradwire bench allreduce on two ranks
#     scripts/old_system.sh --missing    # prints what is missing here; the exit code is then 1
#
# Debian 11 has glibc 2.31, and its Python is too old for the package: only the programs are tried.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/target/debian-11
# scripts/apt.sh has it too: programs of root are not on every user's PATH.
PATH=$PATH:/usr/sbin

missing() {
    [ "$(uname -m)" = x86_64 ] || { echo "this machine is $(uname -m)"; return; }
    [ "$(id -u)" = 0 ] || { echo "only root can make and enter a root file system"; return; }
    command -v unshare >/dev/null || { echo "unshare is not installed"; return; }
    scripts/apt.sh debootstrap -- debootstrap 2>/dev/null || echo "debootstrap is not installed"
}
reason=$(missing)
if [ "${1:-}" = --missing ]; then
    [ -z "$reason" ] || { printf '%s\n' "$reason"; exit 1; }
    exit 0
fi
[ -z "$reason" ] || { printf 'old_system.sh: %s\n' "$reason" >&2; exit 1; }

if [ ! -e "$folder/done" ]; then
    rm -rf "$folder"
    debootstrap --variant=minbase bullseye "$folder"
    touch "$folder/done"
fi
rm -rf "$folder/wheel" && mkdir "$folder/wheel"
python3 -m zipfile -e "$1" "$folder/wheel"
programs=$(cd "$folder/wheel" && echo gradwire-*.data/scripts)
chmod +x "$folder/wheel/$programs"/*
# The mounts end with their namespace.
export folder programs
unshare --mount --pid --fork bash -euc '
    mount -t proc proc "$folder/proc"
    mount --bind /dev "$folder/dev"
    mount -t tmpfs shm "$folder/dev/shm"
    exec chroot "$folder" sh -euc "
        ldd --version | head -n 1
        /wheel/$programs/gradwired --version
        /wheel/$programs/gradwire bench allreduce -np 2 -b 4 -e 4M -f 32
    "'
