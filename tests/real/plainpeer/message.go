package main

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
)

// message is proto.StreamMsg, encoded by hand so that the build needs no protoc.
type message struct {
	node     string
	category string
	kind     string // "type" on the wire
	topic    string
	data     []byte
	addr     string
	unknown  []byte // fields of other numbers, as they arrived; an echo repeats them
}

// codec encodes messages for gRPC. Its name is empty because the plain content type is "application/grpc" without a
// subtype.
type codec struct{}

func (codec) Name() string { return "" }

func (codec) Marshal(v any) ([]byte, error) {
	m, ok := v.(*message)
	if !ok {
		return nil, fmt.Errorf("cannot encode %T", v)
	}
	var out []byte
	put := func(number protowire.Number, value string) {
		if value != "" {
			out = protowire.AppendTag(out, number, protowire.BytesType)
			out = protowire.AppendString(out, value)
		}
	}
	put(1, m.node)
	put(2, m.category)
	put(3, m.kind)
	put(4, m.topic)
	put(5, string(m.data))
	put(6, m.addr)
	return append(out, m.unknown...), nil
}

func (codec) Unmarshal(in []byte, v any) error {
	m, ok := v.(*message)
	if !ok {
		return fmt.Errorf("cannot decode into %T", v)
	}
	*m = message{}
	for len(in) > 0 {
		field := in
		number, kind, n := protowire.ConsumeTag(in)
		if n < 0 {
			return protowire.ParseError(n)
		}
		in = in[n:]
		if number > 6 || kind != protowire.BytesType {
			n = protowire.ConsumeFieldValue(number, kind, in)
			if n < 0 {
				return protowire.ParseError(n)
			}
			in = in[n:]
			m.unknown = append(m.unknown, field[:len(field)-len(in)]...)
			continue
		}
		value, n := protowire.ConsumeBytes(in)
		if n < 0 {
			return protowire.ParseError(n)
		}
		in = in[n:]
		switch number {
		case 1:
			m.node = string(value)
		case 2:
			m.category = string(value)
		case 3:
			m.kind = string(value)
		case 4:
			m.topic = string(value)
		case 5:
			m.data = append([]byte(nil), value...)
		case 6:
			m.addr = string(value)
		}
	}
	return nil
}
