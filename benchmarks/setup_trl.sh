#!/usr/bin/env bash
# The environment of TRL, which gcore's GRPO step is measured beside: setup_trl.sh PYTHON VENV. Safe to repeat.
set -euo pipefail
python=$1 venv=$2
cd "$(dirname "$0")/.."
stamp="$venv/.ready-$(sha256sum benchmarks/setup_trl.sh constraints/trl.txt | sha256sum | cut -c1-12)"
[ -e "$stamp" ] && exit 0
echo "setup: TRL in $venv"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints/trl.txt"
# torch first, by its pin: whatever depends on it must not pull another build.
$pip torch numpy
$pip trl
rm -f "$venv"/.ready-*
touch "$stamp"
