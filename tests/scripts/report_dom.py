#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""report_dom.py DOM: the plots of a page, as Chromium has them, have the points of the numbers in the page.
report_dom.py --colours LIGHT DARK: screenshots of both have a light and a dark background."""
import json
import re
import struct
import sys
import zlib


def figures(dom):
    """(title, body) of each figure."""
    return re.findall(r'<figure class="\w+" id="plot-\d+"><h3>([^<]*)</h3>(.*?)</figure>', dom, re.S)


def close(a, b):
    return abs(a - b) <= 1e-4 * max(abs(a), abs(b))


def expect_values(title, body, wanted):
    """The y values of a plot are exactly those that are wanted, and lie inside the picture."""
    got = sorted(float(v) for v in re.findall(r'<circle[^>]*data-y="([^"]*)"', body))
    wanted = sorted(wanted)
    assert len(got) == len(wanted), (title, got, wanted)
    assert all(close(a, b) for a, b in zip(got, wanted)), (title, got, wanted)
    for x, y in re.findall(r'cx="([^"]*)" cy="([^"]*)"', body):
        assert 0 <= float(x) <= 540 and 0 <= float(y) <= 300, (title, x, y)


def check_dom(path):
    dom = open(path, encoding='utf-8').read()
    rows = json.loads(re.search(r'id="epx-numbers">(.*?)</script>', dom, re.S).group(1))
    plots = dict(figures(dom))
    names = {'ll': 'low latency', 'ht': 'high throughput'}
    seen = 0
    for mode, name in names.items():
        of_mode = [r for r in rows if r['mode'] == mode]
        for title, body in plots.items():
            if title.startswith(f'Time over tokens, {name}'):
                ranks = int(re.search(r'\((\d+) ranks\)', title).group(1))
                wanted = [r[k] for r in of_mode if r['ranks'] == ranks for k in ('us_p50', 'us_p99')]
            elif title.startswith(f'Time over ranks, {name}'):
                tokens = int(re.search(r'\((\d+) tokens', title).group(1))
                wanted = [r['us_p50'] for r in of_mode if r['tokens'] == tokens]
            elif title == f'Bandwidth over bytes, {name}':
                wanted = [r['wire_GBps'] for r in of_mode if r['ranks'] == 2 and r.get('wire_GBps')]
            else:
                continue
            expect_values(title, body, wanted)
            seen += 1
    assert seen == 6, plots.keys()
    for title in ('Time per phase', 'Host: until', 'Dispatch, share of the bound'):
        body = next((b for t, b in plots.items() if t.startswith(title)), None)
        assert body and body.count('<rect') >= 2, (title, plots.keys())
    assert dom.count('<tr><td>') == len(rows), 'the table has all rows'
    assert not re.search(r'(src|href)="(?!data:|#)', dom), 'nothing is fetched'
    assert 'epx bench sweep' in dom and 'nan' not in dom.lower().split('<style>')[0], 'the command is there'
    print(f'ok: {len(plots)} plots, {dom.count("<circle")} points, {len(rows)} rows')


def first_pixel(path):
    """Of a PNG: no filter changes the first one."""
    data, at, pixels = open(path, 'rb').read(), 8, b''
    while at < len(data):
        length, kind = struct.unpack('>I4s', data[at:at + 8])
        pixels += data[at + 8:at + 8 + length] if kind == b'IDAT' else b''
        at += 12 + length
    return zlib.decompress(pixels)[1:4]


if sys.argv[1] == '--colours':
    light, dark = first_pixel(sys.argv[2]), first_pixel(sys.argv[3])
    assert min(light) > 200 and max(dark) < 60, (list(light), list(dark))
    print('ok: dark and light')
else:
    check_dom(sys.argv[1])
