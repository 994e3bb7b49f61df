# SPDX-License-Identifier: Apache-2.0
# Read, after script.sh, by tests whose hosts are network namespaces.

# in_namespaces ARGUMENT [OPTION...]: starts the script again, with the argument "inside", in namespaces of its own that
# end with it; returns there. OPTION: more of unshare's.
in_namespaces() {
    local argument=$1 mine tool why
    shift
    [ "$argument" != inside ] || return 0
    for tool in ip nsenter unshare; do
        command -v $tool >/dev/null || PATH=$PATH:/usr/sbin:/sbin
        command -v $tool >/dev/null || skip "there is no $tool"
    done
    mine=(unshare --net --mount --pid --fork --kill-child --mount-proc "$@")
    [ "$(id -u)" -eq 0 ] || mine+=(--map-root-user)
    why=$("${mine[@]}" ip link set lo up 2>&1) || skip "may not make namespaces here: ${why##*$'\n'}"
    export PATH
    rm -rf "$work"
    exec "${mine[@]}" bash "$0" inside
}

# ip(8) keeps the names of network namespaces in /run/netns.
own_run_folder() { mount -t tmpfs none /run && mkdir -p /run/netns || skip "may not mount /run/netns"; }
