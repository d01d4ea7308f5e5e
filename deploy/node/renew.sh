#!/bin/sh
# Renews certificates until it is stopped: renew.sh FOLDER... Every GCORE_RENEW_EVERY_S seconds (default: an hour) the authority in
# GCORE_AUTHORITY renews those that expire within GCORE_RENEW_DAYS days (default: 30). With GCORE_SECRET=FROM:TO it also copies the files
# of a mounted Secret (private.sh). Daemons and etcd reload changed files. Failures are logged and retried at the next interval.
set -eu
every=${GCORE_RENEW_EVERY_S:-3600}
here=$(dirname "$0")
pause=

# shellcheck disable=SC2317  # called by the trap
end() {
  [ -z "$pause" ] || kill "$pause" 2>/dev/null || true
  exit 0
}
trap end TERM INT

while :; do
  sleep "$every" &
  pause=$!
  wait "$pause" || true
  pause=
  if [ "$#" -gt 0 ]; then
    said=$(gcore certs renew "$@" --authority "$GCORE_AUTHORITY" --within-days "${GCORE_RENEW_DAYS:-30}" 2>&1) ||
      echo "renew.sh: some certificates could not be renewed; next attempt in $every s" >&2
    printf '%s\n' "$said" | grep -v '  lasts$' || true
  fi
  if [ -n "${GCORE_SECRET:-}" ]; then
    "$here/private.sh" "${GCORE_SECRET%%:*}" "${GCORE_SECRET#*:}" || echo "renew.sh: $GCORE_SECRET was not copied" >&2
  fi
done
