#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_needed.sh [--libc VERSION] FILE...: programs and libraries of a wheel, which run on a plain Debian: they need
# libraries of libc and gcc or the wheel's own, no C++ library, and no symbol of a newer libc than VERSION.
set -euo pipefail
most=
[ "${1:-}" != --libc ] || { most=$2 && shift 2; }
[ $# -gt 0 ] || { echo "usage: scripts/check_needed.sh [--libc VERSION] FILE..." && exit 2; }
bad=0
for file; do
    needed=$(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -vE '^(lib(epx|nccl_ep|c|m|dl|rt|pthread|gcc_s)|ld-linux-[a-z0-9_-]+)\.so' || true)
    [ -z "$needed" ] || { echo "$file: expected no library but those of libc and gcc, got" $needed && bad=1; }
    newest=$(readelf -V -W "$file" | grep -oE 'GLIBC_[0-9.]+' | sed 's/GLIBC_//' | sort -Vu | tail -1 || true)
    [ -z "$most" ] || [ "$(printf '%s\n' "${newest:-0}" "$most" | sort -V | tail -1)" = "$most" ] ||
        { echo "$file: expected libc $most or older, got $newest" && bad=1; }
done
exit $bad
