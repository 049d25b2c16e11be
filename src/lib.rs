//! `tunnel`: reach edge nodes behind NAT by name, through HTTP CONNECT.
//!
//! An **edge** runs on each node and dials out to a **pod**, the cloud process. The gRPC stream between them is a
//! **link**. A **session** is one proxied TCP conversation: a byte stream in two halves, with two ends. The **opener**
//! (here the pod's front end) asked for it, the **acceptor** (the edge's back end) dials the **target**. A session is
//! not bound to its link: the link is the path it runs on for now, and when it is gone the opener resumes the session
//! over the next one.
//!
//! docs/architecture.md has the whole of this, docs/protocol.md what goes over a link, docs/glossary.md the words.
//!
//! # Modules
//!
//! In this order; each imports those before it only, and `tests/layers.rs` fails otherwise.
//!
//! | modules | what they know |
//! | --- | --- |
//! | [`base`] | names, rules, the address book, logs, metrics |
//! | [`net`] | sockets, TLS, names in DNS, limits |
//! | [`proto`] | frames and one end of a session, without I/O |
//! | [`link`] | links, and the sessions that outlive them |
//! | [`kubernetes`], [`config`], [`etcd`], [`intercept`] | a cluster's API; settings; etcd; nftables |
//! | [`registry`], [`publish`], [`invitations`] | which node is where; telling DNS of it; machines that join |
//! | [`route`], [`session_io`], [`acceptor`] | from a request to an open session; its bytes until its end; targets |
//! | [`admin`], [`listener`], [`startup`] | operators; clients; what keeps a program from starting |
//! | [`edge`], [`server`], [`command`] | the two programs, and the commands |
//!
//! # A byte's way
//!
//! ```text
//! client ─CONNECT─▶ listener::connect ─open─▶ route ─find─▶ registry
//!                        │                      └─ask─▶ SessionTable ─Open─▶ SessionTable ─▶ acceptor ─dial─▶ target
//!                        ◀──200── Session ◀════ Data, Credit, Finish ════▶ Session
//!                   session_io                                           session_io
//! ```
//!
//! Nothing is pushed. `copy_bidirectional` puts bytes into the session's sending half while there is room and wakes the link's
//! [`link::sender::LinkSender`], which notes that the session has something to send. When HTTP/2 can take more, the link
//! sender asks its schedule who is next and takes one frame from that session. What waits, waits in its own session;
//! order and fairness are decided at the last moment; a resumed session simply moves its sending position back. A slow
//! reader uses up its own window and stops only its own session.
//!
//! # Several pods
//!
//! ```text
//!               here? ─▶ remembered? ─▶ Find to its homes ─▶ DNS, 50 ms ahead ─▶ Find to all ─▶ first fresh yes
//! registry:       own links   last Found frame registry::peers       registry::search    registry::peers
//! ```
//!
//! Pods link to each other as edges link to pods, with the cloud's own certificate on both sides. Three pods keep where a
//! node is: its homes, which every pod derives from the node's name. A pod that gains a node's link announces it to them
//! at once, and they announce it on to whom it concerns, so the old pod lets go and sessions follow; none of them waits
//! for DNS to change. One search serves what clients open, what edges open and what is resumed through a pod ([`route`]).
//! It asks on one path at a time: another one after 3 s without an answer, or when the pod there has not got the node;
//! a node that comes ends it at once. A node that nobody has is waited for 3 s if it was there a moment ago, and not
//! looked for again for 1 s. A pod between two others only passes frames on ([`link::table::RelayRequest`]), and what
//! comes from a pod goes to its own edges or nowhere, so there is at most one hop. For an edge with a plain link its
//! pod is the session's end.
//!
//! **Invariants.** Reading a link never waits for writing it. Nothing slow happens on a read loop. A peer cannot make
//! us queue more than it was promised. Two locks are never held at once, and none across an await. The pure parts
//! ([`proto`], and of `link` the schedule and the congestion control) read no clock, wait for nothing and return effects.

pub mod acceptor;
pub mod admin;
pub mod command;
pub mod config;
pub mod edge;
pub mod etcd;
pub mod intercept;
pub mod invitations;
pub mod kubernetes;
pub mod listener;
pub mod publish;
pub mod registry;
pub mod route;
pub mod server;
pub mod session_io;
pub mod startup;
