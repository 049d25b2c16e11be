//go:build tools

// Package etcd names the etcd that tests run: etcd itself cannot be installed by version, as its go.mod replaces modules.
package etcd

import _ "go.etcd.io/etcd/server/v3"
