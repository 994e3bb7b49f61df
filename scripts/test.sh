#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests, stage by stage; goes on after a failure and ends with "N passed, M failed, K skipped".
#
#   scripts/test.sh                make test, what a user runs: library, tool, Python, models, a minute of seeds
#   scripts/test.sh --check        make check, all stages: sanitizers, the other architecture, lint and docs too
#   scripts/test.sh STAGE...       those named, which must have what they need on this machine already
#   scripts/test.sh --quick        the daily loop: at most 3 minutes on 2 cores
#   scripts/test.sh --list         the stages, each with what it does
#
# The stages are in scripts/runner/stages.py; skips that are accepted in scripts/skips.txt; full logs in build-logs/.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
'') purpose=test ;;
--quick) purpose=quick ;;
--check) purpose=check ;;
*) purpose= ;;
esac
if [ -n "$purpose" ] && ! scripts/deps.sh --install $purpose; then
    echo "0 passed, 1 failed, 0 skipped"
    exit 1
fi
exec python3 -B scripts/runner/main.py "$@" </dev/null
