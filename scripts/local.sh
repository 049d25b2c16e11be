# shellcheck shell=bash
# To be sourced with job control (`set -m`): runs programs on loopback addresses, with their files in $dir. `started`
# contains their process ids, in order.
dir=$(mktemp -d)
started=()

# finish PID...: stops these processes, all at once.
finish() {
  local pid
  for pid; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  for pid; do wait "$pid" 2>/dev/null || true; done
}

# start NAME COMMAND...: starts a program with the log NAME.log and its process id in NAME.pid.
start() {
  local name=$1
  shift
  "$@" >"$dir/$name.log" 2>&1 </dev/null &
  started+=($!)
  echo $! >"$dir/$name.pid"
}

# await NAME COMMAND...: waits until the command succeeds. After 20 s, prints the log of NAME and exits.
await() {
  local name=$1
  shift
  for _ in {1..200}; do
    if "$@" &>/dev/null; then return; fi
    sleep 0.1
  done
  echo "$name did not start in time:" >&2
  tail -n 20 "$dir/$name.log" >&2
  exit 1
}

ready() { curl -sf -m 2 "http://$1/readyz"; }

# pod_config ADDRESS GRPC LOG CONNECT DRAIN: prints the config of a server with these ports and this drain time.
pod_config() {
  cat <<END
[server.links]
listen = "$1:$2"
admin_listen = "$1:$3"
key = "$dir/pod.key"
cert = "$dir/pod.crt"
peer_ca = "$dir/ca.crt"
token_file = "$dir/tokens"
[server.connect]
listen = "$1:$4"
[server.session]
drain_timeout = "$5"
END
}

# edge_config NODE SERVER LOG: prints the config of an edge that links to this server, with this log address.
edge_config() {
  cat <<END
[edge.uplink]
node = "$1"
token = "token-of-$1"
ca = "$dir/ca.crt"
tls_server_name = "tunnel.test"
servers = ["$2"]
admin_listen = "$3"
END
}

# tokens NODE...: writes the tokens of these nodes, the same as in `edge_config`.
tokens() {
  local node
  for node; do echo "$node:token-of-$node"; done >"$dir/tokens"
}

# certificates ADDRESS...: creates a CA, and a certificate for servers at these addresses.
certificates() {
  local names="DNS:tunnel.test" at
  for at; do names+=",IP:$at"; done
  openssl ecparam -genkey -name prime256v1 -noout -out "$dir/ca.key"
  openssl req -x509 -new -key "$dir/ca.key" -days 90 -subj /CN=cluster -out "$dir/ca.crt" \
    -addext basicConstraints=critical,CA:true -addext keyUsage=critical,keyCertSign
  openssl ecparam -genkey -name prime256v1 -noout | openssl pkcs8 -topk8 -nocrypt -out "$dir/pod.key"
  printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\n' "$names" >"$dir/pod.ext"
  openssl req -new -key "$dir/pod.key" -subj /CN=tunnel-cloud |
    openssl x509 -req -days 90 -CA "$dir/ca.crt" -CAkey "$dir/ca.key" -CAcreateserial -extfile "$dir/pod.ext" \
      -out "$dir/pod.crt"
} 2>/dev/null
