package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"strings"
)

// edgeG4 is an edge of generation G4. It dials for the first bytes of a client, and reports neither a failed dial nor
// an end. Its HTTP proxy takes clients to the cloud and to other nodes. An edge of generation G2 or G3 does the same in
// fewer categories.
type edgeG4 struct {
	*edge
	lacks []string // categories that it does not know
}

// cloudG4 is a server of generation G4. Its clients read "established" before any target is dialled.
type cloudG4 struct {
	*cloud
	routes map[string]string              // route cache: the host of the server to which a node is attached
	lookup func(string) ([]string, error) // DNS, which has the same for requests of edges
	proxy  string                         // port of the HTTP proxy, here and at every other server
}

func newEdgeG4(e *edge, lacks ...string) edgeG4 {
	g4 := edgeG4{e, lacks}
	e.receive = g4.receive
	return g4
}

func newCloudG4(c *cloud, routes map[string]string, lookup func(string) ([]string, error)) *cloudG4 {
	g4 := &cloudG4{cloud: c, routes: routes, lookup: lookup}
	c.receive = g4.receive
	return g4
}

// receive has no handler for "httpProxy closed", so a session of this category survives it.
func (e edgeG4) receive(m *message, on *stream) {
	if slices.Contains(e.lacks, m.category) {
		log.Printf("no handler for %s", m.category)
		return
	}
	switch m.category + " " + m.kind {
	case "ssh frontend", "egress frontend", "httpProxy frontend":
		if !e.sessions.deliver(m) {
			e.dial(m, on)
		}
	case "httpProxy backend", "ssh closed", "egress closed":
		e.sessions.deliver(m)
	default:
		log.Printf("no handler for %s %s", m.category, m.kind)
	}
}

// dial opens a session for a topic that is unknown or forgotten: in both cases the message has its first bytes. It
// dials on the read loop, without a limit and without an answer.
func (e edgeG4) dial(m *message, on *stream) {
	conn, err := net.Dial("tcp", m.addr)
	if err != nil {
		log.Printf("%s: %v", m.topic, err)
		return
	}
	s := e.sessions.open(&session{topic: m.topic, category: m.category, data: "backend", addr: m.addr, stream: on})
	s.in <- m
	go e.sessions.copy(s, conn)
}

// client handles one client of the edge's HTTP proxy. The cloud answers a CONNECT in the session, so its answer
// reaches the client like any other bytes.
func (e edgeG4) client(conn net.Conn) {
	request, head, err := readHead(conn)
	on := e.current.Load()
	if err != nil || on == nil {
		log.Printf("no call for a client, or no request: %v", err)
		conn.Close()
		return
	}
	addr := request.Host
	if _, _, err := net.SplitHostPort(addr); err != nil {
		addr = net.JoinHostPort(addr, "80")
	}
	s := e.sessions.open(&session{topic: uuid(), category: "httpProxy", data: "backend", addr: addr, stream: on})
	if request.Method == http.MethodConnect {
		s.say("access", head)
	} else if s.say("access", []byte("CONNECT "+addr+" HTTP/1.1\r\nHost: "+addr+"\r\n\r\n")); !e.pass(s, request, conn) {
		e.sessions.forget(s)
		conn.Close()
		return
	}
	e.sessions.copy(s, conn)
}

// pass sends a request other than CONNECT once the cloud has answered the CONNECT that the edge made up for it. The
// client gets that answer only if it is an error.
func (e edgeG4) pass(s *session, request *http.Request, conn net.Conn) bool {
	select {
	case m := <-s.in:
		if string(m.data) != established {
			_, _ = conn.Write(m.data)
			return false
		}
	case <-s.gone:
		return false
	}
	return request.Write(s) == nil
}

// receive has no handler for "httpProxy closed", so a session of this category survives it.
func (c *cloudG4) receive(m *message, on *stream) {
	switch m.category + " " + m.kind {
	case "httpProxy access":
		c.access(m, on)
	case "ssh backend", "egress backend", "httpProxy backend", "ssh closed", "egress closed":
		c.sessions.deliver(m)
	default:
		log.Printf("no handler for %s %s", m.category, m.kind)
	}
}

// access answers the request of an edge's client in the session itself. The target is at a node here, at a node of
// another server, or reached from this server.
func (c *cloudG4) access(m *message, on *stream) {
	s := &session{topic: m.topic, category: m.category, data: "backend", addr: m.addr, stream: on}
	host, port, _ := net.SplitHostPort(m.addr)
	if to := c.node(host); to != nil {
		c.sessions.open(s)
		s.say("backend", []byte(established))
		go c.relay(s, to, own(port))
		return
	}
	addr, isNode := m.addr, host != "" && !strings.ContainsAny(host, ".:")
	if isNode {
		addr = c.server(host)
	}
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		log.Printf("%s: %v", m.topic, err)
		s.say("backend", []byte("HTTP/1.1 500 Internal Server Error\r\n\r\n"))
		return
	}
	c.sessions.open(s)
	if isNode {
		// The other server's answer is the answer of this session.
		_, _ = conn.Write(m.data)
	} else {
		s.say("backend", []byte(established))
	}
	go c.sessions.copy(s, conn)
}

// server returns the address of another server's HTTP proxy, from the DNS name of a node that is attached to it.
func (c *cloudG4) server(node string) string {
	hosts, err := c.lookup(node)
	if err != nil || len(hosts) == 0 {
		return ""
	}
	return net.JoinHostPort(hosts[0], c.proxy)
}

// relay passes the messages of a session from one edge to another. The first has no bytes, and makes the target's edge
// dial: the client's edge already has its success.
func (c *cloudG4) relay(s *session, to *stream, addr string) {
	to.send(&message{node: to.node, category: s.category, kind: "frontend", topic: s.topic, addr: addr})
	for {
		select {
		case m := <-s.in:
			if m.node == to.node {
				s.say("backend", m.data)
			} else {
				to.send(&message{node: to.node, category: s.category, kind: "backend", topic: s.topic, data: m.data, addr: addr})
			}
		case <-s.gone:
			return
		case <-to.over:
			c.sessions.forget(s)
			return
		}
	}
}

// serveClients handles the clients of three listeners until the context ends.
func (c *cloudG4) serveClients(ctx context.Context, ssh, egress, proxy net.Listener, identity tls.Certificate) {
	_, c.proxy, _ = net.SplitHostPort(proxy.Addr().String())
	egress = tls.NewListener(egress, &tls.Config{Certificates: []tls.Certificate{identity}})
	for category, listener := range map[string]net.Listener{"ssh": ssh, "egress": egress, "httpProxy": proxy} {
		go accept(ctx, listener, func(conn net.Conn) { c.client(category, conn) })
	}
}

// client handles one CONNECT client. It reads "established" now, and the target is dialled once it has sent bytes.
func (c *cloudG4) client(category string, conn net.Conn) {
	request, head, err := readHead(conn)
	if err != nil || request.Method != http.MethodConnect {
		log.Printf("not a CONNECT: %v", err)
		conn.Close()
		return
	}
	host, port, _ := net.SplitHostPort(request.Host)
	to := c.node(host)
	if to == nil {
		c.forward(conn, head, host)
		return
	}
	if _, err := io.WriteString(conn, established); err != nil {
		conn.Close()
		return
	}
	s := &session{topic: uuid(), category: category, data: "frontend", addr: own(port), stream: to}
	c.sessions.copy(c.sessions.open(s), conn)
}

// forward passes a client's request to another server, at the port at which the client came in, and without TLS. At
// the egress port the other server expects TLS, so there it fails.
func (c *cloudG4) forward(conn net.Conn, head []byte, node string) {
	defer conn.Close()
	var server net.Conn
	host, known := c.routes[node]
	err := errors.New("node " + node + " is not attached")
	if known {
		_, port, _ := net.SplitHostPort(conn.LocalAddr().String())
		server, err = net.Dial("tcp", net.JoinHostPort(host, port))
	}
	if err != nil {
		log.Printf("a client: %v", err)
		// Without a version, Go writes "HTTP/0.0".
		_ = (&http.Response{StatusCode: http.StatusInternalServerError}).Write(conn)
		return
	}
	defer server.Close()
	_, _ = server.Write(head)
	go func() {
		_, _ = io.Copy(server, conn)
		server.Close()
	}()
	_, _ = io.Copy(conn, server)
}

// own returns the node's own address: in the tests every node is on this machine.
func own(port string) string { return net.JoinHostPort("127.0.0.1", port) }

// readHead returns a request and its head as it was sent. Bytes behind the head are lost, as in SuperEdge.
func readHead(conn io.Reader) (*http.Request, []byte, error) {
	var raw bytes.Buffer
	request, err := http.ReadRequest(bufio.NewReader(io.TeeReader(conn, &raw)))
	head, _, _ := bytes.Cut(raw.Bytes(), []byte("\r\n\r\n"))
	return request, append(bytes.Clone(head), "\r\n\r\n"...), err
}

const established = "HTTP/1.1 200 Connection established\r\n\r\n"
