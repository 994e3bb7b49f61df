#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Completion in bash and zsh (tools/completion): commands, options, values of options, files.
set -uo pipefail

. "$(dirname "$0")/../lib/script.sh"
epx=$(realpath "$epx")
cd "$work" && touch a_file || exit 1

bash_words() { # WORD...: what bash offers for the last one
    (
        . "$root/tools/completion/epx.bash"
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        _epx "$epx"
        printf '%s\n' "${COMPREPLY[@]}"
    ) | LC_ALL=C sort | paste -sd' '
}

zsh_words() { # WORD...: what zsh is told to choose from; zsh itself compares them with what was typed
    zsh -f -c 'compadd() { shift; print -l -- $@ }; _files() { print -l -- * }
        words=("${@:2}") CURRENT=$#words; PREFIX=$words[-1]; complete() { source $1 }; complete $1' \
        - "$root/tools/completion/_epx" "$@" | LC_ALL=C sort | paste -sd' '
}

same() { # WHAT EXPECTED GOT
    [ "$2" = "$3" ] && echo "ok: $1" || fail "$1: expected '$2', got '$3'"
}

has() { # WHAT WORD GOT
    [[ " $3 " == *" $2 "* ]] && echo "ok: $1" || fail "$1: expected '$2' among '$3'"
}

same "bash: a command" "top trace" "$(bash_words "$epx" t)"
same "bash: an option" "--json" "$(bash_words "$epx" top --j)"
same "bash: help of a command" "environment ep-bench" "$(bash_words "$epx" help e)"
same "bash: values of an option" "groups hot uniform zipf" "$(bash_words "$epx" sim --routing '')"
same "bash: a value behind =" "cpu" "$(bash_words "$epx" bench --device = cp)"
same "bash: a file" "a_file" "$(bash_words "$epx" trace a_)"
while read -r command; do
    [ "$command" = help ] || [ "$command" = version ] || has "bash: options of $command" --help \
        "$(bash_words "$epx" "$command" --h)"
done < <("$epx" --help=words)
if command -v zsh >/dev/null; then
    has "zsh: a command" top "$(zsh_words "$epx" t)"
    has "zsh: an option" --json "$(zsh_words "$epx" top --j)"
    has "zsh: values of an option" zipf "$(zsh_words "$epx" sim --routing '')"
    same "zsh: a file" "a_file" "$(zsh_words "$epx" trace a_)"
fi
finish || exit
command -v zsh >/dev/null || skip "no zsh here"
