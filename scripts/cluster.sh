#!/usr/bin/env bash
# Runs a cluster to experiment with: three servers with etcd and CoreDNS, a replacement for the Service of the servers,
# and four edges, all on loopback addresses. Runs until Ctrl-C.
#
#   --check         request every node from every server, print the results, and exit
#   TUNNEL=FILE     the program; otherwise target/release/tunnel is built
set -euo pipefail
# shellcheck source=scripts/help.sh
. "$(dirname "$0")/help.sh"
helps "$@"
case ${1:-} in "" | --check) ;; *) wrong "$1" ;; esac
cd "$(dirname "$0")/.."
# shellcheck source=scripts/local.sh
. scripts/local.sh
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tunnel-tests
# With job control each child is a separate process group: Ctrl-C reaches only this script, which stops them in order.
set -m

pods=(127.0.0.11 127.0.0.12 127.0.0.13)
service=127.0.0.10
edges=(1 2 3 4)
zone=nodes.test
dns_port=5300 etcd_port=23790 connect=2222

stop() {
  trap '' INT TERM
  # Servers remove their records, so etcd, CoreDNS and the Service stop last.
  finish "${started[@]:3}"
  finish "${started[@]:0:3}"
  rm -rf "$dir"
}
trap stop EXIT
trap 'exit 130' INT TERM

registry_config() {
  local all
  all=$(printf '"%s:9000", ' "${pods[@]}")
  cat <<END
[server.dns]
zone = "$zone"
publish = "etcd"
etcd.endpoints = ["http://127.0.0.1:$etcd_port"]
resolvers = ["$service:$dns_port"]
[server.peers]
addresses = [${all%, }]
[server.edge_access]
nodes = ["node*"]
END
}

# more_of_edge NUMBER: further config of an edge in this cluster.
more_of_edge() {
  cat <<END
metrics_listen = "127.0.0.1:1202$1"
[edge.session]
drain_timeout = "1s"
END
}

# The replacement for the Service: sends each connection to a random server that is up.
balancer() {
  cat <<END
#!/usr/bin/env bash
for pod in \$(shuf -e ${pods[*]}); do
  if (exec 3<>"/dev/tcp/\$pod/9000") 2>/dev/null; then exec socat - "TCP:\$pod:9000"; fi
done
END
}

for program in socat curl dig openssl; do
  command -v "$program" >/dev/null || { echo "$program is missing: scripts/parts.sh installs it" >&2; exit 1; }
done
coredns=$(compgen -G "$cache/coredns-*/coredns" | tail -n 1) etcd=$(compgen -G "$cache/etcd-*/etcd" | tail -n 1) || {
  echo "CoreDNS or etcd is missing: scripts/goparts.sh builds them" >&2
  exit 1
}
if [[ -z ${TUNNEL:-} ]]; then
  cargo build --release --quiet
  TUNNEL=target/release/tunnel
fi

certificates "$service" "${pods[@]}"
tokens "${edges[@]/#/node}"
balancer >"$dir/balancer"
chmod +x "$dir/balancer"
cat >"$dir/Corefile" <<END
$zone:$dns_port {
  bind $service
  etcd {
    path /skydns
    endpoint http://127.0.0.1:$etcd_port
  }
}
END
peers=http://127.0.0.1:$((etcd_port + 1)) clients=http://127.0.0.1:$etcd_port
start etcd "$etcd" --data-dir "$dir/etcd" --unsafe-no-fsync --initial-cluster "default=$peers" \
  --listen-client-urls "$clients" --advertise-client-urls "$clients" \
  --listen-peer-urls "$peers" --initial-advertise-peer-urls "$peers"
await etcd curl -sf -m 2 "$clients/health"
start coredns "$coredns" -conf "$dir/Corefile"
start service socat "TCP-LISTEN:9000,bind=$service,reuseaddr,fork" "EXEC:$dir/balancer"
for i in "${!pods[@]}"; do
  { pod_config "${pods[i]}" 9000 9010 "$connect" 3s && registry_config; } >"$dir/pod$((i + 1)).toml"
  POD_IP=${pods[i]} start "pod$((i + 1))" "$TUNNEL" server -c "$dir/pod$((i + 1)).toml"
done
for i in "${!pods[@]}"; do await "pod$((i + 1))" ready "${pods[i]}:9010"; done
for i in "${edges[@]}"; do
  { edge_config "node$i" "$service:9000" "127.0.0.1:1302$i" && more_of_edge "$i"; } >"$dir/edge$i.toml"
  start "edge$i" "$TUNNEL" edge -c "$dir/edge$i.toml"
done
for i in "${edges[@]}"; do await "edge$i" ready "127.0.0.1:1302$i"; done

resolve() { dig +short +time=1 +tries=1 -p "$dns_port" "@$service" "node$1.$zone"; }
resolves() { [[ -n $(resolve "$1") ]]; }
for i in "${edges[@]}"; do
  await coredns resolves "$i"
  echo "node$i is at $(resolve "$i")"
done

if [[ ${1:-} == --check ]]; then
  for pod in "${pods[@]}"; do
    for i in "${edges[@]}"; do
      curl -sSf -m 10 -p -x "http://$pod:$connect" "http://node$i:1202$i/metrics" >/dev/null || {
        echo "node$i does not respond through $pod" >&2
        exit 1
      }
      echo "node$i responds through $pod"
    done
  done
  exit
fi

cat <<END

Logs, configs and process ids are in $dir. Try:

  curl -p -x http://${pods[0]}:$connect http://node1:12021/metrics            # any node through any server
  ssh -o ProxyCommand="nc -X connect -x ${pods[1]}:$connect %h %p" node2     # if an sshd listens here
  dig +short -p $dns_port @$service node1.$zone                           # the server it is connected to
  curl http://${pods[0]}:9010/metrics                                  # the metrics of a server
  kill -9 \$(cat $dir/pod1.pid)                            # its nodes move to its peers
  POD_IP=${pods[0]} $TUNNEL server -c $dir/pod1.toml      # and it restarts

Ctrl-C stops everything.
END
# Servers may be killed as part of the experiment: wait only for this process.
start idle sleep infinity
wait "${started[-1]}"
