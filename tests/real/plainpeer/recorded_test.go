package main

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

var write = flag.Bool("write", false, "write the recording instead of comparing it")

const recorded = "recorded-0.9.txt"

// The recording is made by real sessions between a server and edges. With -write it is written:
//
//	go test -run Recording . -write
func TestG4SendsTheBytesOfTheRecording(t *testing.T) {
	r := &recording{t: t}
	r.write("# What SuperEdge v0.9 (generation G4) sends, as the plain peer does. A line with an equals sign")
	r.write("# has the form of crates/proto/src/recorded.txt: a name, and a gRPC message with its flag and length, in hex. The")
	r.write("# comment before it says to whom it goes and why. Topics are numbered, and each target has the port 10022.")
	r.write("# recorded_test.go records the messages from real sessions.")
	r.ssh()
	r.refused()
	r.short("egress")
	r.short("httpProxy")
	r.access()
	r.accessRefused()
	r.accessGet()
	r.edgeToEdge()
	r.heartbeats()
	if *write {
		if err := os.WriteFile(recorded, []byte(r.text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	kept, err := os.ReadFile(recorded)
	if err != nil {
		t.Fatal(err)
	}
	now, then := strings.Split(r.text.String(), "\n"), strings.Split(string(kept), "\n")
	for i := range min(len(now), len(then)) {
		if now[i] != then[i] {
			t.Fatalf("%s:%d: %s\nis now: %s", recorded, i+1, then[i], now[i])
		}
	}
	if len(now) != len(then) {
		t.Fatalf("%d lines instead of %d", len(now), len(then))
	}
}

// ssh, like the others below, lets the target read all bytes before it ends: bytes that arrive after its end would
// make the edge dial again.
func (r *recording) ssh() {
	f := r.begin("A client of the cloud's ssh port", time.Minute, "node1")
	address, accepted := r.target()
	client := f.dial(r.t, "ssh", address)
	r.none("the client reads 200 as soon as it has sent CONNECT")
	r.says(client, "SSH-2.0-client\r\n")
	r.message("node1", "ssh, first bytes", "To the edge: the client's first bytes. The topic is unknown, so the edge dials addr and writes them there")
	target := accepted()
	target.reads(r.t, "SSH-2.0-client\r\n")
	r.says(target, "SSH-2.0-target\r\n")
	r.message("node1", "ssh, bytes of the target", "To the cloud: bytes of the target")
	r.says(client, "later bytes")
	r.message("node1", "ssh, later bytes", "To the edge: more bytes of the client. Every message repeats addr")
	target.reads(r.t, "later bytes")
	target.Close()
	eventually(r.t, "the edge forgets the session", func() bool { return f.edges["node1"].sessions.count() == 0 })
	r.none("the target ends, and the edge forgets the session. The client does not learn this")
	r.says(client, "bytes from the middle")
	r.message("node1", "ssh, bytes for a forgotten topic", "To the edge: the edge dials again, and the new connection begins with these bytes")
	target = accepted()
	target.reads(r.t, "bytes from the middle")
	r.says(target, "SSH-2.0-again\r\n")
	r.message("node1", "ssh, bytes of the new connection", "To the cloud: the client reads another beginning in the middle of its session")
	client.reads(r.t, "SSH-2.0-target\r\nSSH-2.0-again\r\n")
	client.Close()
	eventually(r.t, "the cloud forgets the session", func() bool { return f.c.sessions.count() == 0 })
	r.none("the client ends, and the cloud forgets the session. The target does not learn this")
	r.says(target, "bytes for nobody")
	r.message("node1", "ssh, bytes for a client that has ended", "To the cloud: bytes of a target whose client has ended. The cloud drops them")
	r.none("the cloud does not answer them")
}

func (r *recording) refused() {
	f := r.begin("A client of the cloud's ssh port, and a target that refuses", time.Minute, "node1")
	client := f.dial(r.t, "ssh", r.normal(refused(r.t)))
	r.says(client, "SSH-2.0-client\r\n")
	r.message("node1", "ssh, first bytes for a target that refuses", "To the edge: the dial fails")
	r.none("the edge does not report the failed dial. The client waits")
}

func (r *recording) short(category string) {
	f := r.begin("A client of the cloud's port of the category "+category, time.Minute, "node1")
	address, accepted := r.target()
	client := f.dial(r.t, category, address)
	r.says(client, "first bytes")
	r.message("node1", category+", first bytes", "To the edge: the same messages as in an ssh session")
	target := accepted()
	r.says(target, "bytes of the target")
	r.message("node1", category+", bytes of the target", "To the cloud: bytes of the target")
	r.says(client, "later bytes")
	r.message("node1", category+", later bytes", "To the edge: more bytes of the client")
	target.reads(r.t, "first byteslater bytes")
	target.Close()
	eventually(r.t, "the edge forgets the session", func() bool { return f.edges["node1"].sessions.count() == 0 })
	r.none("the target ends, and the edge forgets the session")
	client.Close()
	eventually(r.t, "the cloud forgets the session", func() bool { return f.c.sessions.count() == 0 })
	r.none("the client ends, and the cloud forgets the session")
}

func (r *recording) access() {
	f := r.begin("A CONNECT client of an edge's proxy, and a target that the cloud dials", time.Minute, "node1")
	address, accepted := r.target()
	client := f.client(r.t, "node1")
	r.says(client, "CONNECT "+address+" HTTP/1.1\r\nHost: "+address+"\r\n\r\n")
	r.message("node1", "access", "To the cloud: the client's request as it was sent. The cloud dials addr")
	target := accepted()
	r.message("node1", "access, success", "To the edge: the answer for the client. Later bytes have the type backend in both directions")
	client.reads(r.t, established)
	r.says(client, "bytes of the client")
	r.message("node1", "access, bytes of the client", "To the cloud: bytes of the client")
	target.reads(r.t, "bytes of the client")
	r.says(target, "bytes of the target")
	r.message("node1", "access, bytes of the target", "To the edge: bytes of the target")
	client.reads(r.t, "bytes of the target")
	client.Close()
	eventually(r.t, "the edge forgets the session", func() bool { return f.edges["node1"].sessions.count() == 0 })
	r.none("the client ends, and the edge forgets the session. The target does not learn this")
	r.says(target, "bytes for nobody")
	r.message("node1", "access, bytes for a client that has ended", "To the edge: bytes of a target whose client has ended. The edge drops them")
	target.Close()
	eventually(r.t, "the cloud forgets the session", func() bool { return f.c.sessions.count() == 0 })
	r.none("the target ends, and the cloud forgets the session")
}

func (r *recording) accessRefused() {
	f := r.begin("A CONNECT client of an edge's proxy, and a target that refuses", time.Minute, "node1")
	address := r.normal(refused(r.t))
	client := f.client(r.t, "node1")
	r.says(client, "CONNECT "+address+" HTTP/1.1\r\nHost: "+address+"\r\n\r\n")
	r.message("node1", "access of a target that refuses", "To the cloud: the client's request. The dial fails")
	r.message("node1", "access, failure", "To the edge: the answer for the client. There is no session in the cloud")
	client.reads(r.t, "HTTP/1.1 500 Internal Server Error\r\n\r\n")
}

func (r *recording) accessGet() {
	f := r.begin("A client of an edge's proxy that sends another method than CONNECT", time.Minute, "node1")
	address, accepted := r.target()
	client := f.client(r.t, "node1")
	r.says(client, "GET http://"+address+"/x HTTP/1.1\r\nHost: "+address+"\r\nUser-Agent: client\r\n\r\n")
	r.message("node1", "access for a GET", "To the cloud: a CONNECT that the edge made up")
	target := accepted()
	r.message("node1", "access for a GET, success", "To the edge: its answer, which the client does not get")
	r.message("node1", "access for a GET, request", "To the cloud: the client's request, with a path instead of the URL")
	r.says(target, "HTTP/1.1 204 No Content\r\n\r\n")
	r.message("node1", "access for a GET, response", "To the edge: the target's response")
	client.reads(r.t, "HTTP/1.1 204 No Content\r\n\r\n")
}

func (r *recording) edgeToEdge() {
	f := r.begin("A client of the proxy of node1, and a target at node2", time.Minute, "node1", "node2")
	address, accepted := r.target()
	client := f.client(r.t, "node1")
	r.says(client, "CONNECT node2:"+port(address)+" HTTP/1.1\r\nHost: node2:"+port(address)+"\r\n\r\n")
	r.message("node1", "access of another edge", "To the cloud: the client's request")
	r.message("node1", "access of another edge, success", "To the edge of node1: the answer, before anything is dialled")
	r.message("node2", "access of another edge, dial", "To the edge of node2: no bytes. The edge dials addr")
	target := accepted()
	client.reads(r.t, established)
	r.says(client, "bytes of the client")
	r.message("node1", "access of another edge, bytes of the client", "To the cloud: bytes of the client")
	r.message("node2", "access of another edge, bytes of the client, passed on", "To the edge of node2: these bytes, with its own addr")
	target.reads(r.t, "bytes of the client")
	r.says(target, "bytes of the target")
	r.message("node2", "access of another edge, bytes of the target", "To the cloud: bytes of the target")
	r.message("node1", "access of another edge, bytes of the target, passed on", "To the edge of node1: these bytes")
	client.reads(r.t, "bytes of the target")
	target.Close()
	eventually(r.t, "node2 forgets the session", func() bool { return f.edges["node2"].sessions.count() == 0 })
	r.none("the target ends, and the edge of node2 forgets the session. Nobody else does")
	client.Close()
	eventually(r.t, "node1 forgets the session", func() bool { return f.edges["node1"].sessions.count() == 0 })
	r.none("the client ends, and the edge of node1 forgets the session")
}

func (r *recording) heartbeats() {
	r.begin("Heartbeats", 100*time.Millisecond, "node1")
	r.message("node1", "heartbeat", "To the cloud: every minute, and first after a minute")
	r.message("node1", "heartbeat, answer", "To the edge: the same message at once")
}

// recording is a text in the making, from the messages that pass a tap.
type recording struct {
	t      *testing.T
	tap    *tap
	text   strings.Builder
	ports  []string // of targets, in this run
	topics []string // in order of their first message
}

// begin writes a title, and returns a cloud with edges behind a tap.
func (r *recording) begin(title string, heartbeat time.Duration, nodes ...string) *fleet {
	r.write("")
	r.write("# " + title)
	f := cloudWithEdges(r.t, "127.0.0.1")
	f.heartbeat = heartbeat
	r.tap = tapped(r.t, f, nodes...)
	for _, node := range nodes {
		f.attach(r.t, node)
	}
	return f
}

func (r *recording) write(line string) { fmt.Fprintln(&r.text, line) }

// target returns the address of a target, and a function that waits for its next connection.
func (r *recording) target() (string, func() client) {
	address, next := targets(r.t)
	return r.normal(address), next
}

// normal notes an address whose port the recording replaces by one of as many digits.
func (r *recording) normal(address string) string {
	if len(port(address)) != 5 {
		r.t.Fatalf("the lengths in the recording need a port of five digits instead of %s", address)
	}
	r.ports = append(r.ports, port(address))
	return address
}

func (r *recording) says(conn io.Writer, text string) {
	if _, err := io.WriteString(conn, text); err != nil {
		r.t.Fatal(err)
	}
}

// message waits for the next message of a node's call, and writes it.
func (r *recording) message(node, name, why string) {
	r.t.Helper()
	select {
	case body := <-r.tap.seen[node]:
		r.write("# " + why + ".")
		r.write(fmt.Sprintf("%s = %x", name, r.normalised(body)))
	case <-time.After(10 * time.Second):
		r.t.Fatal("no message within 10 s: ", name)
	}
}

// normalised returns a message with the ids and ports of the recording, behind its flag and its length.
func (r *recording) normalised(body []byte) []byte {
	var m message
	if err := (codec{}).Unmarshal(body, &m); err != nil {
		r.t.Fatal(err)
	}
	if len(m.topic) == 36 {
		if !slices.Contains(r.topics, m.topic) {
			r.topics = append(r.topics, m.topic)
		}
		id := fmt.Sprintf("00112233-4455-4677-8899-%012x", slices.Index(r.topics, m.topic)+1)
		body = bytes.ReplaceAll(body, []byte(m.topic), []byte(id))
	}
	for _, port := range r.ports {
		body = bytes.ReplaceAll(body, []byte(":"+port), []byte(":10022"))
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))), body...)
}

// none checks that no message passes, and writes why.
func (r *recording) none(why string) {
	r.t.Helper()
	time.Sleep(100 * time.Millisecond) // a message takes less than a millisecond
	for node, seen := range r.tap.seen {
		if len(seen) > 0 {
			r.t.Fatalf("%s: %q at %s", why, <-seen, node)
		}
	}
	r.write("# No message: " + why + ".")
}
