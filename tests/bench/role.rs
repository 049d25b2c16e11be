//! The roles of this program when it starts itself again: one process for each part of a measurement.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::place::Certificates;
use crate::way::Way;
use crate::{echo, edges, line, load, relay, sessions, soak, targets};

/// One role with all its parameters, passed as JSON on the command line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Role {
    /// The clients' end of the bare relay.
    RelayFront {
        /// The address to listen on.
        listen: IpAddr,
        /// The addresses of the relay's other end, with one listener for each.
        backs: Vec<SocketAddr>,
        /// The CA of these certificates is trusted.
        certificates: Certificates,
    },
    /// One more process between the two ends of the bare relay.
    RelayMiddle {
        /// The address to listen on.
        listen: IpAddr,
        /// The addresses of the next process, with one listener for each.
        backs: Vec<SocketAddr>,
        /// The presented certificate, and the trusted CA.
        certificates: Certificates,
    },
    /// The end of the bare relay that dials the targets.
    RelayBack {
        /// The address to listen on.
        listen: IpAddr,
        /// The targets, with one listener for each.
        targets: Vec<SocketAddr>,
        /// The presented certificate.
        certificates: Certificates,
    },
    /// The echo target.
    EchoTarget {
        /// The address to listen on.
        listen: IpAddr,
    },
    /// The echo target with TLS, for clients with a certificate.
    TlsEchoTarget {
        /// The address to listen on.
        listen: IpAddr,
        /// The presented certificate, and the CA of clients' certificates.
        certificates: Certificates,
    },
    /// The bulk targets: source, sink, file.
    BulkTargets {
        /// The address to listen on.
        listen: IpAddr,
    },
    /// Bulk clients.
    Load(load::Load),
    /// Clients that send 64 bytes and wait for their return.
    Echo(echo::Echo),
    /// Clients that open a session, echo one byte, and close it.
    Open(sessions::Open),
    /// A client that does the same over TLS.
    OpenTls(sessions::OpenTls),
    /// Clients that send while the target sends a file and ends.
    Tail(sessions::Tail),
    /// Clients that open a session, echo one byte, and keep it until dismissed.
    Hold {
        /// The route to the target.
        way: Way,
        /// Number of clients.
        count: usize,
    },
    /// Many edges, linked to one server.
    Edges(edges::Edges),
    /// Two namespaces and the line between them.
    Line(line::Line),
    /// The line itself.
    Carry(line::Carry),
    /// An edge that opens sessions itself.
    Opener(soak::Opener),
}

impl Role {
    /// Runs the role until it is over, or until the parent process has ended.
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

/// Sends a message to the parent process, as one line of JSON.
pub(crate) fn print_message<T: Serialize>(what: &T) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, what)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// Waits until the parent process closes our input, on purpose or by its end.
pub(crate) fn until_dismissed() {
    let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
}
