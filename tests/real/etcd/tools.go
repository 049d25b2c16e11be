//go:build tools

// Package etcd lists the etcd program for tests: it cannot be installed by version, because its go.mod replaces
// modules.
package etcd

import _ "go.etcd.io/etcd/server/v3"
