#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_symbols.sh libepx.so: it exports exactly the functions that epx.h marks EPX_API, each under a version.
set -euo pipefail
library=$(realpath "$1")
cd "$(dirname "$0")/.."

exported=$(nm -D --defined-only --with-symbol-versions "$library" | awk '$2 != "A" {print $NF}' | sort)
unversioned=$(grep -vE '@@EPX_[0-9.]+$' <<<"$exported" | sed '/^$/d' || true)
names=$(sed 's/@.*//' <<<"$exported" | sort -u)
declared=$(gcc -E -Iinclude -x c - <<<'#include "epx/epx.h"' | tr '\n' ' ' | grep -oE 'visibility\("default"\)[^;{]*' |
    grep -oE 'epx_[a-z0-9_]+ *\(' | tr -d ' (' | sort -u)

bad=0
report() { # sentence, names
    if [ -n "$2" ]; then
        echo "$1:" $2
        bad=1
    fi
}
report "exported, not epx_*" "$(grep -v '^epx_' <<<"$names" | sed '/^$/d' || true)"
report "exported without a version" "$unversioned"
report "exported, not declared in epx.h" "$(comm -23 <(echo "$names") <(echo "$declared") | sed '/^$/d')"
report "declared in epx.h, not exported" "$(comm -13 <(echo "$names") <(echo "$declared") | sed '/^$/d')"
[ "$bad" -eq 0 ] && echo "$(wc -l <<<"$names") symbols, all versioned"
[ "$bad" -eq 0 ]
