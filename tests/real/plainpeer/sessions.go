package main

import (
	"crypto/rand"
	"fmt"
	"net"
	"slices"
	"sync"
)

const (
	chunk = 1024 // maximum size of a read, and therefore of a message, of a plain peer
	queue = 1000 // maximum number of messages in the queue of a session or a stream; then the sender blocks
)

// sessions holds the sessions of one process, by topic.
type sessions struct {
	mu      sync.Mutex
	byTopic map[string]*session
}

// session has a queue of received messages.
type session struct {
	topic, category string
	data            string // type of its data messages
	addr            string // target that each of its messages repeats; empty in G5
	closes          bool   // whether the end of its connection is reported with "closed"
	stream          *stream
	in              chan *message
	gone            chan struct{} // closed once the topic is removed
}

// stream is one gRPC call, with a queue of messages to send.
type stream struct {
	node string
	out  chan *message
	over chan struct{} // closed once the call has ended
	end  sync.Once
}

func newStream(node string) *stream {
	return &stream{node: node, out: make(chan *message, queue), over: make(chan struct{})}
}

// send queues a message, and blocks while the queue is full, like plain peers.
func (s *stream) send(m *message) {
	select {
	case s.out <- m:
	case <-s.over:
	}
}

func (s *stream) close() { s.end.Do(func() { close(s.over) }) }

// pump sends the queued messages until the call ends.
func (s *stream) pump(send func(*message) error) error {
	for {
		select {
		case m := <-s.out:
			if err := send(m); err != nil {
				return err
			}
		case <-s.over:
			return nil
		}
	}
}

func newSessions() *sessions { return &sessions{byTopic: map[string]*session{}} }

// open adds a session under its topic.
func (all *sessions) open(s *session) *session {
	s.in, s.gone = make(chan *message, queue), make(chan struct{})
	all.mu.Lock()
	all.byTopic[s.topic] = s
	all.mu.Unlock()
	return s
}

func (all *sessions) find(topic string) *session {
	all.mu.Lock()
	defer all.mu.Unlock()
	return all.byTopic[topic]
}

func (all *sessions) count() int {
	all.mu.Lock()
	defer all.mu.Unlock()
	return len(all.byTopic)
}

func (all *sessions) forget(s *session) {
	all.mu.Lock()
	defer all.mu.Unlock()
	if all.byTopic[s.topic] == s {
		delete(all.byTopic, s.topic)
		close(s.gone)
	}
}

// forgetAll ends every session of a call that has ended: plain peers do not resume sessions.
func (all *sessions) forgetAll(of *stream) {
	all.mu.Lock()
	defer all.mu.Unlock()
	for topic, s := range all.byTopic {
		if s.stream == of {
			delete(all.byTopic, topic)
			close(s.gone)
		}
	}
}

// deliver passes a message to its session, and blocks the caller's read loop while the session's queue is full. It
// returns whether there is such a session.
func (all *sessions) deliver(m *message) bool {
	s := all.find(m.topic)
	if s == nil {
		return false
	}
	select {
	case s.in <- m:
	case <-s.gone:
	}
	return true
}

func (s *session) say(kind string, data []byte) {
	s.stream.send(&message{node: s.stream.node, category: s.category, kind: kind, topic: s.topic, data: data, addr: s.addr})
}

// Write sends bytes as data messages.
func (s *session) Write(bytes []byte) (int, error) {
	for piece := range slices.Chunk(bytes, chunk) {
		s.say(s.data, slices.Clone(piece))
	}
	return len(bytes), nil
}

// copy copies bytes in both directions until one of them ends: plain peers have no half-close.
func (all *sessions) copy(s *session, conn net.Conn) {
	go func() {
		buffer := make([]byte, chunk)
		for {
			n, err := conn.Read(buffer)
			if n > 0 {
				_, _ = s.Write(buffer[:n])
			}
			if err != nil {
				if s.closes {
					s.say("closed", []byte(err.Error()))
				}
				all.forget(s)
				conn.Close()
				return
			}
		}
	}()
	defer conn.Close()
	for {
		select {
		case m := <-s.in:
			if m.kind == "closed" {
				return
			}
			if _, err := conn.Write(m.data); err != nil {
				return
			}
		case <-s.gone:
			return
		}
	}
}

// uuid returns a random topic.
func uuid() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
