#!/bin/sh
# Runs the programs of a node in the foreground: containerd with one image, and kubelet. It is the first process of a
# process namespace, so that containers end with it. Usage: node.sh DIR IMAGE COMMAND..., where COMMAND runs kubelet
set -eu
dir=$1 image=$2
shift 2
# Files that these programs keep in system directories are removed with the namespace.
for place in /run /var/lib /var/log; do mount -t tmpfs tmpfs "$place"; done
containerd --config "$dir/containerd.toml" >"$dir/containerd.log" 2>&1 &
tries=0
until ctr --address "$dir/containerd.sock" --namespace k8s.io images import "$image"; do
  tries=$((tries + 1))
  [ "$tries" -lt 200 ] || exit 1
  sleep 0.1
done
# Not with exec: the first process must reap orphaned processes.
"$@"
