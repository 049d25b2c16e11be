#!/usr/bin/env bash
# etcd, CoreDNS, kube-apiserver and a real kubelet with a pod, on two machines made of namespaces between which there is
# nothing but a tunnel: to play with kubectl. As root on Linux. Stays until Ctrl-C.
#
#   --way WAY       how kube-apiserver comes to the kubelet: egress (its egress selector, over mutual TLS; the default),
#                   unix (its egress selector, over a unix socket) or names (DNS leads the node's name to the pod)
#   --check         run the lines that it prints, and end
#   --measure       measure kubectl through the tunnel and without it, with a release build, and end
#   TUNNEL=FILE     the program, by its whole path; otherwise a debug build
set -euo pipefail
cd "$(dirname "$0")/.."

way=egress check='' measure=''
while (($#)); do
  case $1 in
    --way) way=${2:?--way egress, unix or names} && shift ;;
    --check) check=1 ;;
    --measure) measure=1 ;;
    *) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2 && exit 64 ;;
  esac
  shift
done
case $way in egress | unix | names) ;; *) echo "--way $way: want egress, unix or names" >&2 && exit 64 ;; esac

scripts/parts.sh
scripts/goparts.sh
if [[ $measure ]]; then
  cargo build --release --bin tunnel
  TUNNEL_TESTS_REQUIRE=1 TUNNEL=${TUNNEL:-$(realpath "${CARGO_TARGET_DIR:-target}")/release/tunnel} \
    cargo test --quiet --features kubernetes --test real -- --ignored --exact measure::kubectl --nocapture
  exit
fi
# The tests know how it is made; all of it ends with their input. With job control it is a group of its own, so that
# Ctrl-C reaches us alone.
set -m
hold=$(mktemp -u)
mkfifo "$hold"
TUNNEL_TESTS_REQUIRE=1 TUNNEL_PLAY_WAY=$way ${check:+env TUNNEL_PLAY_CHECK=1} \
  cargo test --quiet --features kubernetes --test real -- --ignored --exact play::kubernetes --nocapture <"$hold" &
exec 3>"$hold"
rm "$hold"
trap 'exec 3>&-; wait' EXIT
trap 'exit 130' INT TERM
wait $!
