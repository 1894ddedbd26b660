#!/bin/sh
# Prints the path of Chromium, for the tests of the status page:
#
#     chromium=$(scripts/chromium.sh) && "$chromium" --version
#
# If it is on the PATH, that one is used. Otherwise, root installs Debian's package with apt (once;
# about 100 MB to download, 400 MB on disk), because it needs many libraries. Exit codes are those
# of apt.sh.
set -eu

"$(dirname -- "$0")/apt.sh" chromium -- chromium
command -v chromium
