#!/usr/bin/env bash
# Builds the programs that scripts/bench.sh --peers compares with, once per version, and prints their directories. A
# program that cannot be built here is named on stderr and left out.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"

cache=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-tests
export CGO_ENABLED=0 GOFLAGS=-trimpath
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

# peer NAME VERSION COMMAND...: runs the command, which writes programs to $out, unless this version was built before.
peer() {
  local name=$1 out=$build/$1 done=$cache/$1-$2
  if [[ ! -d $done ]]; then
    mkdir -p "$out" "$cache"
    # In the background, as errors do not end a function in a condition.
    "${@:3}" "$2" >"$build/log" 2>&1 &
    if ! wait $!; then
      echo "$name $2 cannot be built here and is left out: $(tail -n 1 "$build/log")" >&2
      return 0
    fi
    # Under a temporary name first: the final name then always has the complete directory.
    mv -T "$out" "$done.$$"
    mv -T "$done.$$" "$done"
  fi
  echo "$done"
}

# crate FEATURES VERSION: without --locked, as current compilers refuse rathole's older dependencies.
crate() {
  cargo install --quiet --version "$2" --no-default-features --features "$1" --root "$out" "$name"
  mv "$out/bin/$name" "$out"
}

# module MODULE PACKAGES VERSION: `go install` refuses modules that replace others, so their own directory is built.
module() {
  local dir package
  go mod download "$1@v$3"
  dir=$(go env GOMODCACHE)/$1@v$3
  cp "$dir/go.mod" "$build/peer.mod"
  cp "$dir/go.sum" "$build/peer.sum"
  chmod u+w "$build"/peer.*
  # The directory that Konnectivity names is a module of its own.
  go -C "$build" mod edit -dropreplace "$1/konnectivity-client" peer.mod
  for package in $2; do
    go -C "$dir" build -mod=mod -modfile="$build/peer.mod" -ldflags='-s -w' -o "$out/${package##*/}" "./$package"
  done
}

peer chisel 1.11.3 module github.com/jpillora/chisel .
peer frp 0.65.0 module github.com/fatedier/frp 'cmd/frps cmd/frpc'
peer konnectivity 0.34.0 module sigs.k8s.io/apiserver-network-proxy 'cmd/server cmd/agent'
peer rathole 0.5.0 crate server,client,tls
peer superedge 0.9.0 module github.com/superedge/superedge cmd/tunnel
