#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fuzz_injected.sh [NAME]...: shows that the harnesses of docs/fuzzing.md find bugs. In a copy of the tree each bug of
# tests/fuzz/injected.txt (or those of the harnesses named) takes the place of the right text; scripts/fuzz.sh must find
# it within FUZZ_SECONDS (60). Prints a line per bug; exit 0 if all were found, 77: no libFuzzer here.
set -uo pipefail
cd "$(dirname "$0")/.."
export FUZZ_SECONDS=${FUZZ_SECONDS:-60}
tree=build-fuzz-injected/tree
mkdir -p "$tree"
git ls-files -z | tar --null -T - -cf - | tar -xf - -C "$tree" || exit 1

replace() { # FILE TEXT WRONG
    python3 - "$@" <<'PY'
import sys

path, text, wrong = sys.argv[1:]
with open(path, encoding="utf-8") as file:
    source = file.read()
if source.count(text) != 1:
    sys.exit(f"{path} has {source.count(text)} times: {text}; expected once")
with open(path, "w", encoding="utf-8") as file:
    file.write(source.replace(text, wrong))
PY
}

failed=0 number=0
while IFS= read -r line; do
    number=$((number + 1))
    [[ $line =~ ^([a-z_]+)\ ::\ ([^ ]+)\ ::\ (.+)\ ::\ (.+)$ ]] || continue
    name=${BASH_REMATCH[1]} file=${BASH_REMATCH[2]} text=${BASH_REMATCH[3]} wrong=${BASH_REMATCH[4]}
    [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
    replace "$tree/$file" "$text" "$wrong" || { failed=$((failed + 1)) && continue; }
    (cd "$tree" && scripts/fuzz.sh "$name") >build-fuzz-injected/log 2>&1
    rc=$?
    cp "$file" "$tree/$file"
    [ $rc -ne 77 ] || { tail -1 build-fuzz-injected/log && exit 77; }
    found=$(sed -n "s/^$name .* FAILED: //p" build-fuzz-injected/log)
    if [ -n "$found" ]; then
        runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$tree/build-logs/fuzz/$name.log")
        echo "found: $name: $file: $wrong: after ${runs:-?} executions: $found"
    else
        tail -5 build-fuzz-injected/log
        echo "NOT FOUND: tests/fuzz/injected.txt:$number: $name: $file: $wrong"
        failed=$((failed + 1))
    fi
done <tests/fuzz/injected.txt
echo "$failed injected bugs were not found"
[ $failed -eq 0 ]
