//! `tunnel`: reach edge nodes behind NAT by name, through HTTP CONNECT.
//!
//! An **edge** runs on each node and dials a **server**. The gRPC stream between them is a **link**. A **session** is
//! one proxied TCP connection: a byte stream in each direction, with two ends. The **opener** (here the server's
//! listener) requests it, and the **acceptor** (at the edge) dials the **target**. A session is not bound to its link:
//! if the link is lost, the opener resumes the session over the next one.
//!
//! docs/architecture.md explains the design, docs/protocol.md the frames of a link, docs/reference/glossary.md the
//! terms.
//!
//! # Modules
//!
//! In this order: each module imports only modules before it, which `tests/layers.rs` checks.
//!
//! | modules | contents |
//! | --- | --- |
//! | [`tunnel_base`] | names, policies, the address book, logs, metrics |
//! | [`tunnel_net`] | sockets, TLS, DNS, limits |
//! | [`tunnel_proto`] | frames and the state of one session end, without I/O |
//! | [`tunnel_link`] | links, and the sessions that outlive them |
//! | `tunnel_kube` | the Kubernetes API; only in builds for a cluster |
//! | `parts`, [`config`], [`etcd`], [`intercept`] | parts that a build may lack; settings; etcd; nftables |
//! | [`registry`], [`publish`] | where each node is connected; its DNS records |
//! | [`invitations`], [`enrolment`] | invitations; a server's store of them, and of what has joined |
//! | [`route`], [`session_io`], [`acceptor`] | from a request to an open session; copying its bytes; dialling targets |
//! | [`admin`], [`kubernetes`], [`startup`] | the admin API; a cluster; startup errors |
//! | [`admission`], [`listener`] | how a client gets a session; the ports of a server for clients |
//! | [`uplink`] | links to servers, of an edge and of a user's program |
//! | [`edge`], [`server`], [`command`] | the two programs, and the commands |
//!
//! # Data path
//!
//! ```text
//! client ─CONNECT─▶ admission::connect ─open─▶ route ─find─▶ registry
//!                        │                      └─ask─▶ SessionTable ─Open─▶ SessionTable ─▶ acceptor ─dial─▶ target
//!                        ◀──200── Session ◀════ Data, Credit, Finish ════▶ Session
//!                   session_io                                           session_io
//! ```
//!
//! Between `admission::connect` and `route`, `admission` takes permits and checks who may reach what.
//!
//! Frames are pulled, not pushed. The copy of `session_io` writes bytes into the session's send buffer while it has
//! room and wakes the link's [`tunnel_link::link::Link`], which marks the session as ready. When HTTP/2 can
//! take more, the link asks its schedule for the next session and takes one frame from it. Bytes wait in their
//! own session, so order and fairness are decided at the last moment, and resuming a session only moves its send
//! position back. A slow reader uses up its own window and stops only its own session.
//!
//! # Several servers
//!
//! ```text
//!           local? ────────▶ announced by a peer? ────▶ Find to all peers, and a query to DNS ─▶ first fresh yes
//! registry: local links      registry::nodes_at_peers   registry::search
//! ```
//!
//! Servers link to each other as edges link to servers, with the server certificate on both sides. A server that gains
//! or loses a node's link announces that to all its peers at once, so the old server drops its link and sessions follow
//! without waiting for DNS.
//!
//! One search serves the sessions that clients open, that edges open, and that are resumed through a server
//! ([`route`]). It queries one path at a time, and the next one after 3 s without an answer or if the node is not
//! connected there. It ends as soon as the node connects. A node that is connected nowhere is waited for up to 3 s if
//! it was there a moment ago, and is not searched for again for 1 s. A server between two others only relays frames
//! ([`tunnel_link::table::relay_request::RelayRequest`]). Frames from a peer go only to local edges, so there is at
//! most one hop between servers. For an edge with a plain link, its server is the session's end.
//!
//! **Invariants.** Reading a link never waits for writing it. A read loop does nothing slow. A remote cannot make this
//! process queue more bytes than were reserved for it. No two locks of links and sessions are held at once, and no lock
//! across an await. The pure parts ([`tunnel_proto`], and in `link` the schedule and the congestion control) read no
//! clock, never wait, and return effects.

#![cfg_attr(
    not(all(feature = "kubernetes", feature = "server", feature = "edge")),
    allow(
        dead_code,
        unused_variables,
        clippy::needless_pass_by_value,
        reason = "only a part that this build lacks uses some functions and arguments"
    )
)]

#[cfg(all(not(target_os = "linux"), any(feature = "server", feature = "edge")))]
compile_error!("servers and edges need Linux; --no-default-features leaves a user's program");

pub mod acceptor;
pub mod admin;
pub mod admission;
pub mod command;
pub mod config;
#[cfg(feature = "edge")]
pub mod edge;
#[cfg(feature = "server")]
pub mod enrolment;
#[cfg(feature = "server")]
pub mod etcd;
#[cfg(feature = "server")]
pub mod intercept;
pub mod invitations;
pub mod kubernetes;
#[cfg(feature = "server")]
pub mod listener;
mod parts;
pub mod paths;
#[cfg(feature = "server")]
pub mod publish;
#[cfg(feature = "server")]
pub mod registry;
pub mod route;
#[cfg(feature = "server")]
pub mod server;
pub mod session_io;
pub mod startup;
pub mod uplink;
