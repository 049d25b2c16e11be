package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
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

// cloud is a plain server: edges call it, and it forwards CONNECT clients to them by name.
type cloud struct {
	token    string
	sessions *sessions
	mu       sync.Mutex
	nodes    map[string]*stream
}

// patience is the time that a plain server waits for "connected".
const patience = 5 * time.Second

// run serves both listeners until the context ends.
func (c *cloud) run(ctx context.Context, edges, clients net.Listener, identity tls.Certificate) error {
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
		clients.Close()
	}()
	go func() {
		for {
			conn, err := clients.Accept()
			if err != nil {
				return
			}
			go c.client(conn)
		}
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
		switch m.kind {
		case "connected", "connect-failed", "tcp-forward", "closed":
			c.sessions.deliver(m, out, c.node(m.node) == out)
		default:
			log.Printf("no handler for %s %s", m.category, m.kind)
		}
	}
}

func (c *cloud) node(name string) *stream {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nodes[name]
}

// client handles one CONNECT client.
func (c *cloud) client(conn net.Conn) {
	fail := func(why string) {
		body := why + "\n"
		fmt.Fprintf(conn, "HTTP/1.1 500 Internal Server Error\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(body), body)
		conn.Close()
	}
	request, err := http.ReadRequest(bufio.NewReader(conn))
	if err != nil || request.Method != http.MethodConnect {
		fail("not a CONNECT")
		return
	}
	host, port, err := net.SplitHostPort(request.RequestURI)
	if err != nil {
		fail(err.Error())
		return
	}
	to := c.node(host)
	if to == nil {
		fail("node " + host + " is not attached")
		return
	}
	// The node's own address: in the tests every node is on this machine.
	addr := net.JoinHostPort("127.0.0.1", port)
	s := c.sessions.open(uuid(), "ssh", to)
	to.send(&message{node: host, category: s.category, kind: "connecting", topic: s.topic,
		data: []byte("CONNECT " + addr + " HTTP/1.1\r\n\r\n\r\n"), addr: addr})
	select {
	case m := <-s.in:
		if m.kind == "connect-failed" || m.kind == "closed" {
			c.sessions.forget(s)
			fail(string(m.data))
			return
		}
	case <-s.gone:
		fail("the edge went away")
		return
	case <-time.After(patience):
		c.sessions.forget(s)
		fail("timed out")
		return
	}
	if _, err := io.WriteString(conn, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		s.say("closed", []byte(err.Error()))
		c.sessions.forget(s)
		conn.Close()
		return
	}
	c.sessions.copy(s, conn)
}

func uuid() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
