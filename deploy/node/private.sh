#!/bin/sh
# Copies the files of a mounted Secret for this user alone: private.sh FROM TO. In a Secret they have one mode for all, and where a pod has an
# fsGroup its group may read them, which a daemon refuses of keys, tokens and passwords. What has not changed stays as it is.
set -eu
from=${1:?usage: private.sh FROM TO}
to=${2:?usage: private.sh FROM TO}
umask 077
mkdir -p "$to"
for file in "$from"/*; do
  [ -f "$file" ] || continue
  name=${file##*/}
  ! cmp -s "$file" "$to/$name" || continue
  cat "$file" >"$to/.$name.part"
  mv -f "$to/.$name.part" "$to/$name"
done
