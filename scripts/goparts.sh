#!/usr/bin/env bash
# Builds CoreDNS, etcd, grpcurl, Helm, metrics-server and programs of Kubernetes for the tests, once per version. The
# first run takes minutes, later runs nothing.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
alone "$@"
cd "$(dirname "$0")/../tests/real"

coredns=1.15.0
grpcurl=1.9.3
helm=4.3.1
metrics=0.9.0
etcd=$(sed -n 's/^require go.etcd.io\/etcd\/server\/v3 v//p' etcd/go.mod)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-tests
export CGO_ENABLED=0 GOFLAGS=-trimpath
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

# keep FILE PROGRAM: moves a built program into place atomically, so that PROGRAM is always complete.
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
  go -C etcd build -ldflags='-s -w' -o "$build/etcd" go.etcd.io/etcd/server/v3
  keep "$build/etcd" "$cache/etcd-$etcd/etcd"
fi

if [[ ! -x $cache/grpcurl-$grpcurl/grpcurl ]]; then
  GOBIN=$build go install -ldflags='-s -w' "github.com/fullstorydev/grpcurl/cmd/grpcurl@v$grpcurl"
  keep "$build/grpcurl" "$cache/grpcurl-$grpcurl/grpcurl"
fi

if [[ ! -x $cache/helm-$helm/helm ]]; then
  GOBIN=$build go install -ldflags='-s -w' "helm.sh/helm/v4/cmd/helm@v$helm"
  keep "$build/helm" "$cache/helm-$helm/helm"
fi

if [[ ! -x $cache/metrics-server-$metrics/metrics-server ]]; then
  # Like Kubernetes' own programs, below.
  GOBIN=$build go install -ldflags="-s -w -X k8s.io/client-go/pkg/version.gitVersion=v$metrics" \
    "sigs.k8s.io/metrics-server/cmd/metrics-server@v$metrics"
  keep "$build/metrics-server" "$cache/metrics-server-$metrics/metrics-server"
fi

# kubernetes PROGRAM: builds one of Kubernetes' own programs.
kubernetes() {
  local version package flags='-s -w' program=$1
  version=$(sed -n 's/^require k8s.io\/kubernetes v//p' kubernetes/go.mod)
  [[ ! -x $cache/kubernetes-$version/$program ]] || return 0
  # Without this the program does not know its own version, on which its features depend.
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    flags+=" -X $package.gitVersion=v$version"
  done
  go -C kubernetes build -ldflags="$flags" -o "$build/$program" "k8s.io/kubernetes/cmd/$program"
  keep "$build/$program" "$cache/kubernetes-$version/$program"
}

kubernetes kube-apiserver
kubernetes kube-controller-manager
kubernetes kubelet
kubernetes kubectl
