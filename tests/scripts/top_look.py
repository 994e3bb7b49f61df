#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""top_look.py EPX PID CONDITION [EXPRESSION]: waits until the condition holds for the group g, with ranks r, that the
process PID has started, as `epx top --json` shows it; then prints the expression."""
import json
import subprocess
import sys
import time


def is_ours(pid, ancestor):
    try:
        while pid > 1 and pid != ancestor:
            pid = int(open(f'/proc/{pid}/stat', encoding='ascii').read().rsplit(')', 1)[1].split()[1])
    except FileNotFoundError:
        return False
    return pid == ancestor


epx, ancestor, condition = sys.argv[1], int(sys.argv[2]), sys.argv[3]
seen = None
for _ in range(300):  # about 100 seconds
    shown = json.loads(subprocess.run([epx, 'top', '--json'], stdout=subprocess.PIPE, check=False).stdout)
    for g in shown['groups']:
        if not is_ours(g['here'][0]['pid'], ancestor):
            continue
        seen = names = {'g': g, 'r': {h['rank']: h for h in g['here']}}
        try:
            if eval(f'({condition})', names):
                if len(sys.argv) > 4:
                    print(eval(sys.argv[4], names))
                sys.exit(0)
        except KeyError:
            pass
    time.sleep(0.3)
print(json.dumps(seen and seen['g'], indent=1), file=sys.stderr)
sys.exit(1)
