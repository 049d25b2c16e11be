#!/usr/bin/env bash
# Installs missing programs that the tests use (Debian, as root); otherwise reports them. Their installation starts no
# daemons. With --arm only what scripts/platforms.sh needs: compilers for ARM, and qemu.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
arm=${1:-}
[[ $# -le 1 && ${arm:---arm} == --arm ]] || wrong "$*"

# program:package, or file:package
programs=(
  sshd:openssh-server ssh:openssh-client scp:openssh-client ssh-keygen:openssh-client
  nc.openbsd:netcat-openbsd ncat:ncat corkscrew:corkscrew socat:socat connect-proxy:connect-proxy
  ip:iproute2 curl:curl shellcheck:shellcheck expect:expect htpasswd:apache2-utils g++:g++
  dig:dnsutils pip3:python3-pip
  containerd:containerd runc:runc busybox:busybox-static nft:nftables iptables:iptables ptp:containernetworking-plugins
  prometheus:prometheus h2load:nghttp2-client setcap:libcap2-bin setpriv:util-linux nginx:nginx haproxy:haproxy systemd-analyze:systemd chromium:chromium
  npm:npm ansible-playbook:ansible-core lintian:lintian minisign:minisign
  jsonschema:python3-jsonschema
)
if [[ $arm ]]; then
  programs=(
    aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu /usr/aarch64-linux-gnu/lib/libc.a:libc6-dev-arm64-cross
    arm-linux-gnueabihf-gcc:gcc-arm-linux-gnueabihf /usr/arm-linux-gnueabihf/lib/libc.a:libc6-dev-armhf-cross
    qemu-arm-static:qemu-user-static
  )
  # Debian has the sources of the standard library, for the targets that rustup does not have here.
  for target in aarch64-unknown-linux-gnu armv7-unknown-linux-gnueabihf; do
    [[ -d $(rustc --print target-libdir --target $target) ]] ||
      programs+=(/usr/bin/cargo:cargo-web /usr/lib/rustlib/src/rust/library/Cargo.lock:rust-web-src)
  done
fi

PATH=$PATH:/usr/sbin:/sbin:/usr/lib/cni

missing=()
for entry in "${programs[@]}"; do
  command -v "${entry%%:*}" >/dev/null || [[ ${entry%%:*} == /* && -e ${entry%%:*} ]] || missing+=("${entry##*:}")
done
[[ $arm ]] || command -v go >/dev/null || echo "go is missing: the plain peer, CoreDNS, etcd and Kubernetes need Go 1.26 or newer from https://go.dev/dl" >&2

if ((${#missing[@]} == 0)); then exit 0; fi
mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
  echo "missing, and only root on Debian can install them: ${missing[*]}" >&2
  exit 1
fi

echo "installing ${missing[*]}"
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
  # Debian runs this file before it starts a daemon; 101 denies the start.
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  tail -n 30 "$log" >&2
  exit 1
fi
rm -f "$log"
