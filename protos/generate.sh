#!/usr/bin/env bash
# Generates gcore/api/v1 and docs/reference/api.md from protos/. With --check: fails if the committed files differ.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=.
if [ "${1:-}" = "--check" ]; then out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; fi
"$python" -m grpc_tools.protoc -Iprotos --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  protos/gcore/api/v1/*.proto
if [ "${1:-}" = "--check" ]; then
  for file in "$out"/gcore/api/v1/*; do
    cmp "$file" "gcore/api/v1/$(basename "$file")" \
      || { echo "protos and gcore/api/v1 differ: run 'make proto' and commit the result" >&2; exit 1; }
  done
fi
PYTHONPATH=. "$python" protos/page.py "$@"
