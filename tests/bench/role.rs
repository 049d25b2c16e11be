//! What this program does when it starts itself again: one process for each part of a measurement.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::place::Certificates;
use crate::way::Way;
use crate::{echo, edges, line, load, relay, sessions, soak, targets};

/// One part, with all it needs to know; it travels as JSON in the command line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Role {
    /// The bare relay's end where clients come in.
    RelayFront {
        /// Where to listen.
        listen: IpAddr,
        /// The relay's back ends, one listener for each.
        backs: Vec<SocketAddr>,
        /// Of them the authority, which is trusted.
        certificates: Certificates,
    },
    /// One more process between the two ends of the bare relay.
    RelayMiddle {
        /// Where to listen.
        listen: IpAddr,
        /// The back ends, one listener for each.
        backs: Vec<SocketAddr>,
        /// What it shows, and the authority, which it trusts.
        certificates: Certificates,
    },
    /// The bare relay's end that dials the targets.
    RelayBack {
        /// Where to listen.
        listen: IpAddr,
        /// The targets, one listener for each.
        targets: Vec<SocketAddr>,
        /// What it shows.
        certificates: Certificates,
    },
    /// The echo target.
    EchoTarget {
        /// Where to listen.
        listen: IpAddr,
    },
    /// The echo target behind TLS, for clients with a certificate.
    TlsEchoTarget {
        /// Where to listen.
        listen: IpAddr,
        /// What it shows, and whose clients it takes.
        certificates: Certificates,
    },
    /// The targets that move many bytes: source, sink, file.
    BulkTargets {
        /// Where to listen.
        listen: IpAddr,
    },
    /// Clients that move many bytes.
    Load(load::Load),
    /// Clients that send 64 bytes and wait for them.
    Echo(echo::Echo),
    /// Clients that open, see one byte come back, and close.
    Open(sessions::Open),
    /// A client that does the same over TLS.
    OpenTls(sessions::OpenTls),
    /// Clients that send while the target sends a file and ends.
    Tail(sessions::Tail),
    /// Clients that open, see one byte come back, and stay until told to go.
    Hold {
        /// Where to.
        way: Way,
        /// How many.
        count: usize,
    },
    /// Many edges, linked to one pod.
    Edges(edges::Edges),
    /// Two namespaces and the line between them.
    Line(line::Line),
    /// The line itself.
    Carry(line::Carry),
    /// An edge that opens sessions itself.
    Opener(soak::Opener),
}

impl Role {
    /// Plays the part; returns when it is over, or when whoever started it has gone.
    pub(crate) fn play(self) -> anyhow::Result<()> {
        match self {
            Self::RelayFront { listen, backs, certificates } => relay::front(listen, &backs, &certificates),
            Self::RelayMiddle { listen, backs, certificates } => relay::middle(listen, &backs, &certificates),
            Self::RelayBack { listen, targets, certificates } => relay::back(listen, &targets, &certificates),
            Self::EchoTarget { listen } => targets::echo(listen),
            Self::TlsEchoTarget { listen, certificates } => targets::tls_echo(listen, &certificates),
            Self::BulkTargets { listen } => targets::bulk(listen),
            Self::Load(load) => load.run(),
            Self::Echo(echo) => echo.run(),
            Self::Open(open) => open.run(),
            Self::OpenTls(open) => open.run(),
            Self::Tail(tail) => tail.run(),
            Self::Hold { way, count } => sessions::hold(&way, count),
            Self::Edges(edges) => edges.run(),
            Self::Line(line) => line.run(),
            Self::Carry(carry) => carry.run(),
            Self::Opener(opener) => opener.run(),
        }
    }
}

/// Tells whoever started this process something, as one line of JSON.
pub(crate) fn say<T: Serialize>(what: &T) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, what)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// Waits until whoever started this process closes our input, on purpose or by dying.
pub(crate) fn until_dismissed() {
    let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
}
