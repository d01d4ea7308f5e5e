#!/bin/sh
# Keeps certificates good until it is ended: renew.sh FOLDER... Every GCORE_RENEW_EVERY_S seconds (an hour) those that end within
# GCORE_RENEW_DAYS days (30) are renewed by the authority in GCORE_AUTHORITY. GCORE_SECRET=FROM:TO has the files of a mounted Secret copied
# as well (private.sh). Daemons and etcd read what is new by themselves; what fails is told, and tried again the next time.
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
      echo "renew.sh: not all could be renewed; tried again in $every s" >&2
    printf '%s\n' "$said" | grep -v '  lasts$' || true
  fi
  if [ -n "${GCORE_SECRET:-}" ]; then
    "$here/private.sh" "${GCORE_SECRET%%:*}" "${GCORE_SECRET#*:}" || echo "renew.sh: $GCORE_SECRET was not copied" >&2
  fi
done
