#!/usr/bin/env bash
# Creates the development environment: setup.sh PYTHON VENV CONSTRAINTS. It can be repeated.
set -euo pipefail
python=$1 venv=$2 constraints=$3

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 2; }

command -v "$python" >/dev/null || fail "no '$python' on PATH: install Python 3.11 or name one with PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "'$python' is older than 3.11: name a newer one with PYTHON=..."
if [ ! -x "$venv/bin/python" ]; then
  say "virtual environment in $venv"
  "$python" -m venv "$venv" || fail "the virtual environment could not be created: on Debian, install python3-venv"
fi
pip="$venv/bin/python -m pip install -qq --disable-pip-version-check -c $constraints"
say "installing packages; the first time takes a few minutes, mostly for torch"
$pip -U "pip>=25.1"
$pip setuptools wheel hatchling editables ninja py-cpuinfo
say "torch"
# Install the pinned torch first, so that no dependency installs another build.
$pip torch numpy
say "DeepSpeed"
# DeepSpeed's build uses the installed torch. For the CPU it compiles nothing.
DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} DS_BUILD_OPS=0 $pip --no-build-isolation deepspeed
say "gcore and the development tools"
$pip --no-build-isolation -e '.[train,engine,vision,diffusion,lora,local,modelscope,math]' --group dev
say "etcd: $("$venv/bin/python" -c 'from gcore.store.etcd import find_etcd; e = find_etcd(); print(e.version(), e.path)')"
say "done"
