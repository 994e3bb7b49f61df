#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""trace_check.py FILE --ranks N --operations A,B [--nets]: spans of a thread nest, phases lie in their
operations, and no wait ends before the signal that ends it was given, as far as their clocks are known.
--gpu: operations of kernels that keep marks, on a track of their own. --slices: a wait went on in slices of half a
second, and no signal belongs to them."""
import argparse
import collections
import json

parser = argparse.ArgumentParser()
parser.add_argument('file')
parser.add_argument('--ranks', type=int)
parser.add_argument('--operations')
parser.add_argument('--nets', action='store_true')
parser.add_argument('--gpu', action='store_true')
parser.add_argument('--slices', action='store_true')
args = parser.parse_args()
events = json.load(open(args.file, encoding='utf-8'))['traceEvents']
TICK = 0.002  # microseconds have three decimals


def check_nesting(spans):
    """Of one thread: each span lies in the one that was open when it began, or behind it."""
    stack = []
    for e in sorted(spans, key=lambda e: (e['ts'], -e['dur'])):
        while stack and stack[-1]['ts'] + stack[-1]['dur'] <= e['ts'] + TICK:
            stack.pop()
        if stack:
            assert e['ts'] + e['dur'] <= stack[-1]['ts'] + stack[-1]['dur'] + TICK, (stack[-1], e)
        if e['cat'] == 'phase':
            assert any(o['cat'] == 'operation' and o['name'] == e['args']['of'] for o in stack), e
        stack.append(e)


names = {(e['pid'], e['tid']): e['args'] for e in events if e['name'] == 'thread_name'}
threads = collections.defaultdict(list)
for e in events:
    if e['ph'] == 'X':
        threads[e['pid'], e['tid']].append(e)
for spans in threads.values():
    check_nesting(spans)

ranks = {pid for pid, _ in threads}
assert ranks == set(range(args.ranks)), ranks
kernels = [e for e in events if e['ph'] == 'X' and names[e['pid'], e['tid']]['name'].startswith('gpu')]
operations = collections.Counter((e['pid'], e['name']) for e in (kernels if args.gpu else events)
                                 if e.get('cat') == 'operation')
for name in args.operations.split(','):
    assert all(operations[r, name] >= (1 if args.slices else 3) for r in ranks), (name, operations)
calls = {e['name'] for e in events if e.get('cat') == 'call'}
assert {'epx_dispatch', 'epx_combine', 'epx_stream_sync'} <= calls, calls

def known_us(e):
    """How exactly the clock of this event's track is known."""
    return names[e['pid'], e['tid']]['clock_error_ns'] / 1000


signals = {(e['pid'], e['args']['what']): e for e in events if e['ph'] == 'i'}
ended, nearest = 0, None
for e in events:
    if e.get('cat') != 'wait' or 'what' not in e.get('args', {}):
        continue
    given = signals.get((e['args']['peer'], e['args']['what']))
    assert given is not None, ('a wait ended without its signal', e)
    slack = TICK + known_us(e) + known_us(given)
    after = e['ts'] + e['dur'] - given['ts']
    assert after >= -slack, ('the signal came later', given, e)
    nearest = after if nearest is None else min(after, nearest)
    ended += 1
assert ended > 0, 'no wait was ended by a signal'
assert not args.slices or any(e.get('cat') == 'wait' and e['dur'] > 400e3 and 'what' not in e['args'] for e in events)
arrows = [collections.Counter(e['id'] for e in events if e['ph'] == p) for p in 'sf']
assert set(arrows[1]) <= set(arrows[0]), 'an arrow without a beginning'

puts = collections.defaultdict(dict)
for e in events:
    if e.get('cat') == 'put':
        puts[e['id']][e['ph']] = e['ts']
assert all(p['b'] <= p['e'] + TICK for p in puts.values())
if args.nets:
    batches = [e for e in events if e['name'] == 'proxy batch']
    windows = [e for e in events if e['ph'] == 'C']
    assert puts and batches and windows and all(e['args']['limit'] > 0 for e in windows)
    assert sum(e['args']['puts'] for e in batches) >= len(puts), 'more puts complete than batches post'
print(f'ok: {len(events)} events of {len(ranks)} ranks, {ended} waits after their signals, {len(puts)} puts')
if args.gpu:
    count = collections.Counter(e['cat'] for e in kernels)
    print(f"ok: kernels: {count['operation']} operations, {count['phase']} phases, {count['wait']} waits; clocks to "
          f"{max(known_us(e) for e in kernels):.1f} us; from a signal to the end of its wait at least {nearest:.1f} us")
