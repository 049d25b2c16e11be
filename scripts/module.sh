#!/usr/bin/env bash
# Runs one module of the tunnel on loopback: a server and an edge with only that module's config. Prints the config, the
# request, its response and the last lines of both logs, and exits.
#
#   stream          only the link: the edge links, and no session is opened
#   ssh             CONNECT, as used by ssh's ProxyCommand and curl -p
#   tcp             a TCP port of the server for a port of the node
#   https           TLS ports of the server, to a target with TLS at the node
#   --v N           log level of both; 2 logs each change of a session (default 2), 8 each frame of a link
#   TUNNEL=FILE     the program; otherwise a debug build
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
cd "$(dirname "$0")/.."

module='' level=2
while (($#)); do
  case $1 in
    stream | ssh | tcp | https) module=$1 ;;
    --v) level=${2:?--v N} && shift ;;
    *) wrong "$1" ;;
  esac
  shift
done
[[ $module ]] || wrong "no module"

tunnel=${TUNNEL:-}
if [[ ! $tunnel ]]; then
  cargo build --quiet --bin tunnel
  tunnel=${CARGO_TARGET_DIR:-target}/debug/tunnel
fi
set -m
# shellcheck source=scripts/local.sh
. scripts/local.sh
trap 'finish "${started[@]}"; rm -rf "$dir"' EXIT

at=127.0.0.1 grpc=29000 log=29010 connect=29022 edge_log=29011 port=29080 target=29100
certificates "$at"
tokens node1
echo "Hello from node1" >"$dir/page"
{
  pod_config "$at" "$grpc" "$log" "$connect" 1s
  case $module in
    tcp) printf '[server.tcp]\n"%s:%s" = "node1/127.0.0.1:%s"\n' "$at" "$port" "$target" ;;
    https)
      printf '[server.https]\nmode = "passthrough"\nlisten_ip = "%s"\nports = { "%s" = "127.0.0.1:%s" }\n' \
        "$at" "$port" "$target"
      ;;
  esac
} >"$dir/pod.toml"
edge_config node1 "$at:$grpc" "$at:$edge_log" >"$dir/edge.toml"

case $module in
  https)
    start target env -C "$dir" openssl s_server -quiet -WWW -accept "$at:$target" -cert "$dir/pod.crt" -key "$dir/pod.key"
    ;;
  *) start target python3 -m http.server --bind "$at" --directory "$dir" "$target" ;;
esac
start pod "$tunnel" server -c "$dir/pod.toml" -v "$level"
start edge "$tunnel" edge -c "$dir/edge.toml" -v "$level"
await edge ready "$at:$edge_log"

case $module in
  stream) request=(curl -sS "http://$at:$log/cloud/healthz") ;;
  ssh) request=(curl -sS -p -x "http://$at:$connect" "http://node1:$target/page") ;;
  tcp) request=(curl -sS "http://$at:$port/page") ;;
  https) request=(curl -sSk --connect-to "node1:$port:$at:$port" "https://node1:$port/page") ;;
esac
(cd "$dir" && await "$module" "${request[@]}")
echo "--- the server's config of this module"
sed -n '/^\[server.session\]/,$p' "$dir/pod.toml"
echo "--- ${request[*]}"
(cd "$dir" && "${request[@]}")
for side in pod edge; do
  # Level 8 logs so many other lines that the frames would be hard to find.
  if ((level >= 8)); then
    echo "--- the frames in the log of the $side"
    grep ' frames: ' "$dir/$side.log" | tail -n 24
  else
    echo "--- the last lines of the log of the $side"
    tail -n 12 "$dir/$side.log"
  fi
done
