#!/usr/bin/env bash
# Runs a cluster to experiment with by kubectl: etcd, CoreDNS, kube-apiserver, and a real kubelet with a pod. They run on
# two machines made of namespaces, connected only by the tunnel. Requires root on Linux. Runs until Ctrl-C.
#
#   --way WAY       how kube-apiserver reaches the kubelet: egress (its egress selector, over mutual TLS; the default),
#                   unix (its egress selector, over a Unix socket) or names (DNS resolves the node's name to the server)
#   --check         run the printed commands, and exit
#   --measure       measure kubectl through the tunnel and without it, with a release build, and exit
#   TUNNEL=FILE     absolute path of the program; otherwise a debug build
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
cd "$(dirname "$0")/.."

way=egress check='' measure=''
while (($#)); do
  case $1 in
    --way) way=${2:?--way egress, unix or names} && shift ;;
    --check) check=1 ;;
    --measure) measure=1 ;;
    *) wrong "$1" ;;
  esac
  shift
done
case $way in egress | unix | names) ;; *) echo "--way $way: expected egress, unix or names" >&2 && exit 64 ;; esac

scripts/parts.sh
scripts/goparts.sh
if [[ $measure ]]; then
  [[ ${TUNNEL:-} ]] || cargo build --release --bin tunnel
  TUNNEL_TESTS=all TUNNEL=${TUNNEL:-$(realpath "${CARGO_TARGET_DIR:-target}")/release/tunnel} \
    cargo test --quiet --test real -- --ignored --exact measure::kubectl --nocapture
  exit
fi
# The tests contain the setup; everything stops when their input closes. With job control they are a separate process
# group, so that Ctrl-C reaches only this script.
set -m
hold=$(mktemp -u)
mkfifo "$hold"
TUNNEL_TESTS=all TUNNEL_PLAY_WAY=$way ${check:+env TUNNEL_PLAY_CHECK=1} \
  cargo test --quiet --test real -- --ignored --exact play::kubernetes --nocapture <"$hold" &
exec 3>"$hold"
rm "$hold"
trap 'exec 3>&-; wait' EXIT
trap 'exit 130' INT TERM
wait $!
