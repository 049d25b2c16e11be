// Plainpeer is a plain remote as either end, with grpc-go. The tests run the program against it.
//
//	plainpeer edge  --cloud ADDR --ca FILE --name SERVERNAME --node NAME --token TOKEN
//	plainpeer cloud --listen ADDR --connect ADDR --cert FILE --key FILE --token TOKEN
//
// These two are generation G5 (docs/reference/superedge-wire.md#generations). The next two are generation G4, as in SuperEdge v0.9.0.
// They have the same flags, and those of their other ports:
//
//	plainpeer edge-0.9  … --proxy ADDR
//	plainpeer cloud-0.9 … --egress ADDR --proxy ADDR --route NODE=HOST
//
// Edges before them have the same messages in fewer categories: v0.4 (G2) knows no egress, and v0.7 (G3) no httpProxy:
//
//	plainpeer edge-0.4 …
//	plainpeer edge-0.7 …
//
// How generation G4 differs:
//
//   - A CONNECT client of the cloud reads 200 before any target is dialled. Its first bytes go to the edge as
//     "frontend", which makes the edge dial. A target that speaks first is never dialled.
//   - The edge dials on its read loop without a limit. If the dial fails, it sends nothing.
//   - The end that reads the end of its connection forgets the session, and sends nothing. A later "frontend" makes
//     the edge dial again, and the new connection begins with bytes from the middle.
//   - "closed" has a handler for the categories ssh and egress. There is none for httpProxy, and nobody sends it.
//   - An edge's client sends "access" to the cloud. The cloud answers in the session, as "backend", with the text of
//     an HTTP response. All later bytes are "backend" too.
//   - Between two edges of one cloud, the success comes first, then an empty "frontend" to the target's edge.
//   - A node of another server is found by --route, or by DNS for an edge's client. The server passes the CONNECT on,
//     without TLS, to its own port of that server.
//
// recorded-0.9.txt has the messages of its sessions, byte for byte.
package main

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	log.SetFlags(log.Lmicroseconds)
	if len(os.Args) < 2 {
		log.Fatal("usage: plainpeer edge|cloud|edge-0.4|edge-0.7|edge-0.9|cloud-0.9 [flags]")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	run := map[string]func(context.Context, *flag.FlagSet, []string) error{
		"edge": runEdgeG5, "cloud": runCloudG5, "cloud-0.9": runCloudG4,
		"edge-0.4": runEdgeWithout("egress", "httpProxy"), "edge-0.7": runEdgeWithout("httpProxy"), "edge-0.9": runEdgeWithout(),
	}[os.Args[1]]
	if run == nil {
		log.Fatalf("%q is none of edge, cloud, edge-0.4, edge-0.7, edge-0.9, cloud-0.9", os.Args[1])
	}
	if err := run(ctx, flag.NewFlagSet(os.Args[1], flag.ExitOnError), os.Args[2:]); err != nil {
		log.Fatal(err)
	}
}

func runEdgeG5(ctx context.Context, flags *flag.FlagSet, args []string) error {
	e := newEdgeG5(edgeFlags(flags))
	_ = flags.Parse(args)
	return e.run(ctx)
}

// runEdgeWithout runs an edge of generation G4, or of one before it, which lacks some categories.
func runEdgeWithout(lacks ...string) func(context.Context, *flag.FlagSet, []string) error {
	return func(ctx context.Context, flags *flag.FlagSet, args []string) error {
		e := newEdgeG4(edgeFlags(flags), lacks...)
		proxy := flags.String("proxy", "127.0.0.1:0", "where clients of the HTTP proxy come in")
		_ = flags.Parse(args)
		clients, err := listen(*proxy)
		if err != nil {
			return err
		}
		go accept(ctx, clients[0], e.client)
		return e.run(ctx)
	}
}

func edgeFlags(flags *flag.FlagSet) *edge {
	e := &edge{sessions: newSessions()}
	flags.StringVar(&e.cloud, "cloud", "", "address of the cloud")
	flags.StringVar(&e.ca, "ca", "", "file with the CA to trust")
	flags.StringVar(&e.name, "name", "", "name to find in the cloud's certificate")
	flags.StringVar(&e.node, "node", "", "own name")
	flags.StringVar(&e.token, "token", "", "token for that name")
	flags.DurationVar(&e.heartbeat, "heartbeat", time.Minute, "time between heartbeats")
	return e
}

func runCloudG5(ctx context.Context, flags *flag.FlagSet, args []string) error {
	f := newCloudFlags(flags)
	_ = flags.Parse(args)
	c := newCloudG5(&f.cloud)
	identity, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return err
	}
	ports, err := listen(f.listen, f.connect)
	if err != nil {
		return err
	}
	go accept(ctx, ports[1], c.client)
	return c.run(ctx, ports[0], identity)
}

func runCloudG4(ctx context.Context, flags *flag.FlagSet, args []string) error {
	f := newCloudFlags(flags)
	egress := flags.String("egress", "127.0.0.1:0", "where CONNECT clients come in over TLS")
	proxy := flags.String("proxy", "127.0.0.1:0", "where clients of the HTTP proxy come in")
	routes := map[string]string{}
	flags.Func("route", "node of another server, and its host: NODE=HOST", func(value string) error {
		node, host, found := strings.Cut(value, "=")
		if !found {
			return fmt.Errorf("%q is not NODE=HOST", value)
		}
		routes[node] = host
		return nil
	})
	_ = flags.Parse(args)
	identity, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return err
	}
	ports, err := listen(f.listen, f.connect, *egress, *proxy)
	if err != nil {
		return err
	}
	newCloudG4(&f.cloud, routes, net.LookupHost).serveClients(ctx, ports[1], ports[2], ports[3], identity)
	return f.cloud.run(ctx, ports[0], identity)
}

// cloudFlags are the flags of a cloud of any generation.
type cloudFlags struct {
	cloud                      cloud
	listen, connect, cert, key string
}

func newCloudFlags(flags *flag.FlagSet) *cloudFlags {
	f := &cloudFlags{cloud: cloud{sessions: newSessions(), nodes: map[string]*stream{}}}
	flags.StringVar(&f.listen, "listen", "127.0.0.1:0", "where edges call")
	flags.StringVar(&f.connect, "connect", "127.0.0.1:0", "where CONNECT clients come in")
	flags.StringVar(&f.cert, "cert", "", "file with the certificate")
	flags.StringVar(&f.key, "key", "", "file with its key")
	flags.StringVar(&f.cloud.token, "token", "", "token every edge must have")
	return f
}

// listen opens ports, and prints their addresses as the first line of output: with port 0, only this process knows
// them.
func listen(addresses ...string) ([]net.Listener, error) {
	var ports []net.Listener
	line := "listening"
	for _, address := range addresses {
		port, err := net.Listen("tcp", address)
		if err != nil {
			return nil, err
		}
		ports = append(ports, port)
		line += " " + port.Addr().String()
	}
	fmt.Println(line)
	return ports, nil
}

// accept handles each connection of a listener until the context ends.
func accept(ctx context.Context, listener net.Listener, handle func(net.Conn)) {
	context.AfterFunc(ctx, func() { listener.Close() })
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		go handle(conn)
	}
}
