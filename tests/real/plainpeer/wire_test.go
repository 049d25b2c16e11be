package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// Tests of the call itself, which is the same in every generation, and a tap for its bytes.

func TestACloudSendsNoHeadersBeforeItsFirstMessageAndEchoesUnknownFields(t *testing.T) {
	f := cloudWithEdges(t, "127.0.0.1")
	rpc := calls(t, f.calls, codec{}, grpc.WithAuthority("anything"), grpc.WithPerRPCCredentials(login{"node1", "secret"}))
	headers := make(chan metadata.MD, 1)
	go func() {
		header, _ := rpc.Header()
		headers <- header
	}()
	eventually(t, "the edge is attached", func() bool { return f.c.node("node1") != nil })
	select {
	case <-headers:
		t.Fatal("headers before a message")
	case <-time.After(300 * time.Millisecond):
	}
	sent := &message{node: "node1", category: "stream", kind: "heartbeat", topic: "node1heartbeat", unknown: []byte{0x3a, 1, 'x'}}
	if err := rpc.SendMsg(sent); err != nil {
		t.Fatal(err)
	}
	got := new(message)
	if err := rpc.RecvMsg(got); err != nil {
		t.Fatal(err)
	}
	same(t, got, sent)
	<-headers
}

func TestAMessageOf4MiBEndsTheCall(t *testing.T) {
	f := cloudWithEdges(t, "127.0.0.1")
	rpc := calls(t, f.calls, codec{}, grpc.WithPerRPCCredentials(login{"node1", "secret"}))
	_ = rpc.SendMsg(&message{node: "node1", category: "ssh", kind: "backend", topic: "x", data: make([]byte, 4<<20)})
	if err := rpc.RecvMsg(new(message)); status.Code(err) != codes.ResourceExhausted {
		t.Fatal(err)
	}
}

// tap stands between the edges and the cloud of a fleet, and keeps the bytes of each message that passes.
type tap struct {
	cloud string
	seen  map[string]chan []byte // messages in both directions, by the edge's node
}

// tapped puts a tap in front of a cloud, for edges of these nodes.
func tapped(t *testing.T, f *fleet, nodes ...string) *tap {
	tap := &tap{f.calls, map[string]chan []byte{}}
	for _, node := range nodes {
		tap.seen[node] = make(chan []byte, queue)
	}
	ca, identity := certificate(t)
	listener := bind(t, "127.0.0.1:0")
	server := grpc.NewServer(grpc.ForceServerCodec(rawCodec{}), grpc.Creds(credentials.NewServerTLSFromCert(&identity)),
		grpc.UnknownServiceHandler(func(_ any, edge grpc.ServerStream) error { return tap.serve(t, edge) }))
	t.Cleanup(server.Stop)
	go server.Serve(listener)
	f.ca, f.calls = ca, listener.Addr().String()
	return tap
}

// serve passes the call of one edge on to the cloud.
func (tap *tap) serve(t *testing.T, edge grpc.ServerStream) error {
	header, _ := metadata.FromIncomingContext(edge.Context())
	cloud := calls(t, tap.cloud, rawCodec{}, grpc.WithStreamInterceptor(
		func(ctx context.Context, d *grpc.StreamDesc, c *grpc.ClientConn, method string, next grpc.Streamer, o ...grpc.CallOption) (grpc.ClientStream, error) {
			return next(metadata.AppendToOutgoingContext(ctx, "authorization", header["authorization"][0]), d, c, method, o...)
		}))
	pass := func(receive, send func(any) error) error {
		for {
			var bytes []byte
			if err := receive(&bytes); err != nil {
				return err
			}
			var m message
			if err := (codec{}).Unmarshal(bytes, &m); err != nil {
				return err
			}
			tap.seen[m.node] <- bytes
			if err := send(&bytes); err != nil {
				return err
			}
		}
	}
	go pass(cloud.RecvMsg, edge.SendMsg)
	if err := pass(edge.RecvMsg, cloud.SendMsg); err != io.EOF {
		return err
	}
	return cloud.CloseSend()
}

// calls opens a call like an edge's, which ends with the test.
func calls(t *testing.T, cloud string, as encoding.Codec, options ...grpc.DialOption) grpc.ClientStream {
	trust := credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})
	conn, err := grpc.NewClient("passthrough:///"+cloud, append(options, grpc.WithTransportCredentials(trust))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	rpc, err := conn.NewStream(context.Background(), &call, "/proto.Stream/TunnelStreaming", grpc.ForceCodec(as))
	if err != nil {
		t.Fatal(err)
	}
	return rpc
}

// rawCodec leaves messages as their bytes on the wire.
type rawCodec struct{}

func (rawCodec) Name() string { return "" }

func (rawCodec) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

func (rawCodec) Unmarshal(in []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), in...)
	return nil
}

// targets returns the address of a target, and a function that waits for its next connection.
func targets(t *testing.T) (string, func() client) {
	conns, over := make(chan net.Conn), make(chan struct{})
	t.Cleanup(func() { close(over) })
	address := serve(t, func(conn net.Conn) {
		select {
		case conns <- conn:
			<-over
		case <-over:
		}
	})
	return address, func() client {
		select {
		case conn := <-conns:
			return client{conn, bufio.NewReader(conn)}
		case <-time.After(10 * time.Second):
			t.Fatal("the target was not dialled within 10 s")
			return client{}
		}
	}
}
