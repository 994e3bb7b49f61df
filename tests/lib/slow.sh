# SPDX-License-Identifier: Apache-2.0
# slow N: N, times more where a busy process gets less than half of a core: for deadlines that are short only to save
# time. As tests/lib/slow.c, for scripts.
slow() {
    local TIMEFORMAT='%R %U' times
    times=$({ time awk 'BEGIN { for (i = 0; i < 5000000; i++) x += i }'; } 2>&1)
    awk -v n="$1" -v times="$times" 'BEGIN {
        split(times, t)
        share = t[2] > 0 ? t[1] / t[2] / 2 : 1
        printf "%d", n * (share < 1 ? 1 : share > 20 ? 20 : share) + 0.999
    }'
}
