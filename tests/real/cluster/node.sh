#!/bin/sh
# The programs of a node, in the foreground: containerd with one image, and kubelet. The first process of a process
# namespace, so that containers end with it. usage: node.sh DIR IMAGE COMMAND..., where COMMAND runs kubelet
set -eu
dir=$1 image=$2
shift 2
# What these programs keep in places of the machine's own goes with them.
for place in /run /var/lib /var/log; do mount -t tmpfs tmpfs "$place"; done
containerd --config "$dir/containerd.toml" >"$dir/containerd.log" 2>&1 &
tries=0
until ctr --address "$dir/containerd.sock" --namespace k8s.io images import "$image"; do
  tries=$((tries + 1))
  [ "$tries" -lt 200 ] || exit 1
  sleep 0.1
done
# Not by exec: the first process has to take in those whose parents have ended.
"$@"
