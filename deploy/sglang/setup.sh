#!/usr/bin/env bash
# Creates SGLang's environment on a machine without a GPU: setup.sh PYTHON VENV CONSTRAINTS. It can be repeated.
#
# SGLang pins other versions of torch and CUDA than gcore. On a machine with GPUs do not use this script: install SGLang into a separate
# environment as its documentation says, and set GCORE_SGLANG_PYTHON to its Python.
set -euo pipefail
python=$1 venv=$2 constraints=$3
sglang=sglang==0.5.23 torchvision=torchvision==0.28.0
shims=$(cd "$(dirname "$0")/shims" && pwd)

say() { echo "sglang-setup: $*"; }
fail() { echo "sglang-setup: $*" >&2; exit 2; }

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
# Without dependencies, which are the CUDA packages.
$pip --no-deps "$sglang" "$torchvision" || fail "SGLang cannot be installed: $help"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\nimport torchvision_schemas\nimport diffusion_operators\n' "$shims" > "$site/gcore_sglang_shims.pth"
say "checking that it can be imported"
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$venv/bin/python" -W ignore -c '
import sglang.launch_server
import sglang.srt.entrypoints.http_server
import sglang.multimodal_gen.runtime.launch_server
' || fail "SGLang is installed but cannot be imported: see the last lines above, then rm -r $venv and run this again"
say "done"
