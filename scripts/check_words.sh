#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_words.sh [FILE]...: no file has a word that this project has given up for one of the field. What is dated keeps
# the words of its day: CHANGELOG.md and docs/notes.
set -euo pipefail
cd "$(dirname "$0")/.."

# Each is a regular expression (Perl's, any case) of a word, or of a part of a name between underscores; behind it the
# word to use. Ordinary English words that were names once (say, hear, answer, line, near) are looked for where they can
# only be names: with an underscore, in front of a parenthesis, behind `struct`, `->` or a dot.
words='
    muster(s|ed|ing)?                 membership
    errands?                          request
    patience|patient                  budget, timeout
    blam(es?|ed|ing)                  waiting_for, culprit
    lends?|lent|lending|lender        export, register
    borrow(s|ed|ing|er)?              import
    (?<!-)boards?                     directory, bench_shm
    crews?                            block
    landing                           recv buffer
    agreements?                       signature, membership round
    stars?|(?<!is_)leaf|leaves_of     allgather, client
    plant(s|ed)?                      inject_bug
    keep_forever                      leak_on_purpose
    (?<!Hugging\s)face                compat
    conductors?|players?              driver, runner
    scenes?|ponds?|wild               fixture, blocking_net, chaos_net
    hangs?_up|hung_up|ear|visitors?   close, rx, pending
    note_of_abort|(?-i:NOTE_\w+)     header, alarm
    (?<!\w)(say|hears?|heard)(_\w+|(?=\()) send, recv, publish, print
    \w+_(say|hear|heard)(?!_)         send, recv, publish, print
    (?<!\w)answer(_\w+|(?=\()) reply, result
    \w+_answers?(?!_)                 reply, result
    struct\s+(line|lane|post|note)(?!_) conn, nccl_case, descriptor, header
    (?<!\w)notice_\w+                slot
    (?<=->)doing|(?<=\w\.)doing       state
    \w+_(near|far)(?!_)               local, remote, one_node
    (?<!\w)(\w{2,4}_)?(near|far)_\w+ local, remote, one_node
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
    if grep -HnIiP "(?<![^\W_]|-)(?:$word)(?![^\W_]|-)" -- "${files[@]}"; then
        echo "^ $word: use $instead"
        found=1
    fi
done <<<"$words"
[ $found -eq 0 ] || exit 1
echo "${#files[@]} files: none has a word that was given up"
