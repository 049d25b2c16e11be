package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"log"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// cloud is the part of a plain server that all generations have in common: edges call it.
type cloud struct {
	token    string
	sessions *sessions
	receive  func(*message, *stream) // handles each message of an edge that is not a heartbeat
	mu       sync.Mutex
	nodes    map[string]*stream
}

// run serves edges until the context ends.
func (c *cloud) run(ctx context.Context, edges net.Listener, identity tls.Certificate) error {
	server := grpc.NewServer(
		grpc.ForceServerCodec(codec{}),
		grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{identity}})),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			MaxConnectionAgeGrace: 5 * time.Second, Time: 5 * time.Second, Timeout: time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 15 * time.Second, PermitWithoutStream: true}))
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "proto.Stream",
		HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{
			StreamName: "TunnelStreaming", ServerStreams: true, ClientStreams: true,
			Handler: func(_ any, rpc grpc.ServerStream) error { return c.serve(rpc) },
		}},
	}, c)
	go func() {
		<-ctx.Done()
		server.Stop()
	}()
	return server.Serve(edges)
}

// admit checks the token and returns the name of the calling node.
func (c *cloud) admit(ctx context.Context) (string, error) {
	md, ok := metadata.FromIncomingContext(ctx)
	if !ok {
		return "", status.Error(codes.InvalidArgument, "missing metadata")
	}
	values := md["authorization"]
	if len(values) == 0 {
		return "", status.Error(codes.Unknown, "failed to obtain token")
	}
	var claim struct {
		NodeName string
		Token    string
	}
	if err := json.Unmarshal([]byte(strings.TrimPrefix(values[0], "Bearer ")), &claim); err != nil {
		return "", status.Error(codes.Unknown, err.Error())
	}
	if claim.Token != c.token {
		return "", status.Error(codes.Unauthenticated, "invalid token")
	}
	return claim.NodeName, nil
}

// serve handles the call of one edge. It sends nothing, not even headers, until there is a message to send.
func (c *cloud) serve(rpc grpc.ServerStream) error {
	node, err := c.admit(rpc.Context())
	if err != nil {
		log.Printf("refused: %v", err)
		return err
	}
	out := newStream(node)
	c.mu.Lock()
	c.nodes[node] = out
	c.mu.Unlock()
	log.Printf("attached %s", node)
	defer func() {
		c.mu.Lock()
		if c.nodes[node] == out {
			delete(c.nodes, node)
		}
		c.mu.Unlock()
		out.close()
		c.sessions.forgetAll(out)
		log.Printf("detached %s", node)
	}()
	go func() {
		if err := out.pump(func(m *message) error { return rpc.SendMsg(m) }); err != nil {
			log.Printf("sending to %s: %v", node, err)
		}
	}()
	for {
		m := new(message)
		if err := rpc.RecvMsg(m); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if m.category == "stream" && m.kind == "heartbeat" {
			if to := c.node(m.node); to != nil {
				to.send(m)
				log.Printf("heartbeat %s", node)
			}
			continue
		}
		c.receive(m, out)
	}
}

func (c *cloud) node(name string) *stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nodes[name]
}
