#!/usr/bin/env bash
# Tests the compatibility of this program with an older version: scripts/compat.sh REV [flags of cargo build], or with
# programs that are already built: OLD=PROGRAM NEW=PROGRAM scripts/compat.sh
#
# Builds the program at REV and the current one, and runs servers and edges of both together on loopback addresses, old
# with new, both ways. In each pairing a client has a session to the node through the second server, while the edge is
# linked to the first. The session opens, resumes after the edge's connection was cut, and resumes when the first server
# is stopped and the edge has moved to the second. Then a new session opens there. A MiB is under way at each of these
# events, and must come back unchanged. The same is done with a user's own link, which is cut and moves with the edge's.
# Next, four servers, old and new, have one node each, and a client of each server reaches every node. This is repeated
# after one old server was replaced by a new one, and one new server by an old one. A table shows the results. The exit
# code is 1 if anything failed; logs are kept then.
#
#   PROFILE=NAME    profile of cargo for both programs (fast)
#   NEW=PROGRAM     the current program, already built
#   TUNNEL_TEST_VERSIONS=4-5    versions of the protocol that a debug build of the current program speaks (its own)
#
# The program at REV is built once and kept in the cache of the tests.
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
case ${1:-} in -*) wrong "$1" ;; esac
cd "$(dirname "$0")/.."
# shellcheck source=scripts/local.sh
. scripts/local.sh
# With job control each child is a separate process group.
set -m

if [[ -z ${OLD:-} ]]; then
  rev=${1:?usage: scripts/compat.sh REV [flags of cargo build]}
  shift
  # Before the first release the names of frames and headers changed once; compatibility is promised from then on.
  git grep -q '"reset-at"' "$rev" -- crates/proto/src || {
    echo "$rev uses wire names from before the first release: compatibility starts with the commit that renamed them" >&2
    exit 64
  }
else
  rev=$OLD
fi
profile=${PROFILE:-fast}
first=127.0.0.41 second=127.0.0.42 service=127.0.0.40
grpc=19040 log=19041 connect=19042 echo=19043
fleet=(127.0.0.41 127.0.0.42 127.0.0.43 127.0.0.44)
failed=0

stop() {
  local status=$?
  trap '' INT TERM
  finish "${started[@]}"
  if ((status)); then echo "logs are in $dir" >&2; else rm -rf "$dir"; fi
}
trap stop EXIT
trap 'exit 130' INT TERM

# build TREE TARGET NAME [FLAGS]: builds the program of a tree as $dir/NAME. Two trees must not share a target
# directory: cargo treats them as the same package and would mix their artifacts.
build() {
  local tree=$1 target=$PWD/$2 name=$3 out=$profile
  shift 3
  [[ $profile != dev ]] || out=debug
  (cd "$tree" && cargo build --quiet --target-dir "$target" --profile "$profile" --bin tunnel "$@")
  cp "$target/$out/tunnel" "$dir/$name"
}

# peers_config ADDRESS...: prints the config table that lists the servers at these addresses.
peers_config() {
  cat <<END
[server.peers]
addresses = [$(printf '"%s", ' "${@/%/:$grpc}")]
END
}

# pod_configs ADDRESS PEER...: prints the config of the server at this address, with these peers and a user.
pod_configs() {
  pod_config "$1" "$grpc" "$log" "$connect" 15s
  cat <<END
[server.clients]
client_ca = "$dir/ca.crt"
names = ["ann"]
rules = [{ users = ["ann"], nodes = ["*"], ports = [$echo] }]
END
  peers_config "${@:2}"
}

# user_config: makes a certificate for a user, and the config of her program.
user_config() {
  mkdir -p "$dir/tunnel"
  openssl req -new -newkey rsa:2048 -nodes -keyout "$dir/tunnel/ann.key" -subj /CN=ann 2>"$dir/openssl.log" |
    openssl x509 -req -days 90 -CA "$dir/ca.crt" -CAkey "$dir/ca.key" -CAcreateserial \
      -extfile <(echo extendedKeyUsage=clientAuth) -out "$dir/tunnel/ann.crt" 2>>"$dir/openssl.log"
  cat >"$dir/tunnel/client.toml" <<END
servers = ["$service:$grpc"]
tls_server_name = "tunnel.test"
ca = "$dir/ca.crt"
cert = "$dir/tunnel/ann.crt"
key = "$dir/tunnel/ann.key"
END
}

# config_for PROGRAM NAME: writes the config on stdin as $dir/NAME.toml, for old or new. If the old program is older than
# [server] and [edge], it needs the keys that it had below SuperEdge's tables.
config_for() {
  if [[ $1 == old && $old_schema == superedge ]]; then
    sed -e 's/^\[server.links]/[mode.cloud.stream.server]/' -e 's/^\[server.connect]/[mode.cloud.ssh]/' \
      -e 's/^\[server.session]/[mode.cloud.session]/' -e 's/^\[server.peers]/[mode.cloud.registry]/' \
      -e 's/^\[edge.uplink]/[mode.edge.stream.client]/' -e 's/^admin_listen =/log_listen =/' \
      -e 's/^ca =/cert =/' -e 's/^peer_ca =/ca =/' -e 's/^token_file =/tokenfile =/' \
      -e 's/^drain_timeout =/drain =/' -e 's/^addresses =/siblings =/' \
      -e 's/^tls_server_name =/dns =/' -e 's/^servers = \[\(.*\)]/server_name = \1/'
  else
    cat
  fi >"$dir/$2.toml"
}

# lead ADDRESS: directs new connections of the service to this server. Existing connections stay.
lead() {
  if [[ -e $dir/line.pid ]]; then
    kill -KILL "$(cat "$dir/line.pid")" || true
    wait "$(cat "$dir/line.pid")" || true
  fi 2>/dev/null
  start line socat "TCP-LISTEN:$grpc,bind=$service,reuseaddr,fork" "TCP:$1:$grpc"
  await line nc -z "$service" "$grpc"
}

# Aborts the connections on the line, which continues to accept new ones.
cut_line() {
  local connection
  for connection in $(pgrep -P "$(cat "$dir/line.pid")"); do kill -KILL "$connection" 2>/dev/null || true; done
}

# carries COMMAND...: sends a MiB to the target, runs the command meanwhile, and receives the same MiB back within 60 s.
carries() {
  openssl rand -out "$dir/sent" $((1 << 20))
  cat "$dir/sent" >&"$to_client" &
  "$@" && timeout 60 head -c $((1 << 20)) <&"$from_client" | cmp --quiet - "$dir/sent"
}

# opens: opens a session of the client, at the second server or over the link of the user's program.
opens() {
  if [[ $user ]]; then
    coproc client { XDG_CONFIG_HOME=$dir exec "$dir/$user" connect "node1:$echo" 2>"$dir/client.log"; }
  else
    coproc client { exec socat - "PROXY:$second:node1:$echo,proxyport=$connect" 2>"$dir/client.log"; }
  fi
  client_pid=$!
  # Subshells inherit no file descriptor of a coprocess.
  exec {from_client}<&"${client[0]}" {to_client}>&"${client[1]}"
}

leave() {
  exec {from_client}<&- {to_client}>&-
  kill "$client_pid" 2>/dev/null || true
  wait "$client_pid" 2>/dev/null || true
}

# number METRIC: the value of a metric of the second server.
number() { curl -sf -m 2 "http://$second:$log/metrics" | sed -n "s/^$1 //p"; }

# resumed_since NUMBER: the second server has resumed more sessions than these.
resumed_since() { (($(number tunnel_sessions_resumed_total) > $1)); }

linked() { [[ $(curl -sf -m 2 "http://$1:$log/cloud/healthz") == *node1* ]]; }

ended() { ! kill -0 "$1" 2>/dev/null; }

# stop_first PID: stops the first server, and waits until the edge is at the second.
stop_first() {
  lead "$second"
  kill -TERM "$1"
  await second linked "$second"
}

# session: sets `result` to the failure, or to ok.
session() {
  local before pod
  result="does not open"
  carries true || return 0
  before=$(number tunnel_sessions_resumed_total)
  result="does not resume"
  carries cut_line || return 0
  # The MiB may have come back before the line was cut.
  [[ $user ]] || (await second resumed_since "$before") || return 0
  carries true || return 0
  pod=$(cat "$dir/first.pid")
  result="does not continue while the first server stops"
  carries stop_first "$pod" || return 0
  result="does not continue after the first server has stopped"
  carries await first ended "$pod" || return 0
  # A new session, at the server to which the edge has moved.
  leave
  opens
  result="does not open after the edge has moved"
  carries true || return 0
  result=ok
}

# pairing FIRST SECOND EDGE [USER]: runs one pairing; each argument is old or new. USER is the program with a user's own
# link, which goes where the edge's goes.
pairing() {
  local result user=${4:-}
  started=()
  pod_configs "$first" "$first" "$second" | config_for "$1" first
  pod_configs "$second" "$first" "$second" | config_for "$2" second
  edge_config node1 "$service:$grpc" "127.0.0.1:$log" | config_for "$3" edge
  start first "$dir/$1" --m=cloud --c="$dir/first.toml"
  start second "$dir/$2" --m=cloud --c="$dir/second.toml"
  start echo socat "TCP-LISTEN:$echo,bind=127.0.0.1,reuseaddr,fork" PIPE
  await first ready "$first:$log"
  await second ready "$second:$log"
  lead "$first"
  start edge "$dir/$3" --m=edge --c="$dir/edge.toml"
  await edge linked "$first"
  opens
  session
  printf '%-10s %-10s %-10s %-10s %s\n' "$1" "$2" "$3" "${user:--}" "$result"
  keep_logs "$1-$2-$3-${user:-connect}"
  leave
  finish "${started[@]}"
}

# keep_logs NAME: keeps the logs if the result is not ok.
keep_logs() {
  [[ $result != ok ]] || return 0
  failed=1
  mkdir -p "$dir/$1"
  cp "$dir"/*.log "$dir/$1"
}

# fleet_pod NUMBER PROGRAM: starts the server of that number, from 0.
fleet_pod() {
  pod_configs "${fleet[$1]}" "${fleet[@]}" | config_for "$2" "pod$1"
  start "pod$1" "$dir/$2" --m=cloud --c="$dir/pod$1.toml"
}

# fleet_pod_ready NUMBER: waits until that server is ready.
fleet_pod_ready() {
  await "pod$1" ready "${fleet[$1]}:$log"
}

# reaches ADDRESS NODE: a client of the server receives a line back from the node within 20 s.
reaches() {
  local back
  for _ in {1..20}; do
    back=$(echo "$2" | timeout 20 socat -t 5 - "PROXY:$1:$2:$echo,proxyport=$connect" 2>>"$dir/client.log") || true
    if [[ $back == "$2" ]]; then return 0; fi
    [[ $3 == again ]] || return 1
    sleep 0.5
  done
  return 1
}

# all_reach HOW WHEN: sets `result` to the server and node that cannot communicate. HOW is again if edges may still be
# linking.
all_reach() {
  local at n
  for at in "${fleet[@]}"; do
    for n in 0 1 2 3; do
      reaches "$at" "node$n" "$1" || { result="node$n is not reachable from $at $2"; return 0; }
    done
  done
}

# mixed: servers alternate between old and new, each with one edge, which alternates between new and old.
mixed() {
  local result=ok n pods=(old new old new) edges=(new old old new)
  started=()
  start echo socat "TCP-LISTEN:$echo,bind=127.0.0.1,reuseaddr,fork" PIPE
  for n in 0 1 2 3; do
    fleet_pod "$n" "${pods[n]}"
  done
  for n in 0 1 2 3; do
    fleet_pod_ready "$n"
    edge_config "node$n" "${fleet[n]}:$grpc" "127.0.0.1:$((log + 10 + n))" | config_for "${edges[n]}" "edge$n"
    start "edge$n" "$dir/${edges[n]}" --m=edge --c="$dir/edge$n.toml"
  done
  all_reach again "at the start"
  for n in 0 1; do
    [[ $result == ok ]] || break
    finish "$(cat "$dir/pod$n.pid")"
    fleet_pod "$n" "${pods[1 - n]}"
    fleet_pod_ready "$n"
    all_reach again "after server $n was replaced: ${pods[n]} by ${pods[1 - n]}"
  done
  printf '%-32s %s\n' 'four servers, old and new' "$result"
  keep_logs mixed
  finish "${started[@]}"
}

for program in socat curl nc openssl pgrep; do
  command -v "$program" >/dev/null || { echo "$program is missing: scripts/parts.sh installs it" >&2; exit 1; }
done
if [[ -z ${OLD:-} ]]; then
  OLD=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-tests/tunnel-$(git rev-parse "$rev")-$profile
  if [[ ! -x $OLD ]]; then
    tree=target/compat/tree
    rm -rf "$tree"
    mkdir -p "$tree" "${OLD%/*}"
    git archive "$rev" | tar -x -m -C "$tree"
    build "$tree" target/compat old "$@"
    mv "$dir/old" "$OLD"
    rm -rf target/compat
  fi
fi
cp "$OLD" "$dir/old"
if [[ ${NEW:-} ]]; then cp "$NEW" "$dir/new"; else build . target new "$@"; fi
certificates "$service" "${fleet[@]}"
tokens node0 node1 node2 node3
user_config
old_schema=ours
edge_config node1 "$service:$grpc" "127.0.0.1:$log" | config_for new edge
"$dir/old" config check "$dir/edge.toml" &>/dev/null ||
  "$dir/old" --m=edge --check --c="$dir/edge.toml" &>/dev/null || old_schema=superedge

printf '%-10s %-10s %-10s %-10s %s\n' 'server 1' 'server 2' edge user "session (old is $rev)"
for edge in old new; do
  for pods in 'old old' 'new new' 'old new' 'new old'; do
    read -r one two <<<"$pods"
    pairing "$one" "$two" "$edge"
  done
done
pairing new new old old
pairing new old new old
pairing old new old new
pairing old old new new
mixed
((failed == 0))
