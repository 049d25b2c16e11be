#!/usr/bin/env bash
# Builds and tests the plain peer in Go (two generations of SuperEdge's dialect), once per version of its sources, and
# prints its path.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/../tests/real/plainpeer"

cache=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-tests
version=$(cat ./*.go ./*.txt go.mod go.sum | sha256sum | cut -c1-16)
program=$cache/plainpeer-$version
if [[ ! -x $program ]]; then
  unformatted=$(gofmt -l .)
  if [[ -n $unformatted ]]; then
    echo "not formatted, run gofmt: $unformatted" >&2
    exit 1
  fi
  # The same flags for all three commands, so that each package is compiled once.
  export CGO_ENABLED=0 GOFLAGS=-trimpath
  go vet ./... >&2
  go test ./... >&2
  mkdir -p "$cache"
  # Under a temporary name first: the final name is then always a complete program.
  go build -ldflags='-s -w' -o "$program.$$" .
  mv "$program.$$" "$program"
fi
echo "$program"
