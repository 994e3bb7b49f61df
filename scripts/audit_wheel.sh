#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# audit_wheel.sh WHEEL...: what auditwheel finds in wheels. It fails unless each could carry a manylinux tag: a wheel
# that needs a library which other machines may lack could not. auditwheel comes from PyPI, into build-audit.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { echo "usage: scripts/audit_wheel.sh WHEEL..." && exit 2; }
venv=build-audit
[ -x $venv/bin/auditwheel ] || {
    python3 -m venv $venv
    $venv/bin/pip --quiet --disable-pip-version-check --no-input install auditwheel
}
for wheel; do
    report=$($venv/bin/auditwheel show "$wheel" 2>&1) || true # shown below
    tag=$(tr -d '\n' <<<"$report" | grep -oE 'manylinux_[0-9]+_[0-9]+_[a-z0-9_]+' | head -1 || true)
    if [ -z "$tag" ]; then
        echo "$report"
        echo "audit_wheel: $wheel: expected a manylinux tag, got none"
        exit 1
    fi
    echo "$(basename "$wheel"): $tag"
done
