#!/usr/bin/env bash
# Builds the plain peer in Go, once for each version of its sources, tests it, and prints where it is.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/../tests/real/plainpeer"

cache=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-tests
version=$(cat ./*.go go.mod go.sum | sha256sum | cut -c1-16)
program=$cache/plainpeer-$version
if [[ ! -x $program ]]; then
  unformatted=$(gofmt -l .)
  if [[ -n $unformatted ]]; then
    echo "gofmt these: $unformatted" >&2
    exit 1
  fi
  # One set of flags for all three, so that each package is compiled once.
  export CGO_ENABLED=0 GOFLAGS=-trimpath
  go vet ./... >&2
  go test ./... >&2
  mkdir -p "$cache"
  # Under another name first: whoever sees the name sees a whole program.
  go build -ldflags='-s -w' -o "$program.$$" .
  mv "$program.$$" "$program"
fi
echo "$program"
