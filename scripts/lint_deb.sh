#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# lint_deb.sh FOLDER: lintian on the packages there; its errors are errors.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/deps.sh --install lintian
lintian --allow-root --fail-on error --suppress-tags bad-distribution-in-changes-file "$1"/*.changes
echo "lint_deb: no errors in $(find "$1" -maxdepth 1 -name '*.deb' | wc -l) packages"
