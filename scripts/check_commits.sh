#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_commits.sh [RANGE]: the messages of the commits of RANGE, by default all since this script exists, are
# as the hook wants them. Exit 77 where there is no history (a tarball, a shallow clone).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/githooks/commit-msg

if ! git rev-parse --git-dir >/dev/null 2>&1 || [ "$(git rev-parse --is-shallow-repository)" = true ]; then
    echo "no history here: messages of commits not checked"
    exit 77
fi
range=${1:-}
if [ -z "$range" ]; then
    first=$(git log -1 --diff-filter=A --format=%H -- scripts/check_commits.sh)
    [ -n "$first" ] || { echo "no commit has added this script: nothing to check" && exit 77; }
    range=$first..HEAD
fi
bad=0 count=0
while IFS= read -r -d '' message; do
    check_message <<<"${message#*$'\n'}" || { echo "    in commit ${message:0:12}" && bad=1; }
    count=$((count + 1))
done < <(git log --no-merges -z --format='%H%n%B' "$range")
[ $bad -eq 0 ] && echo "$count commit messages are as CONTRIBUTING.md asks"
[ $bad -eq 0 ]
