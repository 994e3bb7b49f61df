#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_words.sh [FILE]...: no file has a word that this project has given up for one of the field. What is dated keeps
# the words of its day: CHANGELOG.md and docs/notes.
set -euo pipefail
cd "$(dirname "$0")/.."

# Each is a regular expression of a whole word (Perl's, any case); behind it the word to use. Ordinary English words
# that were names once (say, hear, answer, line) are looked for where they can only be names: with an underscore, in
# front of a parenthesis, behind `struct`.
words='
    musters?                          membership
    errands?                          request
    patience|patient                  budget, timeout
    blames?|blamed                    waiting_for, culprit
    lends?|lent|lending|borrows?      export, import, register
    epx_lend|EPX_LEND                 epx_register, EPX_REGISTER
    crews?                            block
    landing(_\w+)?                    recv buffer
    agreements?                       signature, membership round
    stars?|leaf|leaves_of             allgather, client
    plant(s|ed)?(_\w+)?               inject_bug
    keep_forever                      leak_on_purpose
    (?<!Hugging\s)face                compat
    conductors?|players?|seats?       driver, runner, rank
    scenes?|ponds?|wild(_\w+)?        fixture, blocking_net, chaos_net
    hang_up|ear|visitors?             close, rx, pending
    note_of_abort|(?-i:NOTE_\w+)     header, alarm
    (say|hears?|heard)(_\w+|(?=\())  send, recv, publish, print
    \w+_(say|hear|heard)             send, recv, publish, print
    answer(_\w+|(?=\())|\w+_answers? reply, result
    struct\s+(line|lane|post|note)    conn, nccl_case, descriptor, header
    face_the_\w+|notice_\w+          compat, slot
'

if [ $# -eq 0 ]; then
    not='^(CHANGELOG\.md|LICENSE|docs/notes/|tests/fuzz/corpus/|scripts/(check_words\.sh|runner/test_scripts\.py))'
    mapfile -t files < <(git ls-files | grep -vE "$not")
else
    files=("$@")
fi
found=0
while read -r word instead; do
    [ -n "$word" ] || continue
    if grep -HnIiP "(?<![\w-])(?:$word)(?![\w-])" -- "${files[@]}"; then
        echo "^ $word: use $instead"
        found=1
    fi
done <<<"$words"
[ $found -eq 0 ] || exit 1
echo "${#files[@]} files: none has a word that was given up"
