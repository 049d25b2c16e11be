package main

import (
	"net"
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

func (all *sessions) open(topic, category string, on *stream) *session {
	s := &session{topic: topic, category: category, stream: on, in: make(chan *message, queue), gone: make(chan struct{})}
	all.mu.Lock()
	all.byTopic[topic] = s
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

// deliver passes a message to its session, and blocks the caller's read loop while the session's queue is full. A
// message for an unknown session is answered with "closed" if answer is true.
func (all *sessions) deliver(m *message, on *stream, answer bool) {
	if s := all.find(m.topic); s != nil {
		select {
		case s.in <- m:
		case <-s.gone:
		}
		return
	}
	if m.kind != "closed" && answer {
		on.send(&message{node: m.node, category: m.category, kind: "closed", topic: m.topic,
			data: []byte("msg cannot be forwarded due to disconnection")})
	}
}

func (s *session) say(kind string, data []byte) {
	s.stream.send(&message{node: s.stream.node, category: s.category, kind: kind, topic: s.topic, data: data})
}

// copy copies bytes in both directions until one of them ends: plain peers have no half-close.
func (all *sessions) copy(s *session, conn net.Conn) {
	go func() {
		buffer := make([]byte, chunk)
		for {
			n, err := conn.Read(buffer)
			if n > 0 {
				s.say("tcp-forward", append([]byte(nil), buffer[:n]...))
			}
			if err != nil {
				s.say("closed", []byte(err.Error()))
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
