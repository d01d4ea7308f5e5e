#!/usr/bin/env bash
# Makes the virtual environment: setup.sh PYTHON VENV CONSTRAINTS. Safe to repeat; says what it does and what is missing.
set -euo pipefail
python=$1 venv=$2 constraints=$3

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 2; }

command -v "$python" >/dev/null || fail "no '$python' on PATH: install Python 3.11 or name one with PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "'$python' is older than 3.11: name a newer one with PYTHON=..."
if [ ! -x "$venv/bin/python" ]; then
  say "virtual environment in $venv"
  "$python" -m venv "$venv" || fail "no virtual environment could be made: on Debian, install python3-venv"
fi
pip="$venv/bin/python -m pip install -qq --disable-pip-version-check -c $constraints"
say "packages; the first time takes some minutes, most of them for torch"
$pip -U "pip>=25.1"
$pip setuptools wheel hatchling editables ninja py-cpuinfo
say "torch"
# torch first, by its pin: whatever depends on it must not pull another build.
$pip torch numpy
say "DeepSpeed"
# DeepSpeed's build looks at the torch that is there, and compiles nothing for the CPU.
DS_ACCELERATOR=${DS_ACCELERATOR:-cpu} DS_BUILD_OPS=0 $pip --no-build-isolation deepspeed
say "gcore and what it is worked on with"
$pip --no-build-isolation -e '.[train,engine,local,modelscope,math]' --group dev
say "etcd: $("$venv/bin/python" -c 'from gcore.store.etcd import find_etcd; e = find_etcd(); print(e.version(), e.path)')"
say "done"
