//! Servers and edges in this process, on loopback sockets with their own ports.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../support/certificates.rs"]
mod certificates;

mod support;
mod tokens;
mod words;

mod abrupt;
mod addresses;
mod admin;
mod balance;
mod claims;
mod config;
mod conflict;
mod connect;
mod connecting;
mod doctor;
mod drain;
mod edge_proxy;
mod egress;
mod enrol;
mod finding;
mod generated;
mod grants;
mod heads;
mod herd;
mod hostile;
mod http_proxy;
mod https;
mod inside;
mod interactive;
mod intruders;
mod join_keys;
mod lid;
mod limiters;
mod linked_admin;
mod links;
mod live;
mod lost;
mod memory;
mod memory_limit;
mod names;
mod opener;
mod passthrough;
mod peers;
mod places;
mod plain;
mod plain_g4;
mod proxy;
mod publish;
mod refusals;
mod relay;
mod reload;
mod renewed;
mod resume;
mod revoked;
mod roll;
mod sessions;
mod silent;
mod slow;
mod smuggling;
mod socks5;
mod status;
mod tcp;
mod tls;
mod unused;
mod user_links;
mod version;
mod websocket;
