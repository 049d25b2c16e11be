// Plainpeer speaks the plain dialect as either end, with grpc-go. The tests run the program against it.
//
//	plainpeer edge  --cloud ADDR --ca FILE --name SERVERNAME --node NAME --token TOKEN
//	plainpeer cloud --listen ADDR --connect ADDR --cert FILE --key FILE --token TOKEN
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
	"syscall"
	"time"
)

func main() {
	log.SetFlags(log.Lmicroseconds)
	if len(os.Args) < 2 {
		log.Fatal("usage: plainpeer edge|cloud [flags]")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	switch os.Args[1] {
	case "edge":
		err = runEdge(ctx, os.Args[2:])
	case "cloud":
		err = runCloud(ctx, os.Args[2:])
	default:
		err = fmt.Errorf("%q is neither edge nor cloud", os.Args[1])
	}
	if err != nil {
		log.Fatal(err)
	}
}

func runEdge(ctx context.Context, args []string) error {
	e := newEdgeG5(&edge{sessions: newSessions()})
	flags := flag.NewFlagSet("edge", flag.ExitOnError)
	flags.StringVar(&e.cloud, "cloud", "", "address of the cloud")
	flags.StringVar(&e.ca, "ca", "", "file with the CA to trust")
	flags.StringVar(&e.name, "name", "", "name to find in the cloud's certificate")
	flags.StringVar(&e.node, "node", "", "own name")
	flags.StringVar(&e.token, "token", "", "token for that name")
	flags.DurationVar(&e.heartbeat, "heartbeat", time.Minute, "time between heartbeats")
	_ = flags.Parse(args)
	return e.run(ctx)
}

func runCloud(ctx context.Context, args []string) error {
	c := newCloudG5(&cloud{sessions: newSessions(), nodes: map[string]*stream{}})
	flags := flag.NewFlagSet("cloud", flag.ExitOnError)
	listen := flags.String("listen", "127.0.0.1:0", "where edges call")
	connect := flags.String("connect", "127.0.0.1:0", "where CONNECT clients come in")
	cert := flags.String("cert", "", "file with the certificate")
	key := flags.String("key", "", "file with its key")
	flags.StringVar(&c.token, "token", "", "token every edge must have")
	_ = flags.Parse(args)
	identity, err := tls.LoadX509KeyPair(*cert, *key)
	if err != nil {
		return err
	}
	edges, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	clients, err := net.Listen("tcp", *connect)
	if err != nil {
		return err
	}
	// The first line of output: with port 0, only this process knows the ports.
	fmt.Printf("listening %s %s\n", edges.Addr(), clients.Addr())
	go accept(ctx, clients, c.client)
	return c.run(ctx, edges, identity)
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
