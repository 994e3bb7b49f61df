# SPDX-License-Identifier: Apache-2.0
"""One rank in Python, started by `epx run` (sigactions.sh), while a group exists and after it: Ctrl-C raises
KeyboardInterrupt, a handler of SIGTERM is called, faulthandler reports SIGSEGV, and the kernel has the same signals as
caught, ignored and blocked as before."""

import faulthandler
import os
import signal
import sys
import tempfile

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


terminated = []
report = tempfile.TemporaryFile()


def terminate(when):
    count = len(terminated)
    os.kill(os.getpid(), signal.SIGTERM)
    if len(terminated) != count + 1:
        sys.exit("%s: the handler of SIGTERM was not called" % when)


def crash(when):
    """A child gets SIGSEGV: faulthandler, enabled before the group, writes where it was and lets the signal end it."""
    size = os.fstat(report.fileno()).st_size
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(3)
    status = os.waitpid(child, 0)[1]
    text = os.pread(report.fileno(), 10000, size)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGSEGV or b"in crash" not in text:
        sys.exit("%s: faulthandler has not reported SIGSEGV (status %d)" % (when, status))


def check(when, before):
    interrupt(when)
    terminate(when)
    crash(when)
    if kernel_view() != before:
        sys.exit("%s: %s, before %s" % (when, kernel_view(), before))


def main(fails):
    signal.signal(signal.SIGTERM, lambda *_: terminated.append(1))
    faulthandler.enable(report)
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
