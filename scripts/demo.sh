#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# demo.sh BUILD_DIR: both modes with 8 ranks, every result checked against the oracle.
set -euo pipefail
epx=$1/epx
if [ ! -x "$epx" ]; then
    echo "there is no $epx"
    exit 77
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

echo "Low latency: 8 ranks, a decode step"
"$epx" bench ll --ranks 8 --check
echo
echo "High throughput: 8 ranks, a prefill step"
"$epx" bench ht --ranks 8 --check
echo
echo "Next: $epx bench sweep --report report.html makes a page with plots for your browser"
