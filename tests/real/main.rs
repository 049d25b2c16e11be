//! Tests of the built program together with other programs: ssh and its helpers, sshd, and a plain peer written in
//! Go.
//!
//! A test is skipped with a message if a program that it needs is missing. With `TUNNEL_TESTS=all` it fails instead.
//! With `TUNNEL_TESTS=debian` the tests run that need only programs of Debian, and no long time.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../support/certificates.rs"]
mod certificates;
#[path = "../support/wait.rs"]
mod wait;

mod addresses;
mod ansible;
mod apiserver;
mod audit;
mod black_hole;
mod broken;
mod channelz;
mod cluster;
mod command;
mod commands;
mod configmap;
mod csr;
mod cut;
mod demo;
mod deploy;
mod direct;
mod drain;
mod edge_proxy;
mod encrypted;
mod enrol;
mod files;
mod first;
mod fleet;
mod forms;
mod grants;
mod halfclose;
mod held;
mod intercept;
mod invitations;
mod kubectl;
mod kubelets;
mod kubernetes;
mod laptop;
mod measure;
mod monitoring;
mod names;
mod network;
mod nodelocal;
mod page;
mod parts;
mod plain;
mod plain_g4;
mod play;
mod process;
mod prometheus;
mod proxies;
mod publish;
mod readme;
mod refusals;
mod release;
mod resolver;
mod restore;
mod servers;
mod settings;
mod silent;
mod ssh;
mod sshd;
mod stores;
mod traces;
mod tunnel;
mod users;
mod vanished;
mod versions;
mod web;
mod workstation;
mod yurttunnel;
