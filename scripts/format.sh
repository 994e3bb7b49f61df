#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks (or with --fix, applies) .clang-format on the tracked sources. Versions format differently, so only 14 is
# asked; without it the check exits 77, skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

tool=
for candidate in clang-format-14 clang-format; do
    if "$candidate" --version 2>/dev/null | grep -q 'version 14\.'; then
        tool=$candidate
        break
    fi
done
if [ -z "$tool" ]; then
    echo "clang-format 14 is not here: formatting not checked"
    exit 77
fi

if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    mapfile -t files < <(git ls-files --cached -- '*.c' '*.h' '*.cu' '*.cuh' '*.hip' |
        while read -r f; do [ -f "$f" ] && echo "$f"; done)
else
    mapfile -t files < <(find include src sim standin bench tools tests examples \
        -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh')
fi
[ ${#files[@]} -eq 0 ] && exit 0

if [ "${1:-}" = --fix ]; then
    "$tool" -i "${files[@]}"
    exit 0
fi

# One process for all: to start it takes longer than to look at a file. It ends with 0 whatever it finds, and with
# another status if it cannot read a file.
found=$("$tool" --dry-run --ferror-limit=1 "${files[@]}" 2>&1) || { echo "$found" && exit 1; }
mapfile -t bad < <(sed -nE 's/^(.*):[0-9]+:[0-9]+: .*clang-format.*/\1/p' <<<"$found" | sort -u)
if [ ${#bad[@]} -ne 0 ]; then
    printf '%s is not formatted\n' "${bad[@]}"
    echo "${#bad[@]} of ${#files[@]} files differ from .clang-format: run make format"
    exit 1
fi
echo "${#files[@]} files formatted"
