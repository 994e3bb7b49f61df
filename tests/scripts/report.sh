#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `epx bench sweep --report`: the page in headless Chromium. No console error, nothing is fetched, every plot has the
# points that the numbers in the page have, dark and light have their colours, it prints; --compare reads it back.
# ctest: cost=15 labels=slow
set -uo pipefail

. "$(dirname "$0")/../lib/bench_cli.sh"
small=(--hidden 512 --experts 16 --topk 4 --iters 1 --warmup 0)

expect 0 "a sweep writes a page" sweep "${small[@]}" --ranks 2 --tokens 8 --over-tokens 1,8 --over-ranks 1,2 \
    --report "$work/page.html" &&
    says "and says where" "The report is in"
page=$work/page.html

# The numbers in the page are those of --json, and can be compared.
expect 0 "a page is compared with itself" --compare "$page" --new "$page" &&
    says "nothing has changed" "21 rows compared, 0 changed beyond noise"
sed -E 's/"us_(p50|low|high)":([0-9]+)/"us_\1":9\2/g' "$page" >"$work/slow.html"
expect 0 "a slower one" --compare "$page" --new "$work/slow.html" && says "is found" "SLOWER"
expect 0 "and the other way round" --compare "$work/slow.html" --new "$page" && says "too" "faster"
expect 0 "numbers for a run" ll "${small[@]}" --ranks 2 --tokens 4 --json --report "$work/it's.html" &&
    cp "$work/out" "$work/old.json" && mv "$work/it's.html" "$work/one.html"
grep -qF "/it'\''s.html'</pre>" "$work/one.html" && echo "ok: its command can be pasted" || fail "a quoted file name"
grep -q "<h3>Time, low latency (2 ranks, 4 tokens per rank)" "$work/one.html" &&
    ! grep -q "over tokens\|over ranks" "$work/one.html" && echo "ok: one run has bars" || fail "one run has no lines"
expect 0 "which is measured again" --compare "$work/old.json" && says "by its own options" "2 rows compared"
expect 2 "a page that cannot be written" sweep --report /no/such/page.html &&
    says "is refused before anything is measured" "cannot write '/no/such/page.html': No such file or directory"
expect 2 "a sweep of which one run is wrong" sweep "${small[@]}" --ranks 2 --vs ofi && ! grep -q "us" "$work/out" &&
    says "is refused before the first" "--vs ofi compares what crosses between nodes" || fail "a wrong run comes late"
expect 2 "--new without --compare" ll --new x && says "is refused" "--new belongs to --compare"
expect 2 "a file that is not there" --compare "$work/nothing.json" && says "is named" "nothing.json"

chromium=$(command -v chromium || command -v chromium-browser)
if [ -z "$chromium" ]; then
    [ "$failures" -eq 0 ] || exit 1
    echo "no Chromium here: the page is not opened in a browser"
    exit 77
fi

browse() { # OUTPUT FILE OPTION...: opens the page
    local out=$1 file=$2
    shift 2
    timeout 200 "$chromium" --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars \
        --user-data-dir="$work/profile" --window-size=1240,3600 --enable-logging=stderr "$@" "file://$file" \
        >"$out" 2>"$work/log"
}

browse "$work/dom" "$page" --dump-dom || fail "Chromium opens the page"
if grep -E "CONSOLE|Uncaught|ERR_" "$work/log"; then
    fail "the console is empty"
else
    echo "ok: the console is empty"
fi
sed 's|</body>|<script>nothing();</script></body>|' "$page" >"$work/broken.html"
browse "$work/broken.dom" "$work/broken.html" --dump-dom
grep -q CONSOLE "$work/log" && echo "ok: an error would be seen" || fail "an error in a page is not seen"

python3 "$(dirname "$0")/report_dom.py" "$work/dom" || fail "the plots have their points"
browse "$work/ignored" "$page" --screenshot="$work/light.png" --blink-settings=preferredColorScheme=1
browse "$work/ignored" "$page" --screenshot="$work/dark.png" --blink-settings=preferredColorScheme=0
browse "$work/ignored" "$page" --print-to-pdf="$work/page.pdf"
python3 "$(dirname "$0")/report_dom.py" --colours "$work/light.png" "$work/dark.png" || fail "dark and light"
[ "$(head -c 4 "$work/page.pdf")" = "%PDF" ] && echo "ok: it prints" || fail "it prints"
[ -z "${REPORT_KEEP:-}" ] || cp "$work"/page.* "$work"/*.png "$REPORT_KEEP"
finish
