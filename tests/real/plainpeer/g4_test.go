package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Tests of generation G4, one for each thing that a program must know about it. Most of them give messages to one end
// and read what it sends; the others have a cloud and its edges.

func TestG4EdgeDialsForTheFirstBytesAndRepeatsTheAddressInEachMessage(t *testing.T) {
	target := serve(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
	for _, category := range []string{"ssh", "egress", "httpProxy"} {
		e, on := edgeAlone()
		for _, text := range []string{"first", "second"} {
			e.receive(say(category, "frontend", target, text), on)
			same(t, next(t, on), say(category, "backend", target, text))
		}
	}
}

func TestG4EdgeSendsNothingIfItCannotDial(t *testing.T) {
	e, on := edgeAlone()
	e.receive(say("ssh", "frontend", refused(t), "first"), on)
	silent(t, on)
	if e.sessions.count() != 0 {
		t.Fatal("a session without a connection")
	}
}

func TestG4EdgeDialsOnItsReadLoopWithoutALimit(t *testing.T) {
	target, answer := full(t)
	e, on := edgeAlone()
	returned := make(chan struct{})
	go func() {
		e.receive(say("ssh", "frontend", target, "first"), on)
		close(returned)
	}()
	select {
	case <-returned:
		t.Fatal("the read loop did not wait for the dial")
	case <-time.After(300 * time.Millisecond):
	}
	answer()
	select {
	case <-returned:
	case <-time.After(10 * time.Second):
		t.Fatal("the read loop still waits")
	}
}

func TestG4EdgeForgetsASessionAtItsEndAndFeedsLaterBytesIntoANewConnection(t *testing.T) {
	target, accepted := targets(t)
	e, on := edgeAlone()
	for _, text := range []string{"SSH-2.0-client", "from the middle"} {
		e.receive(say("ssh", "frontend", target, text), on)
		conn := accepted()
		conn.reads(t, text)
		conn.Close()
		eventually(t, "the edge forgets the session", func() bool { return e.sessions.count() == 0 })
		silent(t, on)
	}
}

func TestG4SendsAtMost1024BytesInAMessage(t *testing.T) {
	sent := strings.Repeat("0123456789abcdef", 500)
	target := serve(t, func(conn net.Conn) {
		_, _ = io.WriteString(conn, sent)
		_, _ = io.Copy(io.Discard, conn)
	})
	e, on := edgeAlone()
	e.receive(say("ssh", "frontend", target, "go"), on)
	got := ""
	for len(got) < len(sent) {
		m := next(t, on)
		if len(m.data) == 0 || len(m.data) > 1024 || m.addr != target {
			t.Fatalf("%d bytes for %q in a message", len(m.data), m.addr)
		}
		got += string(m.data)
	}
	if got != sent {
		t.Fatal("the bytes differ")
	}
}

func TestG4DropsUnknownPairsWithoutAnAnswer(t *testing.T) {
	dialled := make(chan struct{}, 100)
	target := serve(t, func(net.Conn) { dialled <- struct{}{} })
	pairs := []string{"ssh connecting", "ssh tcp-forward", "ssh access", "httpProxy connecting", "httpProxy closed",
		"tcp frontend", "https connecting", "stream ping", "other frontend"}
	e, toCloud := edgeAlone()
	for _, pair := range append(pairs, "ssh backend", "httpProxy access") {
		category, kind, _ := strings.Cut(pair, " ")
		e.receive(say(category, kind, target, "x"), toCloud)
	}
	silent(t, toCloud)
	c, toEdge := cloudAlone()
	for _, pair := range append(pairs, "ssh frontend", "egress frontend", "httpProxy frontend") {
		category, kind, _ := strings.Cut(pair, " ")
		c.receive(say(category, kind, target, "x"), toEdge)
	}
	silent(t, toEdge)
	select {
	case <-dialled:
		t.Fatal("the target was dialled")
	default:
	}
}

func TestG4DropsMessagesForForgottenTopicsWithoutAnAnswer(t *testing.T) {
	e, toCloud := edgeAlone()
	e.receive(say("httpProxy", "backend", "127.0.0.1:1", "x"), toCloud)
	e.receive(say("ssh", "closed", "127.0.0.1:1", ""), toCloud)
	silent(t, toCloud)
	c, toEdge := cloudAlone()
	for _, category := range []string{"ssh", "egress", "httpProxy"} {
		c.receive(say(category, "backend", "127.0.0.1:1", "x"), toEdge)
	}
	silent(t, toEdge)
}

func TestG4EdgeEndsASessionOnClosedUnlessItIsOfTheHTTPProxy(t *testing.T) {
	target := serve(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
	for category, ends := range map[string]bool{"ssh": true, "egress": true, "httpProxy": false} {
		e, on := edgeAlone()
		e.receive(say(category, "frontend", target, "first"), on)
		next(t, on)
		e.receive(say(category, "closed", target, ""), on)
		if ends {
			eventually(t, "the edge ends the session", func() bool { return e.sessions.count() == 0 })
			silent(t, on)
			continue
		}
		e.receive(say(category, "frontend", target, "second"), on)
		same(t, next(t, on), say(category, "backend", target, "second"))
	}
}

func TestG4CloudEndsASessionOnClosedUnlessItIsOfTheHTTPProxy(t *testing.T) {
	target := serve(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
	for _, category := range []string{"ssh", "egress", "httpProxy"} {
		f := cloudWithEdges(t, "127.0.0.1", "node1")
		conn := f.dial(t, category, target)
		conn.echoes(t, "first")
		closed := say(category, "closed", target, "")
		closed.topic = f.c.sessions.one()
		f.c.receive(closed, f.c.node("node1"))
		if category == "httpProxy" {
			conn.echoes(t, "second")
		} else if rest, err := io.ReadAll(conn.reader); err != nil || len(rest) > 0 {
			t.Fatalf("%q, %v", rest, err)
		}
	}
}

func TestG4CloudAnswersItsClientsBeforeAnyTargetIsDialled(t *testing.T) {
	f := cloudWithEdges(t, "127.0.0.1", "node1")
	for _, category := range []string{"ssh", "egress", "httpProxy"} {
		conn := f.dial(t, category, refused(t)) // reads 200
		_, _ = io.WriteString(conn, "first")
		if text := conn.silent(); text != "" {
			t.Fatalf("%s: read %q", category, text)
		}
	}
}

func TestG4NeverDialsATargetThatSpeaksFirst(t *testing.T) {
	dialled := make(chan struct{}, 1)
	target := serve(t, func(conn net.Conn) {
		dialled <- struct{}{}
		_, _ = io.WriteString(conn, "220 ready")
		_, _ = io.Copy(io.Discard, conn)
	})
	conn := cloudWithEdges(t, "127.0.0.1", "node1").dial(t, "ssh", target)
	if text := conn.silent(); text != "" || len(dialled) > 0 {
		t.Fatalf("read %q", text)
	}
	_, _ = io.WriteString(conn, "x")
	conn.reads(t, "220 ready")
}

func TestG4CloudForgetsASessionAtItsClientsEndAndTheEdgeKeepsIt(t *testing.T) {
	target := serve(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
	f := cloudWithEdges(t, "127.0.0.1", "node1")
	conn := f.dial(t, "ssh", target)
	conn.echoes(t, "first")
	conn.Close()
	eventually(t, "the cloud forgets the session", func() bool { return f.c.sessions.count() == 0 })
	time.Sleep(200 * time.Millisecond) // a message takes less than a millisecond
	if f.edges["node1"].sessions.count() != 1 {
		t.Fatal("the edge heard of the end")
	}
}

func TestG4ClientOfATargetThatHasEndedReadsNoEnd(t *testing.T) {
	target := serve(t, func(conn net.Conn) {
		bytes := make([]byte, 100)
		n, _ := conn.Read(bytes)
		fmt.Fprintf(conn, "<%s>", bytes[:n])
	})
	conn := cloudWithEdges(t, "127.0.0.1", "node1").dial(t, "ssh", target)
	for _, text := range []string{"first", "from the middle"} {
		_, _ = io.WriteString(conn, text)
		conn.reads(t, "<"+text+">")
		if text := conn.silent(); text != "" {
			t.Fatalf("read %q", text)
		}
	}
}

func TestG4CloudRefusesClientsInGosWay(t *testing.T) {
	f := cloudWithEdges(t, "127.0.0.1", "node1")
	for _, category := range []string{"ssh", "egress", "httpProxy"} {
		conn := f.connect(t, category)
		_, _ = io.WriteString(conn, "CONNECT elsewhere:22 HTTP/1.1\r\n\r\n")
		if text, _ := io.ReadAll(conn); !strings.HasPrefix(string(text), "HTTP/0.0 500 Internal Server Error\r\n") {
			t.Fatalf("%s: %q", category, text)
		}
		conn = f.connect(t, category)
		_, _ = io.WriteString(conn, "GET http://node1/ HTTP/1.1\r\n\r\n")
		if text, _ := io.ReadAll(conn); len(text) > 0 {
			t.Fatalf("%s: %q", category, text)
		}
	}
}

func TestG4TargetIsInTheRequestLineAndNotInHost(t *testing.T) {
	target := serve(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
	f := cloudWithEdges(t, "127.0.0.1", "node1")
	conn := client{Conn: f.connect(t, "egress")}
	conn.reader = bufio.NewReader(conn)
	fmt.Fprintf(conn, "CONNECT node1:%s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", port(target))
	conn.reads(t, established)
	conn.echoes(t, "bytes")
}

func TestG4CloudAnswersAnEdgesClientInTheSession(t *testing.T) {
	target := serve(t, func(conn net.Conn) {
		_, _ = io.WriteString(conn, "220 ready")
		_, _ = io.Copy(conn, conn)
	})
	c, on := cloudAlone()
	c.receive(say("httpProxy", "access", target, "CONNECT "+target+" HTTP/1.1\r\n\r\n"), on)
	same(t, next(t, on), say("httpProxy", "backend", target, "HTTP/1.1 200 Connection established\r\n\r\n"))
	same(t, next(t, on), say("httpProxy", "backend", target, "220 ready"))
	c.receive(say("httpProxy", "backend", target, "bytes"), on)
	same(t, next(t, on), say("httpProxy", "backend", target, "bytes"))

	target = refused(t)
	c, on = cloudAlone()
	c.receive(say("httpProxy", "access", target, "CONNECT "+target+" HTTP/1.1\r\n\r\n"), on)
	same(t, next(t, on), say("httpProxy", "backend", target, "HTTP/1.1 500 Internal Server Error\r\n\r\n"))
	if silent(t, on); c.sessions.count() != 0 {
		t.Fatal("a session without a connection")
	}
}

func TestG4EdgesClientReadsTheAnswerOfTheCloud(t *testing.T) {
	target := serve(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
	f := cloudWithEdges(t, "127.0.0.1", "node1")
	conn := f.client(t, "node1")
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\n\r\n", target)
	conn.reads(t, established)
	conn.echoes(t, "bytes")
	conn = f.client(t, "node1")
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\n\r\n", refused(t))
	conn.reads(t, "HTTP/1.1 500 Internal Server Error\r\n\r\n")
}

func TestG4EdgePassesOtherMethodsBehindAConnectOfItsOwn(t *testing.T) {
	web := serve(t, func(conn net.Conn) {
		request, err := http.ReadRequest(bufio.NewReader(conn))
		if err != nil {
			return
		}
		fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%s", request.RequestURI[1:])
	})
	conn := cloudWithEdges(t, "127.0.0.1", "node1").client(t, "node1")
	fmt.Fprintf(conn, "GET http://%s/x HTTP/1.1\r\nHost: elsewhere\r\n\r\n", web)
	conn.reads(t, "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
	conn = cloudWithEdges(t, "127.0.0.1", "node1").client(t, "node1")
	fmt.Fprintf(conn, "GET http://%s/x HTTP/1.1\r\n\r\n", refused(t))
	conn.reads(t, "HTTP/1.1 500 Internal Server Error\r\n\r\n")
}

func TestG4EdgesOfOneCloudReachEachOther(t *testing.T) {
	target := serve(t, func(conn net.Conn) {
		_, _ = io.WriteString(conn, "220 ready")
		_, _ = io.Copy(conn, conn)
	})
	f := cloudWithEdges(t, "127.0.0.1", "node1", "node2")
	conn := f.client(t, "node1")
	fmt.Fprintf(conn, "CONNECT node2:%s HTTP/1.1\r\n\r\n", port(target))
	conn.reads(t, established+"220 ready")
	conn.echoes(t, "bytes")

	conn = f.client(t, "node1")
	fmt.Fprintf(conn, "CONNECT node2:%s HTTP/1.1\r\n\r\n", port(refused(t)))
	conn.reads(t, established) // success first, and then nothing
	if text := conn.silent(); text != "" {
		t.Fatalf("read %q", text)
	}
}

func TestG4CloudReportsSuccessBeforeItAsksTheOtherEdge(t *testing.T) {
	c, from := cloudAlone()
	to := newStream("node2")
	c.nodes["node2"] = to
	c.receive(say("httpProxy", "access", "node2:80", "CONNECT node2:80 HTTP/1.1\r\n\r\n"), from)
	same(t, next(t, from), say("httpProxy", "backend", "node2:80", established))
	to2 := func(kind, text string) *message {
		m := say("httpProxy", kind, "127.0.0.1:80", text)
		m.node = "node2"
		return m
	}
	same(t, next(t, to), to2("frontend", ""))
	c.receive(say("httpProxy", "backend", "node2:80", "of the client"), from)
	same(t, next(t, to), to2("backend", "of the client"))
	c.receive(to2("backend", "of the target"), to)
	same(t, next(t, from), say("httpProxy", "backend", "node2:80", "of the target"))
	to.close()
	eventually(t, "the cloud forgets the session", func() bool { return c.sessions.count() == 0 })
}

func TestG4CloudPassesClientsOfOtherServersNodesOnWithoutTLS(t *testing.T) {
	target := serve(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
	second := cloudWithEdges(t, "127.0.0.2", "node2")
	first := cloudAt(t, "127.0.0.3", second.ports())
	first.c.routes["node2"] = "127.0.0.2"
	for _, category := range []string{"ssh", "httpProxy"} {
		conn := client{Conn: first.connect(t, category)}
		conn.reader = bufio.NewReader(conn)
		fmt.Fprintf(conn, "CONNECT node2:%s HTTP/1.1\r\n\r\n", port(target))
		conn.reads(t, established)
		conn.echoes(t, "bytes")
	}
	conn := first.connect(t, "egress") // that port of the second server expects TLS
	fmt.Fprintf(conn, "CONNECT node2:%s HTTP/1.1\r\n\r\n", port(target))
	if text, _ := io.ReadAll(conn); strings.Contains(string(text), "200") {
		t.Fatalf("%q", text)
	}
}

func TestG4CloudFindsTheNodeOfAnEdgesClientByDNSAndNotByItsRoutes(t *testing.T) {
	target := serve(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
	second := cloudWithEdges(t, "127.0.0.2", "node2")
	first := cloudAt(t, "127.0.0.3", second.ports())
	first.attach(t, "node1")
	first.c.routes["node3"] = "127.0.0.2"
	first.c.lookup = func(name string) ([]string, error) {
		if name == "node2" {
			return []string{"127.0.0.2"}, nil
		}
		return nil, errors.New("no such host")
	}
	conn := first.client(t, "node1")
	fmt.Fprintf(conn, "CONNECT node2:%s HTTP/1.1\r\n\r\n", port(target))
	conn.reads(t, established)
	conn.echoes(t, "bytes")
	conn = first.client(t, "node1")
	fmt.Fprintf(conn, "CONNECT node3:%s HTTP/1.1\r\n\r\n", port(target))
	conn.reads(t, "HTTP/1.1 500 Internal Server Error\r\n\r\n")
}

// say returns a message of the session in the tests of one end.
func say(category, kind, addr, text string) *message {
	return &message{node: "node1", category: category, kind: kind, topic: "a topic", data: []byte(text), addr: addr}
}

func edgeAlone() (edgeG4, *stream) {
	return newEdgeG4(&edge{node: "node1", sessions: newSessions()}), newStream("node1")
}

func cloudAlone() (*cloudG4, *stream) {
	on := newStream("node1")
	c := &cloud{sessions: newSessions(), nodes: map[string]*stream{"node1": on}}
	return newCloudG4(c, map[string]string{}, nil), on
}

// next returns the next message that an end sends.
func next(t *testing.T, on *stream) *message {
	t.Helper()
	select {
	case m := <-on.out:
		return m
	case <-time.After(10 * time.Second):
		t.Fatal("no message within 10 s")
		return nil
	}
}

// silent checks that an end has sent nothing. All that it sends about a session is queued before it forgets it.
func silent(t *testing.T, on *stream) {
	t.Helper()
	if len(on.out) > 0 {
		t.Fatalf("sent %v", <-on.out)
	}
}

func same(t *testing.T, got, expected *message) {
	t.Helper()
	if fmt.Sprintf("%q", *got) != fmt.Sprintf("%q", *expected) {
		t.Fatalf("got %q instead of %q", *got, *expected)
	}
}

func (all *sessions) one() string {
	all.mu.Lock()
	defer all.mu.Unlock()
	for topic := range all.byTopic {
		return topic
	}
	return ""
}

// fleet is a cloud of one server, with edges.
type fleet struct {
	c       *cloudG4
	ctx     context.Context
	ca      string
	calls   string
	clients map[string]net.Listener // by category
	proxies map[string]net.Listener // of the edges, by node
	edges   map[string]edgeG4

	heartbeat time.Duration
}

func cloudWithEdges(t *testing.T, host string, nodes ...string) *fleet {
	f := cloudAt(t, host, map[string]string{"ssh": "0", "egress": "0", "httpProxy": "0"})
	for _, node := range nodes {
		f.attach(t, node)
	}
	return f
}

// cloudAt returns a server with these ports for clients, by category. Two servers with the same ports need hosts other
// than 127.0.0.1, where connections of other tests take ports.
func cloudAt(t *testing.T, host string, ports map[string]string) *fleet {
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	ca, identity := certificate(t)
	calls := bind(t, net.JoinHostPort(host, "0"))
	f := &fleet{ctx: ctx, heartbeat: time.Minute, ca: ca, calls: calls.Addr().String(),
		clients: map[string]net.Listener{}, proxies: map[string]net.Listener{}, edges: map[string]edgeG4{}}
	for category, port := range ports {
		f.clients[category] = bind(t, net.JoinHostPort(host, port))
	}
	f.c = newCloudG4(&cloud{token: "secret", sessions: newSessions(), nodes: map[string]*stream{}}, map[string]string{}, net.LookupHost)
	f.c.serveClients(ctx, f.clients["ssh"], f.clients["egress"], f.clients["httpProxy"], identity)
	go f.c.run(ctx, calls, identity)
	return f
}

func (f *fleet) attach(t *testing.T, node string) {
	e := newEdgeG4(&edge{cloud: f.calls, ca: f.ca, name: "tunnel.test", node: node, token: "secret",
		heartbeat: f.heartbeat, sessions: newSessions()})
	f.proxies[node], f.edges[node] = bind(t, "127.0.0.1:0"), e
	go accept(f.ctx, f.proxies[node], e.client)
	go e.run(f.ctx)
	eventually(t, "the edge is attached", func() bool { return f.c.node(node) != nil && e.current.Load() != nil })
}

func (f *fleet) ports() map[string]string {
	ports := map[string]string{}
	for category, listener := range f.clients {
		ports[category] = port(listener.Addr().String())
	}
	return ports
}

// connect returns a connection to the cloud's listener for clients of a category.
func (f *fleet) connect(t *testing.T, category string) net.Conn {
	address := f.clients[category].Addr().String()
	conn, err := net.Dial("tcp", address)
	if category == "egress" {
		conn, err = tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	return conn
}

// dial returns a client of the cloud that has read the success, for a port of node1.
func (f *fleet) dial(t *testing.T, category, target string) client {
	conn := client{Conn: f.connect(t, category)}
	conn.reader = bufio.NewReader(conn)
	fmt.Fprintf(conn, "CONNECT node1:%s HTTP/1.1\r\n\r\n", port(target))
	conn.reads(t, established)
	return conn
}

// client returns a connection to the HTTP proxy of an edge.
func (f *fleet) client(t *testing.T, node string) client {
	conn, err := net.Dial("tcp", f.proxies[node].Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	return client{conn, bufio.NewReader(conn)}
}

func (c client) reads(t *testing.T, expected string) {
	t.Helper()
	got := make([]byte, len(expected))
	if n, err := io.ReadFull(c.reader, got); err != nil || string(got) != expected {
		t.Fatalf("read %q instead of %q (%v)", got[:n], expected, err)
	}
}

func (c client) echoes(t *testing.T, text string) {
	t.Helper()
	_, _ = io.WriteString(c, text)
	c.reads(t, text)
}

// silent returns what can be read within 200 ms, or the end of the connection. Anything takes less than 1 ms.
func (c client) silent() string {
	_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	defer c.SetReadDeadline(time.Now().Add(20 * time.Second))
	bytes := make([]byte, 100)
	n, err := c.reader.Read(bytes)
	if n == 0 && !errors.Is(err, context.DeadlineExceeded) && !isTimeout(err) {
		return err.Error()
	}
	return string(bytes[:n])
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

func bind(t *testing.T, address string) net.Listener {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return listener
}

func port(address string) string {
	_, port, _ := net.SplitHostPort(address)
	return port
}

// refused returns an address at which nobody listens.
func refused(t *testing.T) string {
	listener := bind(t, "127.0.0.1:0")
	defer listener.Close()
	return listener.Addr().String()
}

// full returns an address that answers no dial, because its queue is full, and a function after which it does.
func full(t *testing.T) (string, func()) {
	socket, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(socket) })
	if err := errors.Join(syscall.Bind(socket, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(socket, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(socket)
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port)
	for {
		conn, err := net.DialTimeout("tcp", address, 100*time.Millisecond)
		if isTimeout(err) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
	}
	return address, func() {
		for range 2 {
			if conn, _, err := syscall.Accept(socket); err == nil {
				t.Cleanup(func() { syscall.Close(conn) })
			}
		}
	}
}
