# SPDX-License-Identifier: Apache-2.0
"""One rank in Python, started by `epx run` (sigactions.sh): Ctrl-C raises KeyboardInterrupt while a group exists and
after it, and the handlers that the process has in the kernel's eyes are those from before."""

import os
import signal
import sys

import epx


LIBC = 0b11 << 31  # signals 32 and 33 are libc's own: it catches them from the first thread on


def kernel_view():
    """Signals that are blocked, ignored and caught, as the kernel has them."""
    with open("/proc/self/status", encoding="ascii") as status:
        fields = [line.split() for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
    return {name: "%016x" % (int(bits, 16) & ~LIBC) for name, bits in fields}


def interrupt(when):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000000):
            pass
    except KeyboardInterrupt:
        return
    sys.exit("%s: SIGINT raised no KeyboardInterrupt" % when)


def check(when, before):
    interrupt(when)
    if kernel_view() != before:
        sys.exit("%s: %s, before %s" % (when, kernel_view(), before))


def main(fails):
    before = kernel_view()
    try:
        group = epx.Group(num_experts=8, max_tokens_per_rank=8, max_hidden_bytes=256, alloc_bytes=1 << 20)
    except epx.EpxError:
        if not fails:
            raise
        check("after a group that could not be created", before)
        return
    if fails:
        sys.exit("the group was created")
    check("while a group exists", before)
    group.destroy()
    check("after the group", before)


main(sys.argv[1:] == ["fails"])
