#!/usr/bin/env bash
# The environment of verl, which gcore's memory is measured beside: setup_verl.sh PYTHON VENV. Safe to repeat.
set -euo pipefail
python=$1 venv=$2
cd "$(dirname "$0")/.."
stamp="$venv/.ready-$(sha256sum benchmarks/setup_verl.sh constraints/verl.txt | sha256sum | cut -c1-12)"
[ -e "$stamp" ] && exit 0
echo "setup: verl in $venv"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints/verl.txt"
# verl without its dependencies, which include trainers and trackers: only its batch type and its worker groups are used.
$pip torch numpy
$pip --no-deps verl TransferQueue
$pip msgspec prometheus_client psutil pyzmq ray tensordict transformers hydra-core codetiming pandas pyarrow packaging
rm -f "$venv"/.ready-*
touch "$stamp"
