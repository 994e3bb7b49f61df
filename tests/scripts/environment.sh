#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# docs/environment.md names exactly the EPX_ variables that the library and the Python packages read. (That it agrees
# with the table in src/util/env.c, which alone may read those of the library, is a test of test_util.c.)
set -eu
. "$(dirname "$0")/../lib/script.sh"

sed -n 's/^| `\(EPX_[A-Z_]*\)`.*/\1/p' "$root/docs/environment.md" | sort -u >"$work/documented"
find "$root/src" "$root/standin" "$root/python/epx" "$root/python/deep_ep" -name '*.[ch]' \
    ! -path "$root/src/util/env.c" -o -name '*.py' |
    xargs grep -hoE '"EPX_[A-Z_]+"' |
    tr -d '"' | sort -u >"$work/read"
if [ ! -s "$work/documented" ] || ! diff -u "$work/documented" "$work/read"; then
    die "documented (-) and read (+) variables differ"
fi
if grep -E '^\| `EPX_[A-Z_]+` \|[^|]*\| *\|' "$root/docs/environment.md"; then
    die "a variable without a default"
fi
if grep -rnE 'getenv\("EPX_' "$root/src" "$root/standin"; then
    die "EPX_ variables are read through util/env.h only"
fi
echo "$(wc -l <"$work/read") variables are read and documented"

# Pages have the tables that the program prints, and the explanation of a variable is to be had without a page.
python3 -B "$root/scripts/doc_tables.py" --check --build "$build"
"$epx" help environment >"$work/help"
while read -r name; do
    grep -q "^$name\b" "$work/help" || die "epx help environment lacks $name"
done <"$work/documented"
if "$epx" help environment --sideways 2>"$work/err" || ! grep -q "'--sideways'" "$work/err"; then
    die "epx help environment takes any argument"
fi
