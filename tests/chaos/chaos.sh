#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# chaos.sh [options of chaos.py]: in namespaces of its own, which end with it: network, mounts, processes.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ "${CHAOS_INSIDE:-}" != 1 ]; then
    PATH=$PATH:/usr/sbin:/sbin
    mine=(unshare --net --mount --pid --ipc --fork --kill-child --mount-proc)
    [ "$(id -u)" -eq 0 ] || mine+=(--map-root-user)
    if ! why=$("${mine[@]}" ip link set lo up 2>&1); then
        echo "skipped: may not make namespaces here: ${why##*$'\n'}"
        exit 77
    fi
    CHAOS_INSIDE=1 PATH=$PATH exec "${mine[@]}" bash "$0" "$@"
fi
mount -t tmpfs none /run && mkdir -p /run/netns || { echo "skipped: may not mount /run/netns" && exit 77; }
mount -t tmpfs none /dev/shm 2>/dev/null # files of others are not taken for leaks
# A Python with torch plays ranks too.
for python in ${CHAOS_PYTHON:-} "$here/../../.venv-test/bin/python" python3; do
    "$python" -c 'import torch' 2>/dev/null && set -- --python "$python" "$@" && break
done
exec python3 "$here/chaos.py" "$@"
