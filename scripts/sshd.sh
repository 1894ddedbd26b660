#!/bin/sh
# Prints the path of OpenSSH's server, for tests of `gradwire run` and `mpirun` over ssh.
#
#     "$(scripts/sshd.sh)" -V
#
# If it is missing, Debian's package is unpacked in a folder: its installation would start a server
# on this machine. Exit code 3: that can't be done; the reason is on standard error.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
folder=${CARGO_TARGET_DIR:-$here/../target}
mkdir -p "$folder"
folder=$(CDPATH='' cd -- "$folder" && pwd)/sshd
PATH=$PATH:/usr/sbin

skip() { printf 'sshd.sh: %s\n' "$*" >&2; exit 3; }

# libwrap0 is a library that only the server needs.
download() { apt-get -q download openssh-server libwrap0; }
unpack() {
    rm -rf ./*.deb unpacked
    download || { apt-get -q update && download; } || return
    for package in ./*.deb; do dpkg-deb -x "$package" unpacked || return; done
    cp -a unpacked/usr .
}

if command -v sshd; then exit 0; fi
server=$folder/usr/sbin/sshd
if [ ! -x "$server" ]; then
    "$here/apt.sh" dpkg-deb ssh -- --no-install-recommends openssh-client >&2 || exit
    mkdir -p "$folder"
    cd "$folder"
    exec 9>lock
    flock 9
    [ -x "$server" ] || unpack >log 2>&1 9>&- ||
        skip "apt can't download openssh-server: $(tail -n 1 log)"
    exec 9>&-
fi
printf '%s\n' "$server"
