#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lines have at most 120 columns: sources, scripts, Python, CMake and Markdown. Excepted in Markdown: tables, and blocks
# of code, which may show what a program prints.
set -euo pipefail
cd "$(dirname "$0")/.."
export LC_ALL=C.UTF-8 # columns are characters

mapfile -t files < <(git ls-files --cached -- '*.c' '*.h' '*.cu' '*.cuh' '*.hip' '*.sh' '*.py' '*.cmake' \
    '*CMakeLists.txt' Makefile .ci/run scripts/rxe/init | while read -r f; do [ -f "$f" ] && echo "$f"; done)
mapfile -t pages < <(git ls-files --cached -- '*.md' | while read -r f; do [ -f "$f" ] && echo "$f"; done)

long=$({
    grep -nE '^.{121,}' "${files[@]}" || true
    grep -nE '^.{121,}' "${pages[@]}" | grep -vE '^[^:]+:[0-9]+:( *\||    )' || true
} | sed -E 's/^([^:]+:[0-9]+):(.{60}).*/\1: \2.../')
if [ -n "$long" ]; then
    echo "$long"
    echo "$(wc -l <<<"$long") lines have more than 120 columns"
    exit 1
fi
echo "$((${#files[@]} + ${#pages[@]})) files: no line has more than 120 columns"
