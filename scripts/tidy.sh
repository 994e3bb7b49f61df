#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clang-tidy (14 or newer) with the checks of .clang-tidy, on the files that a build compiles.
#
#   scripts/tidy.sh                    all files: half a minute on 2 cores
#   scripts/tidy.sh FILE...            these
#   scripts/tidy.sh --changed [BASE]   those that differ from BASE (origin/main, else HEAD)
#   scripts/tidy.sh --deep FILE...     these, by the analyzer too: seconds for each
#
# The compilation database is that of EPX_BUILD_DIR, build, build-dev or build-gcc, whichever has one; else one is
# configured in build-tidy. Exit status: 0, 1 (findings), 77 (no clang-tidy).
set -euo pipefail
cd "$(dirname "$0")/.."

# Null pointers and uninitialised values: the analyzer does not know that fail() never returns EPX_OK, and follows paths
# on which a function failed and its caller went on. Buffer handling: it asks for memcpy_s(), which C libraries do not
# have.
deep='clang-analyzer-*,-clang-analyzer-core.NullDereference,-clang-analyzer-core.NonNullParamChecker'
deep+=',-clang-analyzer-core.uninitialized.*,-clang-analyzer-core.UndefinedBinaryOperatorResult'
deep+=',-clang-analyzer-core.CallAndMessage,-clang-analyzer-unix.Malloc,-clang-analyzer-optin.*'
deep+=',-clang-analyzer-security.insecureAPI.DeprecatedOrUnsafeBufferHandling'

find_tool() {
    local candidate version
    for candidate in clang-tidy-14 clang-tidy clang-tidy-15 clang-tidy-16 clang-tidy-17 clang-tidy-18 clang-tidy-19; do
        version=$("$candidate" --version 2>/dev/null | sed -nE 's/.*version ([0-9]+)\..*/\1/p' | head -1) || continue
        [ "${version:-0}" -ge 14 ] && echo "$candidate" && return
    done
    return 1
}

find_database() {
    local folder
    for folder in ${EPX_BUILD_DIR:+"$EPX_BUILD_DIR"} build build-dev build-gcc; do
        [ -f "$folder/compile_commands.json" ] && echo "$folder" && return
    done
    cmake -S . -B build-tidy -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DEPX_CUDA=OFF >build-tidy.log 2>&1 ||
        { cat build-tidy.log >&2 && return 1; }
    rm -f build-tidy.log
    echo build-tidy
}

compiled() { # C files of the database inside this tree, each once
    python3 -c '
import json, os, sys
root = os.getcwd() + os.sep
files = {os.path.realpath(entry["file"]) for entry in json.load(open(sys.argv[1] + "/compile_commands.json"))}
print("\n".join(sorted(f[len(root):] for f in files if f.startswith(root) and f.endswith(".c"))))' "$1"
}

changed() { # BASE
    { git diff --name-only --diff-filter=d "$1" -- '*.c' &&
        git ls-files --others --exclude-standard -- '*.c'; } | sort -u
}

tool=$(find_tool) || { echo "clang-tidy 14 or newer is not here: not checked"; exit 77; }
database=$(find_database)
checks=()
case ${1:-} in
'') mapfile -t files < <(compiled "$database") ;;
--changed)
    base=${2:-$(git rev-parse -q --verify origin/main || echo HEAD)}
    mapfile -t files < <(comm -12 <(compiled "$database") <(changed "$base"))
    ;;
--deep) checks=("--checks=$deep") && shift && files=("$@") ;;
*) files=("$@") ;;
esac
# Of a file that it does not know, clang-tidy guesses the options, and then finds what is not there.
mapfile -t unknown < <(comm -13 <(compiled "$database" | sort) <(printf '%s\n' "${files[@]}" | sed '/^$/d' | sort))
[ ${#unknown[@]} -eq 0 ] || {
    echo "$database does not compile ${unknown[*]}: set EPX_BUILD_DIR to a build that does (with its tests)"
    exit 1
}
[ ${#files[@]} -gt 0 ] || { echo "no files to check"; exit 0; }

# Standard error counts what system headers have; findings go to standard output.
run=("$tool" -p "$database" --quiet ${checks[@]+"${checks[@]}"})
if printf '%s\n' "${files[@]}" | xargs -P "$(nproc)" -n 8 "${run[@]}" 2>/dev/null; then
    echo "${#files[@]} files: $tool finds nothing"
else
    echo "$tool: mend these, or silence one with // NOLINT(check): and the reason"
    exit 1
fi
