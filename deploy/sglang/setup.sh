#!/usr/bin/env bash
# Makes SGLang's own environment for a machine without a GPU: setup.sh PYTHON VENV CONSTRAINTS. Safe to repeat.
#
# SGLang pins a torch and a CUDA stack that are not gcore's. On a machine with GPUs install SGLang as its own pages say,
# into an environment of its own, and name its Python in GCORE_SGLANG_PYTHON; this script is not needed there.
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
  "$python" -m venv "$venv" || fail "no virtual environment could be made: on Debian, install python3-venv"
fi
pip="$venv/bin/python -m pip install -qq --disable-pip-version-check"
help="look at what pip says above; a half-made environment is mended by running this again, or start over: rm -r $venv"
say "packages (the first time takes a few minutes, and 2 GB)"
$pip -U "pip>=25.1" || fail "pip cannot be brought up to date: $help"
# torch first, by its pin: whatever depends on it must not pull another build.
$pip "$(grep -E '^torch==' "$constraints")" || fail "torch cannot be installed: $help"
$pip -r "$constraints" || fail "the pinned packages cannot be installed: $help"
# Without their dependencies: those are the CUDA stack.
$pip --no-deps "$sglang" "$torchvision" || fail "SGLang cannot be installed: $help"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\nimport torchvision_schemas\n' "$shims" > "$site/gcore_sglang_shims.pth"
say "does it import?"
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$venv/bin/python" -W ignore -c '
import sglang.launch_server
import sglang.srt.entrypoints.http_server
' || fail "SGLang is installed, and does not start: see the last lines above, then rm -r $venv and run this again"
say "done"
