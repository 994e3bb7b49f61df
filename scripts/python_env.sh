#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# python_env.sh VENV [LIST]: a virtual environment with what the Python tests and examples need, or with what the file
# LIST names, made once and kept. Exit 77, with the reason as the last line, where it cannot be made here.
#
# torch for the CPU is enough. For aarch64 PyPI's wheel has nothing else (80 MB). For x86_64 PyPI's wheel brings CUDA's
# libraries (about 3 GB to download, 6 GB on disk), so a "+cpu" wheel (180 MB) is tried first: from where pip is
# configured to look (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS), then from PyTorch's own index.
#
# NVIDIA's packages of NCCL EP (nccl4py, nccl-extensions, cuda-bindings, cuda-core) are 40 MB to download and 150 MB on
# disk; none of them needs a GPU or NCCL to be imported. They exist for Python 3.11 and newer, x86_64 and aarch64.
set -euo pipefail
venv=$1
here=$(dirname "$0")
limit_s=${EPX_PIP_TIMEOUT_S:-900}
cpu_index=https://download.pytorch.org/whl/cpu
requirements=${2:-$here/python_requirements.txt}

skip() {
    echo "$1"
    exit 77
}

pip_install() { # arguments of pip install...
    timeout "$limit_s" "$venv/bin/python" -m pip install --quiet \
        --disable-pip-version-check --no-input --no-compile "$@"
}

# A marker of what is installed: another list, or another Python, makes a new environment.
want=$({ cat "$requirements" "$0" && python3 --version; } | sha256sum | cut -c1-16)
[ "$(cat "$venv/epx-env" 2>/dev/null)" != "$want" ] || { echo "python environment: $venv, as it was" && exit 0; }

python3 -c 'import ensurepip, venv' 2>/dev/null || skip "no venv for python3 (Debian: python3-venv)"
python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' || skip "python3 is older than 3.9"
rm -rf "$venv"
python3 -m venv "$venv"

# Only x86_64 has a wheel for the CPU beside the one for CUDA.
install_cpu_torch() {
    local torch
    torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$requirements" | head -1)
    [ "$(uname -m)" = x86_64 ] || return 0
    pip_install --retries 1 "torch==$torch+cpu" >/dev/null 2>&1 ||
        pip_install --retries 1 --timeout 15 --extra-index-url "$cpu_index" "torch==$torch+cpu" >/dev/null 2>&1 ||
        echo "no torch for the CPU alone was found: PyPI's has CUDA's libraries, about 3 GB to download, 6 GB on disk"
}

echo "downloading torch and what else $requirements names into $venv: about 0.25 GB, 1.2 GB on disk;" \
    "kept until make distclean"
install_cpu_torch
pip_install -r "$requirements" || skip "pip could not install torch and the others within $limit_s s ($requirements)"
# Only what is used gets compiled, by importing it once: that takes half the time of pip compiling everything.
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c '
import contextlib, numpy, torch, torch.distributed.run
import transformers.models.qwen3_moe.modeling_qwen3_moe
with contextlib.suppress(ImportError): # the suite imports it on eight ranks, and says itself where it is not
    import megatron.core.models.gpt.moe_module_specs
    import megatron.core.transformer.moe.fused_a2a' || skip "torch was installed, but cannot be imported here"
echo "$want" >"$venv/epx-env"
echo "python environment: $venv, $("$venv/bin/python" -c 'import torch; print("torch", torch.__version__)')"
