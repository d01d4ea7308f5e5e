#!/bin/sh
# Copies the files of a mounted Secret so that only this user can read them: private.sh FROM TO. The files of a mounted Secret share one
# mode, and with an fsGroup the group can read them. The daemon rejects such keys, tokens and passwords. Unchanged files are not copied.
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
