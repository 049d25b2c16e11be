//! Why the cloud was not reached, or the TLS handshake with it failed, for whoever runs the edge: what was found, which key,
//! the remedy.

use std::io;

use tunnel_base::names::Target;
use tunnel_net::dial::{ConnectError, Failure};
use tunnel_net::tls::handshake::HandshakeError;

/// The whole sentence where no address of a server took the connection.
pub(crate) fn no_connection(error: &ConnectError) -> String {
    let remedy = match error.first() {
        Some(Failure::Refused(_)) => {
            "; nothing listens there: is the pod running, and does mode.edge.stream.client.server_name name the port of its \
             mode.cloud.stream.server.listen, by default 9000?"
        }
        Some(Failure::Timeout(..) | Failure::Unreachable(..)) => {
            "; is mode.edge.stream.client.server_name right, and does a firewall let this machine out to that port? Where only \
             a proxy leads out, start the edge with HTTPS_PROXY"
        }
        Some(Failure::Local(..)) | None => "",
    };
    format!("{error}{remedy}")
}

/// Stands before the cause where a certificate was shown.
pub(crate) const SHOWN: &str = "the certificate of mode.edge.csr was shown, which counts only where agent_ca of the cloud's \
                                mode.cloud.csr has its authority; if the connection broke by it, the next try is with the token \
                                alone";

/// The whole sentence where nothing proves the edge yet.
pub(crate) const UNPROVEN: &str = "there is no valid certificate yet, and no token; the log says what became of the request \
                                   for a certificate (mode.edge.csr), which `tunnel approve` has to approve";

/// The whole sentence; `name` is what the cloud's certificate has to carry, `shows` whether a certificate was shown.
pub(crate) fn no_tls(error: &io::Error, at: &Target, name: &str, shows: bool) -> String {
    let fault = HandshakeError::of(error);
    let remedy = if shows && matches!(fault, HandshakeError::AlertReceived(_)) { "" } else { remedy(&fault) };
    let then = if remedy.is_empty() { "" } else { "; " };
    format!("TLS with the cloud as {name:?} failed, at {at}: {fault}{then}{remedy}")
}

/// Which key of the edge or its cloud mends it; may be empty.
pub fn remedy(fault: &HandshakeError) -> &'static str {
    match fault {
        HandshakeError::UnknownIssuer => {
            "mode.edge.stream.client.cert has to hold the authority that has signed it: get that file from whoever runs \
             the cloud, unless another server than the cloud answers there"
        }
        HandshakeError::Name(_) => {
            "set mode.edge.stream.client.dns to a name that it is for, or have the cloud's mode.cloud.stream.server.cert \
             issued anew with this one"
        }
        HandshakeError::Expired(..) => {
            "the cloud needs a new mode.cloud.stream.server.cert, which it reads without a restart; if the clock is \
             wrong, set it"
        }
        HandshakeError::NotValidYet(..) => "set this machine's clock if it is wrong, or wait",
        HandshakeError::CaUsedAsEndEntity | HandshakeError::Purpose | HandshakeError::OtherCertificate(_) => {
            "the cloud's mode.cloud.stream.server.cert has to be issued anew, for servers"
        }
        HandshakeError::NotTls => {
            "that port speaks no TLS: is it the CONNECT port? mode.edge.stream.client.server_name has to name the port of \
             the cloud's mode.cloud.stream.server.listen, by default 9000"
        }
        HandshakeError::Protocol => {
            "that port takes no links: is it the one for egress or HTTPS? mode.edge.stream.client.server_name has to name \
             the port of the cloud's mode.cloud.stream.server.listen, by default 9000"
        }
        HandshakeError::AlertReceived(_) => {
            "an edge shows no certificate to its cloud: is that its port for links, mode.cloud.stream.server.listen?"
        }
        HandshakeError::Closed => {
            "is that the cloud's port for links (mode.cloud.stream.server.listen), and does a firewall or balancer stand \
             between?"
        }
        HandshakeError::Other(_) => "",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tunnel_net::dial::dial;

    use super::*;

    #[tokio::test]
    async fn who_refuses_a_connection_may_be_another_port_than_that_for_links() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let said = no_connection(&dial(&[closed], Duration::from_secs(20)).await.unwrap_err());
        assert!(
            said.starts_with(&format!("{closed} refused the connection; nothing listens there")),
            "{said}"
        );
        assert!(said.contains("server_name") && said.contains("listen"), "{said}");
    }
}
