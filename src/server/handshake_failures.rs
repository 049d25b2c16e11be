//! Logs failed TLS handshakes of the port for links; before the handshake no edge is known.

use std::net::IpAddr;

use tunnel_base::limited;
use tunnel_base::metrics::{Door, Metrics};
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_net::tls::handshake::TlsAcceptError;

/// Counts a failed handshake, and logs it if the caller has caused it. Closed connections are not logged, because
/// balancers close theirs after checking that the port is open.
pub(crate) fn report(failure: &TlsAcceptError, from: IpAddr, metrics: &Metrics) {
    match &failure.error {
        None if failure.reason == "websocket" => limited!(
            metrics.refuse(Door::Links, failure.reason, from) => warn,
            remote_addr = %from, reason = failure.why, "request for a WebSocket refused"
        ),
        None | Some(TlsHandshakeError::Closed) => metrics.count_refusal(Door::Links, failure.reason),
        Some(error) => limited!(
            metrics.refuse(Door::Links, failure.reason, from) => warn,
            remote_addr = %from,
            reason = error.name(),
            error = %format_args!("{error}{}", hint(error)),
            "TLS handshake failed"
        ),
    }
}

/// Returns a hint if the reason allows one.
fn hint(error: &TlsHandshakeError) -> &'static str {
    use tokio_rustls::rustls::AlertDescription as Alert;
    match error {
        // The second alert is about a CA that has the right name and another key.
        TlsHandshakeError::AlertReceived(Alert::UnknownCA | Alert::DecryptError) => {
            "; the CA in that edge's edge.uplink.ca has not signed our server.links.cert: add the CA that did"
        }
        TlsHandshakeError::AlertReceived(Alert::CertificateExpired) => {
            "; renew our server.links.cert, or correct that machine's clock"
        }
        // Edges in Go send it for every cause.
        TlsHandshakeError::AlertReceived(Alert::BadCertificate) => {
            "; check that our server.links.cert has the name that the edge dials (its dns, or the \
             host of the address in its servers); an edge of SuperEdge may also lack our CA"
        }
        TlsHandshakeError::AlertReceived(Alert::UnsupportedCertificate | Alert::CertificateUnknown) => {
            "; reissue our server.links.cert as a server certificate"
        }
        TlsHandshakeError::AlertReceived(_) => "; the log of that machine has the cause",
        TlsHandshakeError::NotTls => "; only edges, servers and programs of users can use this port",
        error if error.is_of_the_certificate() => {
            "; an edge (its edge.csr) needs a certificate from a CA in edge_ca of our server.csr, and \
             a server one from server.links.peer_ca"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use tokio_rustls::rustls::AlertDescription;

    use super::*;

    #[test]
    fn the_hint_for_a_tls_alert_names_the_key_of_the_side_that_can_change_it() {
        let hint_for = |alert| hint(&TlsHandshakeError::AlertReceived(alert));
        for alert in [AlertDescription::UnknownCA, AlertDescription::DecryptError] {
            assert!(hint_for(alert).contains("edge.uplink.ca has not signed"), "{alert:?}");
        }
        assert!(hint_for(AlertDescription::UnsupportedCertificate).contains("as a server certificate"));
        assert!(hint_for(AlertDescription::BadCertificate).contains("the name that the edge dials"));
    }
}
