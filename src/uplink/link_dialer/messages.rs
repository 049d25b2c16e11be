//! Error texts for failed connections and TLS handshakes with servers. They contain the error, the config key and a
//! hint.

use std::io;
use std::time::Duration;

use tunnel_link::grpc::dial::LinkDialError;
use tunnel_net::dial::{AddressFailure, ConnectError};
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_proto::names::Target;

/// Returns the error text if no address of a server accepted the connection. `after` is the server if the message has
/// named it already.
pub(crate) fn no_connection(error: &ConnectError, after: Option<&Target>) -> String {
    let hint = connection_hint(error.first());
    let then = if hint.is_empty() { "" } else { "; " };
    format!("{}{then}{hint}", after.map_or_else(|| error.to_string(), |at| error.after(at)))
}

/// Returns the hint with the config key of the edge or server that fixes the error. May be empty.
pub fn connection_hint(failure: Option<&AddressFailure>) -> &'static str {
    match failure {
        Some(AddressFailure::Refused(_)) => {
            "nothing listens there: check that the server runs, and that edge.uplink.servers has the port \
             of its server.links.listen (default 9000)"
        }
        Some(AddressFailure::Unreachable(_, cause)) if cause.kind() != io::ErrorKind::HostUnreachable => {
            NO_ROUTE
        }
        Some(AddressFailure::Timeout(..) | AddressFailure::Unreachable(..)) => UNREACHABLE,
        Some(AddressFailure::Local(..)) | None => "",
    }
}

/// Returns the error text of a failed attempt to link, with the hint if the server rejected the link. `of_user` is true
/// at a user's program.
pub(crate) fn no_link(error: &anyhow::Error, of_user: bool) -> String {
    let dialled: Option<&LinkDialError> = error.downcast_ref();
    let hint = dialled.and_then(if of_user { user_hint } else { refusal_hint });
    let text = match hint {
        Some(hint) => format!("{error:#}; {hint}"),
        None => format!("{error:#}"),
    };
    if of_user { for_user(text) } else { text }
}

/// Replaces the keys of an edge's config in a text: a user has other keys than an operator.
pub(crate) fn for_user(text: String) -> String {
    USER_KEYS.iter().fold(text, |text, (edge, user)| text.replace(edge, user))
}

/// Returns a hint for the operator of an edge that a server refused, if there is one.
pub(crate) fn refusal_hint(error: &LinkDialError) -> Option<&'static str> {
    match error.is_token_refused() {
        true => Some(TOKEN_HINT),
        false => error.is_over_rate().then_some("give each machine its own token"),
    }
}

/// Returns a hint for a user whose program a server refused, if there is one.
pub(crate) fn user_hint(error: &LinkDialError) -> Option<&'static str> {
    match error.is_token_refused() {
        true => Some(USER_TOKEN_HINT),
        false => error.knows_no_users().then_some(OLD_SERVER_HINT),
    }
}

const TOKEN_HINT: &str = "compare token or token_file here with this node's line, or the default line, in the server's token file; \
                          where nodes join by invitation, all servers need one store (server.invitations), or invite the node again; \
                          the server's log has the reason";

/// The hint for a user whose device the servers do not know.
pub(crate) const USER_TOKEN_HINT: &str = "the access of this device was revoked, or it is for other servers; ask their \
                                          operator for an invitation, and run `tunnel leave` before you join";
const OLD_SERVER_HINT: &str = "this server is too old for links of users; ask its operator to upgrade it, or use its CONNECT port with \
                               --server=https://HOST:PORT";

/// The keys of an edge that these texts name, and what they are for a user.
const USER_KEYS: [(&str, &str); 5] = [
    ("edge.uplink.servers", "servers in client.toml"),
    ("edge.uplink.ca", "ca in client.toml"),
    ("edge.uplink.websocket_ca", "websocket_ca"),
    (
        "set edge.uplink.tls_server_name to a name in the certificate",
        "use a name in the certificate in servers",
    ),
    ("start the edge with HTTPS_PROXY", "set HTTPS_PROXY"),
];

/// Returns the error text if a server was not connected to in time, including DNS and proxies.
pub(crate) fn no_connection_within(patience: Duration) -> String {
    format!("no connection within {patience:?}; {UNREACHABLE}")
}

/// Returns the error text of a server that accepted the connection, and then sent nothing for `patience`.
pub(crate) fn no_answer_within(at: &Target, patience: Duration) -> String {
    format!(
        "{at} did not answer within {patience:?}, but accepted the connection; check that its process is not \
             stopped or overloaded, and that a proxy or load balancer in between reaches it"
    )
}

const NO_ROUTE: &str = "this machine has no network, or no route there: check `ip route`";
const UNREACHABLE: &str = "check edge.uplink.servers, and that firewalls allow connections to that port; if a proxy is \
                         required, start the edge with HTTPS_PROXY";

/// Context of an error if a certificate was presented.
pub(crate) const CERTIFICATE_PRESENTED: &str = "presented the certificate of edge.csr, which servers accept only if edge_ca of their \
                                server.csr contains its CA; if the server closed the connection for that reason, the next \
                                attempt uses only the token";

/// Error text if the edge has neither a certificate nor a token.
pub(crate) const NO_CREDENTIALS: &str = "no valid certificate yet and no token; check the log for the certificate request \
                                   (edge.csr), which `tunnel approve` must approve";

/// Returns the error text of a failed TLS handshake. `name` is the name expected in the server's certificate; `shows`
/// is true if a client certificate was presented.
pub(crate) fn no_tls(error: &io::Error, at: &Target, name: &str, shows: bool) -> String {
    let fault = TlsHandshakeError::of(error);
    let hint = if shows && matches!(fault, TlsHandshakeError::AlertReceived(_)) { "" } else { hint(&fault) };
    let then = if hint.is_empty() { "" } else { "; " };
    format!("TLS handshake as {name:?} with {at} failed: {fault}{then}{hint}")
}

/// Returns the hint with the config key of the edge or server that fixes the error. May be empty.
pub fn hint(fault: &TlsHandshakeError) -> &'static str {
    match fault {
        TlsHandshakeError::UnknownIssuer => {
            "edge.uplink.ca must contain the CA that signed it: get that file from the operator of the \
             server, unless another program answers there; the CA of a proxy belongs into edge.uplink.websocket_ca"
        }
        TlsHandshakeError::Name(_) => {
            "set edge.uplink.tls_server_name to a name in the certificate, or reissue the server's \
             server.links.cert with this name"
        }
        TlsHandshakeError::Expired(..) => {
            "renew the server's server.links.cert, which it reloads without a restart; if this machine's clock \
             is wrong, set it"
        }
        TlsHandshakeError::NotValidYet(..) => "set this machine's clock if it is wrong, or wait",
        TlsHandshakeError::CaUsedAsEndEntity
        | TlsHandshakeError::Purpose
        | TlsHandshakeError::OtherCertificate(_) => {
            "reissue the server's server.links.cert as a server certificate"
        }
        TlsHandshakeError::NotTls => {
            "check that it is not the CONNECT port: edge.uplink.servers must have the port of the \
             server's server.links.listen (default 9000)"
        }
        TlsHandshakeError::Protocol => {
            "check that it is not the port for egress or HTTPS: edge.uplink.servers must have the port of \
             the server's server.links.listen (default 9000)"
        }
        TlsHandshakeError::AlertReceived(_) => {
            "no client certificate was presented: check that it is the server's port for links, \
             server.links.listen"
        }
        TlsHandshakeError::Closed => {
            "check that it is the server's port for links (server.links.listen), and that no firewall or load \
             balancer in between closes connections"
        }
        TlsHandshakeError::Stopping | TlsHandshakeError::Other(_) => "",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tunnel_net::dial::dial;
    use tunnel_proto::names::Host;

    use super::*;

    #[test]
    fn a_missing_route_is_reported_without_a_proxy_hint() {
        let unreachable =
            |kind| AddressFailure::Unreachable("192.0.2.1:9000".parse().unwrap(), io::Error::from(kind));
        assert_eq!(connection_hint(Some(&unreachable(io::ErrorKind::NetworkUnreachable))), NO_ROUTE);
        assert_eq!(connection_hint(Some(&unreachable(io::ErrorKind::HostUnreachable))), UNREACHABLE);
    }

    #[tokio::test]
    async fn a_refused_connection_hints_at_a_wrong_port() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let dialled = dial(&Host::Ip(closed.ip()), &[closed], Duration::from_secs(20)).await;
        let message = no_connection(&dialled.unwrap_err(), None);
        assert!(
            message.starts_with(&format!("{closed} refused the connection; nothing listens there")),
            "{message}"
        );
        assert!(message.contains("edge.uplink.servers") && message.contains("listen"), "{message}");
    }
}
