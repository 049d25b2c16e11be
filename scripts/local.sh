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

# certificates ADDRESS...: an authority, and a certificate that is good for pods at these addresses.
certificates() {
  local names="DNS:tunnel.test" at
  for at; do names+=",IP:$at"; done
  openssl ecparam -genkey -name prime256v1 -noout -out "$dir/ca.key"
  openssl req -x509 -new -key "$dir/ca.key" -days 30 -subj /CN=cluster -out "$dir/ca.crt" \
    -addext basicConstraints=critical,CA:true -addext keyUsage=critical,keyCertSign
  openssl ecparam -genkey -name prime256v1 -noout | openssl pkcs8 -topk8 -nocrypt -out "$dir/pod.key"
  printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\n' "$names" >"$dir/pod.ext"
  openssl req -new -key "$dir/pod.key" -subj /CN=tunnel-cloud |
    openssl x509 -req -days 30 -CA "$dir/ca.crt" -CAkey "$dir/ca.key" -CAcreateserial -extfile "$dir/pod.ext" \
      -out "$dir/pod.crt"
} 2>/dev/null
