#!/bin/sh
# Fails unless each HOST:PORT of the arguments accepts a connection within half a minute.
for target; do
  try=1
  until timeout 10 nc -w 5 "${target%:*}" "${target##*:}" </dev/null; do
    [ "$try" -lt 6 ] || { echo "$target does not answer" >&2 && exit 1; }
    try=$((try + 1))
    sleep 5
  done
  echo "$target answers"
done
