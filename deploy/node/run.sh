#!/bin/sh
# Runs the daemon of a container: run.sh TEMPLATE. Renders the node's configuration, starts the daemon, and starts it again when it
# dies: its engines and train ranks outlive it, and would not outlive the container. Ends with it where it ends well (a drained node,
# SIGTERM) or says that its configuration is wrong (2). Expects an init above it (tini) that buries the workers' processes.
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
  # A trapped signal ends `wait` early: wait until the daemon itself has ended.
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
  echo "run.sh: the daemon ended with $code and is started again" >&2
  sleep "$again" &
  wait $! || true
  [ -z "$ending" ] || exit 0
done
