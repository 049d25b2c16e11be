# shellcheck shell=bash
# To be sourced: `step NAME COMMAND...` runs a command, prints how long it took, and exits if it fails.

step() {
  local name=$1 began=$SECONDS status=0
  shift
  echo "-- $name"
  # In a list `set -e` would not apply inside a function, hence the subshell.
  set +e
  (
    set -e
    "$@"
  )
  status=$?
  set -e
  if ((status != 0)); then
    echo "-- $name FAILED (status $status) after $((SECONDS - began)) s" >&2
    exit 1
  fi
  echo "-- $name: ok, $((SECONDS - began)) s"
}
