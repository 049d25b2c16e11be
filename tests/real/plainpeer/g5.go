package main

import (
	"bufio"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"time"
)

// edgeG5 is an edge of generation G5: it dials the targets that the server requests, and reports the result.
type edgeG5 struct{ *edge }

// cloudG5 is a server of generation G5: it forwards CONNECT clients to edges by name.
type cloudG5 struct{ *cloud }

// patience is the time that a server of generation G5 waits for "connected".
const patience = 5 * time.Second

func newEdgeG5(e *edge) edgeG5 {
	g5 := edgeG5{e}
	e.receive = g5.receive
	return g5
}

func newCloudG5(c *cloud) cloudG5 {
	g5 := cloudG5{c}
	c.receive = g5.receive
	return g5
}

func (e edgeG5) receive(m *message, on *stream) {
	switch {
	case m.category != "ssh" && m.category != "egress" && m.category != "httpProxy":
		log.Printf("no handler for %s %s", m.category, m.kind)
	case m.kind == "connecting":
		e.dial(m, on)
	case m.kind == "connected" || m.kind == "connect-failed" || m.kind == "tcp-forward" || m.kind == "closed":
		deliverG5(e.sessions, m, on, m.node == e.node)
	default:
		log.Printf("no handler for %s %s", m.category, m.kind)
	}
}

// dial answers "connecting". It dials on the read loop and without a limit, like plain edges.
func (e edgeG5) dial(m *message, on *stream) {
	if e.sessions.deliver(m) {
		return
	}
	conn, err := net.Dial("tcp", m.addr)
	if err != nil {
		log.Printf("%s: %v", m.topic, err)
		on.send(&message{node: e.node, category: m.category, kind: "connect-failed", topic: m.topic, data: []byte(err.Error())})
		return
	}
	on.send(&message{node: e.node, category: m.category, kind: "connected", topic: m.topic})
	s := e.sessions.open(&session{topic: m.topic, category: m.category, data: "tcp-forward", closes: true, stream: on})
	go e.sessions.copy(s, conn)
}

func (c cloudG5) receive(m *message, on *stream) {
	switch m.kind {
	case "connected", "connect-failed", "tcp-forward", "closed":
		deliverG5(c.sessions, m, on, c.node(m.node) == on)
	case "connecting":
		// Requests of an edge's clients are not served, so the answer is the same for a CONNECT.
		on.send(&message{node: m.node, category: m.category, kind: "connect-failed", topic: m.topic,
			data: []byte("does not handle non-httpConnect requests")})
	default:
		log.Printf("no handler for %s %s", m.category, m.kind)
	}
}

// client handles one CONNECT client.
func (c cloudG5) client(conn net.Conn) {
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
	s := c.sessions.open(&session{topic: uuid(), category: "ssh", data: "tcp-forward", closes: true, stream: to})
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

// deliverG5 passes a message to its session. A message for an unknown session is answered with "closed" if answer is
// true.
func deliverG5(all *sessions, m *message, on *stream, answer bool) {
	if !all.deliver(m) && m.kind != "closed" && answer {
		on.send(&message{node: m.node, category: m.category, kind: "closed", topic: m.topic,
			data: []byte("msg cannot be forwarded due to disconnection")})
	}
}
