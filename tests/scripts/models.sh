#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The protocols' models hold, and every broken variant is found, within the small bounds. ctest: cost=60 labels=slow serial
exec "$(dirname "$0")/../../scripts/check_models.sh"
