# shellcheck shell=bash
# To be sourced with job control on (`set -m`): programs on loopback addresses, with their files in $dir. Their process
# ids stand in `started`, in order.
dir=$(mktemp -d)
started=()

# finish PID...: ends these, all at once.
finish() {
  local pid
  for pid; do kill -TERM -- "-$pid" 2>/dev/null || true; done
  for pid; do wait "$pid" 2>/dev/null || true; done
}

# start NAME COMMAND...: its log is NAME.log, its process id stands in NAME.pid.
start() {
  local name=$1
  shift
  "$@" >"$dir/$name.log" 2>&1 </dev/null &
  started+=($!)
  echo $! >"$dir/$name.pid"
}

# await WHAT COMMAND...: until the command succeeds, or the log of WHAT is shown.
await() {
  local name=$1
  shift
  for _ in {1..200}; do
    if "$@" &>/dev/null; then return; fi
    sleep 0.1
  done
  echo "$name does not come up:" >&2
  tail -n 20 "$dir/$name.log" >&2
  exit 1
}

ready() { curl -sf -m 2 "http://$1/readyz"; }

# pod_config ADDRESS GRPC LOG CONNECT DRAIN: the settings of a pod with these ports there, and this time to stop.
pod_config() {
  cat <<END
[mode.cloud.stream.server]
listen = "$1:$2"
log_listen = "$1:$3"
key = "$dir/pod.key"
cert = "$dir/pod.crt"
ca = "$dir/ca.crt"
tokenfile = "$dir/tokens"
[mode.cloud.ssh]
listen = "$1:$4"
[mode.cloud.session]
drain = "$5"
END
}

# edge_config NODE CLOUD LOG: the settings of an edge that links to the cloud there, with its log port here.
edge_config() {
  cat <<END
[mode.edge.stream.client]
node = "$1"
token = "token-of-$1"
cert = "$dir/ca.crt"
dns = "tunnel.test"
server_name = "$2"
log_listen = "$3"
END
}

# tokens NODE...: the tokens of these nodes, as `edge_config` has them.
tokens() {
  local node
  for node; do echo "$node:token-of-$node"; done >"$dir/tokens"
}

# certificates ADDRESS...: an authority, and a certificate that is good for pods at these addresses.
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
