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
//! # Rows
//!
//! An import goes to a lower row only; `tests/layers.rs` fails otherwise.
//!
//! | row | modules | what they know |
//! | --- | --- | --- |
//! | command | [`command`] | everything |
//! | wiring | [`cloud`], [`edge`], below them [`startup`] | everything below; reads [`config`] |
//! | ends | [`frontend`], [`backend`], [`admin`] | clients, targets, operators |
//! | way | [`route`], [`carry`], [`dialer`], [`enrol`], `csr` | opening sessions, finding paths, carrying bytes; permitted targets; nodes that join; certificates by a cluster's signers |
//! | place | [`registry`] | which node is where, and whose an address is; publishes it for DNS |
//! | protocol | [`protocol`] | links and sessions; nothing of HTTP, DNS or config |
//! | sockets and settings | [`net`], [`config`], [`policy`] | bytes and files |
//! | ground | [`names`], [`drain`], [`pki`], [`telemetry`] | nothing but themselves |
//!
//! # A byte's way
//!
//! ```text
//! client ─CONNECT─▶ frontend::connect ─open─▶ route ─find─▶ registry
//!                        │                      └─ask─▶ SessionTable ─Open─▶ SessionTable ─▶ backend ─dial─▶ target
//!                        ◀──200── Session ◀════ Data, Credit, Finish ════▶ Session
//!                   net::splice                                          net::splice
//! ```
//!
//! Nothing is pushed. `splice` puts bytes into the session's sending half while there is room and wakes the link's
//! [`protocol::LinkSender`], which notes that the session has something to send. When HTTP/2 can take more, the link
//! sender asks its schedule who is next and takes one frame from that session. What waits, waits in its own session;
//! order and fairness are decided at the last moment; a resumed session simply moves its sending position back. A slow
//! reader uses up its own window and stops only its own session.
//!
//! # Several pods
//!
//! ```text
//!               here? ─▶ remembered? ─▶ Find to its homes ─▶ DNS, 50 ms ahead ─▶ Find to all ─▶ first fresh yes
//! registry::find: own links   last Found frame registry::siblings    registry::dns       registry::siblings
//! ```
//!
//! Pods link to each other as edges link to pods, with the cloud's own certificate on both sides. Three pods keep where a
//! node is: its homes, which every pod derives from the node's name. A pod that gains a node's link announces it to them
//! at once, and they announce it on to whom it concerns, so the old pod lets go and sessions follow; none of them waits
//! for DNS to change. One search serves what clients open, what edges open and what is resumed through a pod ([`route`]).
//! It asks on one path at a time: another one after 3 s without an answer, or when the pod there has not got the node;
//! a node that comes ends it at once. A node that nobody has is waited for 3 s if it was there a moment ago, and not
//! looked for again for 1 s. A pod between two others only passes frames on ([`protocol::RelayRequest`]), and what
//! comes from a pod goes to its own edges or nowhere, so there is at most one hop. For an edge with a plain link its
//! pod is the session's end.
//!
//! **Invariants.** Reading a link never waits for writing it. Nothing slow happens on a read loop. A peer cannot make
//! us queue more than it was promised. Two locks are never held at once, and none across an await. The pure parts
//! (`send`, `recv`, `session::state`, `schedule`, `pace`, `budget`) read no clock, wait for nothing and return effects.

pub mod admin;
pub mod backend;
pub mod carry;
pub mod cloud;
pub mod command;
pub mod config;
#[cfg(feature = "kubernetes")]
pub mod csr;
pub mod dialer;
pub mod drain;
pub mod edge;
pub mod enrol;
pub mod frontend;
pub mod names;
pub mod net;
pub mod pki;
pub mod policy;
pub mod protocol;
pub mod registry;
pub mod route;
pub mod startup;
pub mod telemetry;
