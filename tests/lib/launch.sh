# SPDX-License-Identifier: Apache-2.0
# Read, after script.sh, by tests that start ranks as launchers do: runs a command, counts lines of its output.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for name in RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT EPX_MASTER_PORT EPX_JOB_ID TORCHELASTIC_RUN_ID \
    $(compgen -e | grep -E '^(SLURM|OMPI_COMM|PMI|PMIX)_'); do
    unset "$name"
done

# check NAME EXPECTED COMMAND...: EXPECTED is an exit code, or "any" but 0; output in $work/out. A program has a time
# limit; a function sets one itself.
check() {
    local name=$1 expected=$2 code since=$SECONDS limit=(timeout -k 1 200)
    shift 2
    [ "$(type -t "$1")" != function ] || limit=()
    ${limit[@]+"${limit[@]}"} "$@" >"$work/out" 2>&1 </dev/null
    code=$?
    [ "$expected" = any ] && [ $code -ne 0 ] && expected=$code
    if [ "$code" = "$expected" ]; then
        echo "ok: $name ($((SECONDS - since)) s)"
    else
        fail "$name: exit code $code, expected $expected"
    fi
}

# has N TEXT: N lines of the output contain the text.
has() {
    local count
    count=$(grep -cF -- "$2" "$work/out")
    [ "$count" = "$1" ] || fail "$count lines with \"$2\", expected $1"
}
