package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
)

// edge is the part of a plain edge that all generations have in common: it calls the server.
type edge struct {
	cloud, ca, name string // address, CA file, and the expected name in the certificate
	node, token     string
	heartbeat       time.Duration // interval of heartbeats; one without an answer ends the call
	sessions        *sessions
	receive         func(*message, *stream) // handles each message of the server that is not a heartbeat
	current         atomic.Pointer[stream]  // the newest call
}

// login is the token as metadata of the call. It is only sent over TLS.
type login struct{ node, token string }

func (l login) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	text, err := json.Marshal(struct {
		Node  string `json:"nodename"`
		Token string `json:"token"`
	}{l.node, l.token})
	return map[string]string{"authorization": "Bearer " + string(text)}, err
}

func (login) RequireTransportSecurity() bool { return true }

var call = grpc.StreamDesc{StreamName: "TunnelStreaming", ServerStreams: true, ClientStreams: true}

// run serves until the context ends. A call that has ended is repeated after a second.
func (e *edge) run(ctx context.Context) error {
	pem, err := os.ReadFile(e.ca)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return fmt.Errorf("no certificate in %s", e.ca)
	}
	conn, err := grpc.NewClient("passthrough:///"+e.cloud,
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: roots, ServerName: e.name})),
		grpc.WithPerRPCCredentials(login{e.node, e.token}),
		// SuperEdge's library since v0.8. Ours adds its own name behind it.
		grpc.WithUserAgent("grpc-go/1.38.0"),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 10 * time.Millisecond, Timeout: time.Second, PermitWithoutStream: true}),
		// A plain edge does not pause between attempts; a pause of 0.1 s reduces the load on the tests' machine.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1, MaxDelay: 100 * time.Millisecond},
			MinConnectTimeout: time.Minute}))
	if err != nil {
		return err
	}
	defer conn.Close()
	for {
		err := e.serve(ctx, conn)
		if ctx.Err() != nil {
			return nil
		}
		log.Printf("call ended: %v", err)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return nil
		}
	}
}

// serve handles one call.
func (e *edge) serve(ctx context.Context, conn *grpc.ClientConn) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	rpc, err := conn.NewStream(ctx, &call, "/proto.Stream/TunnelStreaming", grpc.ForceCodec(codec{}), grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	log.Printf("call open")
	out := newStream(e.node)
	defer e.sessions.forgetAll(out)
	defer out.close()
	e.current.Store(out)
	go func() { cancel(out.pump(func(m *message) error { return rpc.SendMsg(m) })) }()
	echoes := make(chan struct{}, 1)
	go e.beat(ctx, out, echoes, cancel)
	for {
		m := new(message)
		if err := rpc.RecvMsg(m); err != nil {
			return errors.Join(err, context.Cause(ctx))
		}
		if m.category != "stream" || m.kind != "heartbeat" {
			e.receive(m, out)
			continue
		}
		select {
		case echoes <- struct{}{}:
		default:
		}
	}
}

// beat sends heartbeats, and ends the call if one is not answered.
func (e *edge) beat(ctx context.Context, out *stream, echoes <-chan struct{}, cancel context.CancelCauseFunc) {
	tick := time.NewTicker(e.heartbeat)
	defer tick.Stop()
	asked := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if asked {
			select {
			case <-echoes:
			default:
				cancel(errors.New("heartbeat not answered"))
				return
			}
		}
		out.send(&message{node: e.node, category: "stream", kind: "heartbeat", topic: e.node + "heartbeat"})
		asked = true
	}
}
