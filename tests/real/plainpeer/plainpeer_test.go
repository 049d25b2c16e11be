package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Tests of both ends against each other: if these fail, failures of the Rust tests are not the Rust program's.

func TestMessageSurvivesTheWireAndKeepsUnknownFields(t *testing.T) {
	in := message{node: "n", category: "ssh", kind: "tcp-forward", topic: "t", data: []byte{0, 1, 255}, addr: "a:1"}
	wire, err := codec{}.Marshal(&in)
	if err != nil {
		t.Fatal(err)
	}
	wire = append(wire, 0x3a, 1, 'x', 0x40, 5) // fields 7 and 8, from a later version
	var out message
	if err := (codec{}).Unmarshal(wire, &out); err != nil {
		t.Fatal(err)
	}
	if again, err := (codec{}).Marshal(&out); err != nil || !bytes.Equal(again, wire) {
		t.Fatalf("%x became %x (%v)", wire, again, err)
	}
	if out.unknown = nil; fmt.Sprint(out) != fmt.Sprint(in) {
		t.Fatalf("%v became %v", in, out)
	}
	if err := (codec{}).Unmarshal([]byte{0x0a, 5, 'x'}, &out); err == nil {
		t.Fatal("a truncated message was accepted")
	}
}

func TestBytesGoBothWaysThroughEdgeAndCloud(t *testing.T) {
	target := serve(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
	_, connect := pair(t, "secret", "secret")
	conn := dial(t, connect, target)
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	go conn.Write(sent)
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(conn.reader, got); err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("the echo differs (%v)", err)
	}
}

func TestEndOfStreamEndsBothDirectionsAndTheSessionIsForgotten(t *testing.T) {
	ended := make(chan error, 1)
	target := serve(t, func(conn net.Conn) {
		_, _ = io.WriteString(conn, "bye")
		conn.(*net.TCPConn).CloseWrite()
		_, err := io.Copy(io.Discard, conn)
		ended <- err
	})
	c, connect := pair(t, "secret", "secret")
	conn := dial(t, connect, target)
	if rest, _ := io.ReadAll(conn.reader); string(rest) != "bye" {
		t.Fatalf("got %q", rest)
	}
	<-ended
	eventually(t, "the cloud forgets the session", func() bool { return c.sessions.count() == 0 })
}

func TestADialThatFailsIsToldToTheClient(t *testing.T) {
	refused, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	target := refused.Addr().String()
	refused.Close()
	_, connect := pair(t, "secret", "secret")
	answer := ask(t, connect, target)
	body, _ := io.ReadAll(answer.Body)
	if answer.StatusCode != 500 || !strings.Contains(string(body), "connection refused") {
		t.Fatalf("%s %q", answer.Status, body)
	}
}

func TestAWrongTokenIsNotAttached(t *testing.T) {
	c, _ := peers(t, "secret", "wrong", time.Minute)
	time.Sleep(200 * time.Millisecond) // with the right token, an edge is attached within a few milliseconds
	if c.node("node1") != nil {
		t.Fatal("attached with a wrong token")
	}
}

func TestHeartbeatsAreAnsweredAndTheCallStaysOpen(t *testing.T) {
	c, _ := peers(t, "secret", "secret", 50*time.Millisecond)
	eventually(t, "the edge is attached", func() bool { return c.node("node1") != nil })
	first := c.node("node1")
	time.Sleep(500 * time.Millisecond) // ten heartbeats
	if c.node("node1") != first {
		t.Fatal("the call was replaced")
	}
}

type client struct {
	net.Conn
	reader *bufio.Reader
}

func ask(t *testing.T, connect, target string) *http.Response {
	_, answer := request(t, connect, target)
	return answer
}

func dial(t *testing.T, connect, target string) client {
	conn, answer := request(t, connect, target)
	if answer.StatusCode != 200 {
		t.Fatal(answer.Status)
	}
	return conn
}

func request(t *testing.T, connect, target string) (client, *http.Response) {
	conn, err := net.Dial("tcp", connect)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_, port, _ := net.SplitHostPort(target)
	fmt.Fprintf(conn, "CONNECT node1:%s HTTP/1.0\r\n\r\n", port)
	reader := bufio.NewReader(conn)
	answer, err := http.ReadResponse(reader, &http.Request{Method: http.MethodConnect})
	if err != nil {
		t.Fatal(err)
	}
	return client{conn, reader}, answer
}

// pair returns a server with one attached edge.
func pair(t *testing.T, cloudToken, edgeToken string) (*cloud, string) {
	c, connect := peers(t, cloudToken, edgeToken, time.Minute)
	eventually(t, "the edge is attached", func() bool { return c.node("node1") != nil })
	return c, connect
}

func peers(t *testing.T, cloudToken, edgeToken string, heartbeat time.Duration) (*cloud, string) {
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	ca, identity := certificate(t)
	edges, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	clients, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := newCloudG5(&cloud{token: cloudToken, sessions: newSessions(), nodes: map[string]*stream{}})
	go accept(ctx, clients, c.client)
	go c.run(ctx, edges, identity)
	e := newEdgeG5(&edge{cloud: edges.Addr().String(), ca: ca, name: "tunnel.test", node: "node1", token: edgeToken,
		heartbeat: heartbeat, sessions: newSessions()})
	go e.run(ctx)
	return c.cloud, clients.Addr().String()
}

func certificate(t *testing.T) (string, tls.Certificate) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"tunnel.test"}, IsCA: true,
		BasicConstraintsValid: true, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "ca.crt")
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file, tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func serve(t *testing.T, handle func(net.Conn)) string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				handle(conn)
			}()
		}
	}()
	return listener.Addr().String()
}

func eventually(t *testing.T, what string, is func() bool) {
	for deadline := time.Now().Add(10 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not within 10 s: ", what)
		}
	}
}
