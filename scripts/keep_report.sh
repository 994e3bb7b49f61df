#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# keep_report.sh FOLDER COMMAND...: runs a compiler and keeps what it says of registers and stack in FOLDER/SOURCE.txt;
# anything else that it says is shown. A source that does not compile has no report, and no old one either.
# (tests/scripts/cuda_spills.sh reads the reports.)
set -u
folder=$1
shift
name=report
for word in "$@"; do
    case $word in *.cu | *.hip) name=$(basename "$word") ;; esac
done
mkdir -p "$folder"
"$@" >"$folder/$name.new" 2>&1
rc=$?
grep -vE '^ptxas info|^    [0-9]+ bytes stack frame|^[0-9]+ bytes stack frame' "$folder/$name.new" >&2
rm -f "$folder/$name.txt"
[ $rc -ne 0 ] || mv "$folder/$name.new" "$folder/$name.txt"
rm -f "$folder/$name.new"
exit $rc
