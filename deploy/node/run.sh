#!/bin/sh
# Runs the daemon of a container: run.sh TEMPLATE. It renders the node's configuration and starts the daemon. If the daemon dies, it
# starts the daemon again, because engines and train ranks survive the daemon but not the container. It exits when the daemon exits with 0
# (SIGTERM) or 2 (invalid configuration). It needs an init process (tini) that reaps the workers.
set -eu
template=${1:?usage: run.sh TEMPLATE}
config=${GCORE_CONFIG:-/run/gcore/node.yaml}
again=${GCORE_RESTART_S:-1}
python=${GCORE_PYTHON:-python3}
here=$(dirname "$0")
ending=
daemon=

# shellcheck disable=SC2317  # called by the trap
end() {
  ending=yes
  [ -z "$daemon" ] || kill -s TERM "$daemon" 2>/dev/null || true
}
trap end TERM INT

"$python" "$here/render.py" "$template" "$config"
while :; do
  gcore-controller --config "$config" &
  daemon=$!
  # A trapped signal interrupts `wait`. Wait until the daemon has exited.
  code=0
  wait "$daemon" || code=$?
  while kill -s 0 "$daemon" 2>/dev/null; do
    code=0
    wait "$daemon" || code=$?
  done
  daemon=
  if [ -n "$ending" ] || [ "$code" -eq 0 ] || [ "$code" -eq 2 ]; then
    exit "$code"
  fi
  echo "run.sh: the daemon exited with $code and is started again" >&2
  sleep "$again" &
  wait $! || true
  [ -z "$ending" ] || exit 0
done
