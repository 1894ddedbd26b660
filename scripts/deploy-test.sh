#!/bin/sh
# Checks deploy/prometheus/ with promtool: the configuration, the rules and the alerts (`make
# deploy-test`). python/tests/test_deploy.py and python/tests/test_deploy_live.py test the
# dashboards and a real job.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
code=0
programs=$("$root/scripts/prometheus.sh") || code=$?
if [ "$code" = 3 ]; then
    echo "deploy-test.sh: skipped, for the reason above" >&2
    exit 0
fi
[ "$code" = 0 ] || exit "$code"
cd "$root/deploy/prometheus"
timeout 60 "$programs/promtool" check config prometheus.yml
timeout 60 "$programs/promtool" check rules rules/*.yml
timeout 60 "$programs/promtool" test rules tests/*.yml
