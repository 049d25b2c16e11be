#!/usr/bin/env bash
# Builds CoreDNS and etcd for the tests, once for each version; minutes the first time, nothing after.
set -euo pipefail
cd "$(dirname "$0")/../tests/real/etcd"

coredns=1.15.0
etcd=$(sed -n 's/^require go.etcd.io\/etcd\/server\/v3 v//p' go.mod)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-tests
export CGO_ENABLED=0 GOFLAGS=-trimpath
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

# Moved into place when whole: whoever sees the name sees a whole program.
keep() {
  mkdir -p "$(dirname "$2")"
  mv "$1" "$2.$$"
  mv "$2.$$" "$2"
}

if [[ ! -x $cache/coredns-$coredns/coredns ]]; then
  GOBIN=$build go install -ldflags='-s -w' "github.com/coredns/coredns@v$coredns"
  keep "$build/coredns" "$cache/coredns-$coredns/coredns"
fi
if [[ ! -x $cache/etcd-$etcd/etcd ]]; then
  go build -ldflags='-s -w' -o "$build/etcd" go.etcd.io/etcd/server/v3
  keep "$build/etcd" "$cache/etcd-$etcd/etcd"
fi
