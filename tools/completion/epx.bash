# SPDX-License-Identifier: Apache-2.0
# Completion of epx's command line in bash. The program prints the words itself, from its tables of options.
_epx() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]} words
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W "$("$1" --help=words 2>/dev/null)" -- "$current")
        return
    fi
    if [ "$command" = help ]; then
        mapfile -t COMPREPLY < <(compgen -W "$("$1" --help=words 2>/dev/null) environment" -- "$current")
        return
    fi
    words=$("$1" "$command" --help=words </dev/null 2>/dev/null) || return
    if [ "$before" = = ] && [ "$COMP_CWORD" -ge 3 ]; then # bash takes --option=value for three words
        before=${COMP_WORDS[COMP_CWORD - 2]}
    elif [ "$current" = = ]; then
        current=
    fi
    if [[ $before == --* ]] && grep -q -- "^$before=" <<<"$words"; then # a value: one of a list, or a file
        words=$(sed -n "s/^$before= *//p" <<<"$words")
        if [ -n "$words" ]; then
            mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
        else
            mapfile -t COMPREPLY < <(compgen -f -- "$current")
        fi
    elif [[ $current == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(sed 's/=.*//' <<<"$words")" -- "$current")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
    fi
}
complete -o filenames -F _epx epx
