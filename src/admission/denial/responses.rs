//! The single table that maps each denial to its response: HTTP status, label for metrics and logs, and hint; for
//! TLS an alert.

use bytes::Bytes;
use http::StatusCode;

use crate::admission::denial::Denial;
use crate::paths::node_not_found::NodeNotFound;
use crate::route::{RouteError, refusal_text};
use tunnel_base::addresses::LocateError;
use tunnel_net::tls::error::TlsHandshakeError;
use tunnel_proto::frame::{ErrorCode, SessionError};
use tunnel_proto::names::NodeName;

impl Denial {
    /// Returns the closest fatal TLS alert (RFC 8446, section 6.2), for clients that speak TLS instead of HTTP.
    pub(crate) fn alert(&self) -> Bytes {
        let description = match self {
            Self::Forbidden(_) => ACCESS_DENIED,
            Self::NoServerName | Self::BadTarget(_) => UNRECOGNIZED_NAME,
            _ => INTERNAL_ERROR,
        };
        Bytes::copy_from_slice(&[ALERT, 3, 3, 0, 2, FATAL, description])
    }

    /// Returns the error text. It contains addresses and times of last contact only for `sees_details` clients.
    pub fn sentence(&self, sees_details: bool) -> String {
        match self {
            Self::Route(RouteError::Offline { node, missing }) if !sees_details => {
                let missing =
                    NodeNotFound { unqueried_reason: missing.unqueried_reason, ..NodeNotFound::default() };
                RouteError::Offline { node: node.clone(), missing }.to_string()
            }
            Self::Route(RouteError::Refused { node, refusal }) if !sees_details => {
                format!("node {node}: {}", generic_text(refusal.code))
            }
            Self::UpstreamTimeout(_) if !sees_details => generic_text(ErrorCode::TargetTimeout).to_owned(),
            Self::UpstreamFailed(_) if !sees_details => "invalid response from the target".to_owned(),
            Self::TargetTls(_) if !sees_details => "TLS with the target failed".to_owned(),
            Self::Direct(refusal) | Self::DirectDenied(refusal) | Self::UserDenied { refusal, .. }
                if !sees_details =>
            {
                generic_text(refusal.code).to_owned()
            }
            Self::NotLocated(LocateError::Ambiguous { ip, .. }) if !sees_details => {
                format!("several nodes have the address {ip}")
            }
            Self::NotLocated(LocateError::NoService(_) | LocateError::NoPort { .. }) if !sees_details => {
                "the Service or its port does not exist".to_owned()
            }
            Self::NotLocated(LocateError::NoEndpoint(..)) if !sees_details => {
                "the Service has no ready endpoint".to_owned()
            }
            other => other.to_string(),
        }
    }

    /// Returns status, label and hint for this denial.
    pub(crate) fn response_row(&self) -> (StatusCode, &'static str, &'static str) {
        use StatusCode as S;
        match self {
            Self::BadTarget(_) => {
                (S::BAD_REQUEST, "bad_target", "use <node>:<port> as the target, for example node1:22")
            }
            Self::Forbidden(_) => (S::FORBIDDEN, "forbidden", FORBIDDEN_HINT),
            Self::Method => (
                S::METHOD_NOT_ALLOWED,
                "method",
                "use this port as a proxy for CONNECT, as ssh and curl -p do",
            ),
            Self::Body => (S::BAD_REQUEST, "body", "leave out Content-Length and Transfer-Encoding"),
            Self::HeadTooLong { .. } => (
                S::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "head_too_long",
                "send fewer or shorter header fields, such as cookies",
            ),
            Self::UrlTooLong => (
                S::URI_TOO_LONG,
                "url_too_long",
                "shorten the URL, or use CONNECT or mode = \"passthrough\" of [server.https], which have no such limit",
            ),
            Self::Request(_) => {
                (S::BAD_REQUEST, "bad_request", "check what the client, or a proxy in between, sends")
            }
            Self::NoNodeInHost => node_not_named(KUBELET_NODE_HINT),
            Self::NoHost => node_not_named("use the node's name in the URL: http://<node>:<port>/"),
            Self::UpstreamFailed(_) => (S::BAD_GATEWAY, "upstream_no_response", UPSTREAM_HINT),
            Self::UpstreamTimeout(_) => (S::GATEWAY_TIMEOUT, "upstream_timeout", UPSTREAM_HINT),
            Self::TargetTls(fault) => (S::BAD_GATEWAY, "target_tls", target_tls(fault)),
            Self::Credentials => (S::PROXY_AUTHENTICATION_REQUIRED, "credentials_missing", LOGIN_HINT),
            Self::NotBasic => (S::PROXY_AUTHENTICATION_REQUIRED, "credentials_invalid", LOGIN_HINT),
            Self::Password(_) => (S::PROXY_AUTHENTICATION_REQUIRED, "credentials_invalid", PASSWORD_HINT),
            Self::NoNode(_) => node_not_named(
                "use the node's name, or list the address in [server.addresses] of every server",
            ),
            Self::NotLocated(why) => not_located(why),
            Self::OffLimits(_) => (S::FORBIDDEN, "target_forbidden", NODE_NAME_HINT),
            Self::Direct(refusal) => not_dialled(refusal, DIRECT_TARGETS_HINT),
            Self::DirectDenied(refusal) => not_dialled(refusal, EDGE_TARGETS_HINT),
            Self::OwnNode(_) => (
                S::MISDIRECTED_REQUEST,
                "target_is_local_node",
                "list this machine's names and addresses in the client's no_proxy",
            ),
            Self::EdgeOffline => {
                node_not_connected("check /readyz of this edge and what it logs about its link")
            }
            Self::UserOffline(_) => {
                node_not_connected("check this machine's network, and what tunnel proxy logs about its link")
            }
            Self::UserDenied { refusal, .. } => user_denied(refusal),
            Self::NoServerName => node_not_named("connect to the node by its name, not by an address"),
            Self::NoNodeConnected => node_not_connected("check that `tunnel edge` runs on a node"),
            Self::WrongPasswords => (BUSY.0, BUSY.1, "try again in a minute, with the right password"),
            Self::Busy(_) => BUSY,
            Self::Route(why) => not_routed(why),
        }
    }
}

/// Returns status, label and hint for a request that names no node.
fn node_not_named(hint: &'static str) -> (StatusCode, &'static str, &'static str) {
    (StatusCode::MISDIRECTED_REQUEST, "node_not_named", hint)
}

/// Returns status, label and hint if the node, or this edge, has no link.
fn node_not_connected(hint: &'static str) -> (StatusCode, &'static str, &'static str) {
    (StatusCode::BAD_GATEWAY, "node_not_connected", hint)
}

/// Returns the hint for a failed TLS handshake of this process with a target.
fn target_tls(fault: &TlsHandshakeError) -> &'static str {
    match fault {
        fault if fault.is_of_the_certificate() => TARGET_CA_HINT,
        TlsHandshakeError::AlertReceived(_) => TARGET_CERT_HINT,
        _ => TARGET_TLS_HINT,
    }
}

/// Returns status, label and hint for a session that could not be routed.
fn not_routed(why: &RouteError) -> (StatusCode, &'static str, &'static str) {
    match why {
        RouteError::Busy => (BUSY.0, BUSY.1, SESSION_LIMITS_HINT),
        RouteError::Offline { missing: NodeNotFound { unqueried_reason: Some(_), .. }, .. } => {
            node_not_connected("check /readyz of the server, which says why it cannot ask the other servers")
        }
        RouteError::Offline { .. } => node_not_connected(
            "check that `tunnel edge` runs on that node and what it logs about its link; `tunnel nodes` lists the names",
        ),
        RouteError::Timeout { .. } => (
            StatusCode::GATEWAY_TIMEOUT,
            "timeout",
            "try again; check how busy that node and its network are",
        ),
        RouteError::Refused { refusal, .. } => refused(refusal),
    }
}

/// Returns status, label and hint for a refusal by the remote end, see docs/protocol.md#codes.
pub(super) fn refused(refusal: &SessionError) -> (StatusCode, &'static str, &'static str) {
    let (status, next) = match refusal.code {
        ErrorCode::TargetRefused => {
            (StatusCode::BAD_GATEWAY, "check that the service listens on that port of the node")
        }
        ErrorCode::TargetTimeout => (StatusCode::GATEWAY_TIMEOUT, "check that the node can reach the target"),
        ErrorCode::TargetUnreachable => {
            // Also the code for a node that no server has, if an edge or a user's program asks for it.
            let next = "check that `tunnel edge` runs on that node (`tunnel nodes` lists the names), and that the node can resolve \
                        and reach the target; for the target's certificate, check ca in [edge.target_tls] of that node's config";
            (StatusCode::BAD_GATEWAY, next)
        }
        ErrorCode::NotAllowed => (
            StatusCode::FORBIDDEN,
            "add the target to [edge.allow] targets in that node's config and keep the entries that are there: a list \
             replaces the default",
        ),
        ErrorCode::NodeNotAllowed => (
            StatusCode::FORBIDDEN,
            "add the node to [server.edge_access] nodes in the config of every server",
        ),
        ErrorCode::OwnPort => (
            StatusCode::FORBIDDEN,
            "use another port: no setting opens this one; for metrics use the port of that edge's metrics_listen",
        ),
        ErrorCode::Overloaded => (
            StatusCode::SERVICE_UNAVAILABLE,
            "try again in a moment; if a limit was reached, raise it: buffer_memory of [edge.session] in the config of the \
             node's edge, max_sessions or buffer_memory of [server.session] at a server, or open files (LimitNOFILE)",
        ),
        ErrorCode::NodeNotConnected => (
            StatusCode::BAD_GATEWAY,
            "check that `tunnel edge` runs on that node (`tunnel nodes` lists the names); if it is only moving to another server, \
             try again",
        ),
        ErrorCode::NoError
        | ErrorCode::UnknownSession
        | ErrorCode::ProtocolError
        | ErrorCode::Cancelled
        | ErrorCode::ConnectionFailed
        | ErrorCode::Internal => (StatusCode::BAD_GATEWAY, "search the server's log for the trace"),
    };
    (status, refusal.code.name(), next)
}

/// Returns status, label and hint for a user's session that was refused at the other end of her link.
fn user_denied(refusal: &SessionError) -> (StatusCode, &'static str, &'static str) {
    let (status, name, next) = refused(refusal);
    let next = match refusal.code {
        ErrorCode::NotAllowed => {
            "ask an operator of the servers: a grant or a rule must let you reach the node and the port, and [edge.allow] \
             of the node its target; `tunnel whoami` lists what you may reach, and whether nodes that came by a join key \
             are included; `tunnel nodes` lists the names of your nodes; a revoked device needs a new invitation"
        }
        ErrorCode::TargetUnreachable => {
            "check the node's name (`tunnel nodes` lists the names), that `tunnel edge` runs on that node and what it logs about its \
             link, and that the node can resolve and reach the target"
        }
        _ => next,
    };
    (status, name, next)
}

/// Returns the text of such a refusal. A server that denies access names the node itself.
pub(super) fn user_denied_text(node: &NodeName, refusal: &SessionError) -> String {
    match refusal.code {
        ErrorCode::NotAllowed => refusal.to_string(),
        _ => refusal_text(node, refusal),
    }
}

/// Returns status, label and hint for a target that cannot be located.
fn not_located(why: &LocateError) -> (StatusCode, &'static str, &'static str) {
    match why {
        LocateError::Ambiguous { .. } => {
            (StatusCode::MISDIRECTED_REQUEST, "address_ambiguous", "use the node's name")
        }
        LocateError::NoAddress(_) => (
            StatusCode::MISDIRECTED_REQUEST,
            "address_unknown",
            "list the node's address in [server.addresses] of every server, or let the servers get it from Kubernetes",
        ),
        LocateError::NoEndpoint(..) => (
            StatusCode::SERVICE_UNAVAILABLE,
            "no_ready_endpoint",
            "check that the pods of the Service are ready",
        ),
        LocateError::NoService(_) | LocateError::NoPort { .. } => {
            (StatusCode::BAD_GATEWAY, "service_unknown", "check the name and the ports of the Service")
        }
    }
}

/// Returns status, label and hint for a target that a server did not dial; `allow` is the hint for allowing it.
fn not_dialled(refusal: &SessionError, allow: &'static str) -> (StatusCode, &'static str, &'static str) {
    let (status, name, _) = refused(refusal);
    let next = match refusal.code {
        ErrorCode::NotAllowed => allow,
        ErrorCode::OwnPort => "use another port: no setting opens this one",
        ErrorCode::Overloaded => BUSY.2,
        _ => {
            "no node is known by that name or address, so the server dialled it itself: use the node's name, list its address \
             in [server.addresses], or check that the server reaches the target"
        }
    };
    (status, name, next)
}

/// Returns the meaning of a code without the remote end's own text, which may contain addresses.
fn generic_text(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::TargetRefused => "the target refused the connection",
        ErrorCode::TargetTimeout => "the target did not answer in time",
        ErrorCode::TargetUnreachable => "the target cannot be reached",
        ErrorCode::NotAllowed | ErrorCode::OwnPort => "the target is not allowed",
        ErrorCode::NodeNotAllowed => "edges may not reach that node",
        ErrorCode::NodeNotConnected => "the node is not connected",
        ErrorCode::Overloaded => "the node accepts no more sessions",
        ErrorCode::NoError | ErrorCode::UnknownSession | ErrorCode::Cancelled => "the session was cancelled",
        ErrorCode::ConnectionFailed => "the connection at the other end failed",
        ErrorCode::ProtocolError => "protocol error",
        ErrorCode::Internal => "internal error",
    }
}

/// Response if a limit is reached or the process is stopping.
const BUSY: (StatusCode, &str, &str) =
    (StatusCode::SERVICE_UNAVAILABLE, "overloaded", "try again in a moment");
/// Hint if this process has no room for a session.
const SESSION_LIMITS_HINT: &str = "try again in a moment, or raise max_sessions or buffer_memory of [server.session], or buffer_memory of \
                        [edge.session], in the config of this process";
/// Hint for missing credentials. `nc` can prompt for a password only at a terminal.
const LOGIN_HINT: &str = "give the proxy a user name and a password: curl -x http://user:password@..., ssh with \
                             ProxyCommand \"ncat --proxy-auth user:password ...\"; nc -P user prompts for the password, \
                             but only at a terminal";
const PASSWORD_HINT: &str =
    "check the user and the password; the operator of this port finds the users in the file set as users";
const FORBIDDEN_HINT: &str = "ask the operator of this port to allow it in allow_from, names or rules";
const NODE_NAME_HINT: &str = "use a node's name; for a port on the node's loopback use <node>:<port>";
/// Hint at a port for kubelets if the node is unknown.
const KUBELET_NODE_HINT: &str = "use the node's name; kube-apiserver always does with --kubelet-certificate-authority; without it, a \
                       server with access to Kubernetes finds the node by the pod";
/// Hint for an invalid response.
const UPSTREAM_HINT: &str = "check the log of the service at that port of the node and whether it speaks HTTP; if it requires a \
                         client certificate, check target_cert of [server.https] or, without that, cert and key of \
                         [edge.target_tls] in that node's config";
/// Hint if a target's certificate is not trusted.
const TARGET_CA_HINT: &str = "set target_ca of [server.https] to the CA that signs kubelets' certificates; each \
                                  certificate must contain its node's name, as those issued by the cluster do \
                                  (serverTLSBootstrap); for kubelets' self-signed certificates, set \
                                  target_insecure_skip_verify = true";
/// Hint if a target does not trust this process's certificate.
const TARGET_CERT_HINT: &str = "check which CA signed target_cert of [server.https]: for a kubelet it must be in its \
                               --client-ca-file";
/// Hint for other failures of a TLS handshake with a target.
const TARGET_TLS_HINT: &str = "check the target's log; a kubelet with serverTLSBootstrap fails like this until its certificate \
                          request is approved: kubectl get csr";
/// Hint for a target that servers may not dial for clients.
const DIRECT_TARGETS_HINT: &str = "add the target to [server.direct] targets of every server";
/// Hint for a target that servers may not dial for edges.
const EDGE_TARGETS_HINT: &str = "add the target to [server.edge_access] targets of every server";
/// TLS record type of alerts.
const ALERT: u8 = 21;
/// Level of an alert that ends the connection.
const FATAL: u8 = 2;
const ACCESS_DENIED: u8 = 49;
const INTERNAL_ERROR: u8 = 80;
const UNRECOGNIZED_NAME: u8 = 112;

#[cfg(test)]
mod tests {
    use tunnel_base::metrics::label_values::DENIALS;

    use super::*;
    use tunnel_proto::names::NameError;

    #[test]
    fn a_denials_hint_is_for_the_party_that_can_act() {
        let refused = |code| refused(&SessionError::new(code, "whatever the sentence says")).2;
        let cloud = |code| Denial::DirectDenied(SessionError::new(code, "x")).next_step();
        for (next, says) in [
            (refused(ErrorCode::NotAllowed), "[edge.allow] targets in that node's config"),
            (refused(ErrorCode::NodeNotAllowed), "[server.edge_access] nodes"),
            (refused(ErrorCode::OwnPort), "no setting opens this one"),
            (cloud(ErrorCode::NotAllowed), "[server.edge_access] targets"),
            (cloud(ErrorCode::OwnPort), "no setting opens this one"),
            (Denial::Credentials.next_step(), "only at a terminal"),
            (Denial::Password("ops".into()).next_step(), "check the user and the password"),
            (Denial::WrongPasswords.next_step(), "in a minute"),
            (Denial::Busy("full").next_step(), "in a moment"),
        ] {
            assert!(next.contains(says), "{next}");
        }
        assert!(!refused(ErrorCode::NodeNotAllowed).contains("[edge.allow]"));
    }

    #[test]
    fn the_http_errors_reference_has_a_row_for_each_status_and_label() {
        let reference = std::fs::read_to_string("docs/reference/http-errors.md").unwrap();
        let node = || "node1".parse().unwrap();
        let codes = (0..11).map(|code| SessionError::new(ErrorCode::from_wire(code), "x"));
        let mut denials: Vec<Denial> =
            codes.map(|refusal| RouteError::Refused { node: node(), refusal }.into()).collect();
        denials.extend([
            Denial::BadTarget(NameError::Session),
            Denial::Forbidden(String::new()),
            Denial::Method,
            Denial::Body,
            Denial::Request(""),
            Denial::NoHost,
            Denial::UpstreamFailed(String::new()),
            Denial::UpstreamTimeout(String::new()),
            Denial::TargetTls(TlsHandshakeError::UnknownIssuer),
            Denial::Credentials,
            Denial::NotBasic,
            Denial::Password(String::new()),
            LocateError::NoAddress(node()).into(),
            LocateError::NoService(String::new()).into(),
            LocateError::NoEndpoint(String::new(), true).into(),
            Denial::OffLimits("127.0.0.1:22".parse().unwrap()),
            Denial::OwnNode("node1:22".parse().unwrap()),
            Denial::EdgeOffline,
            Denial::UserOffline(String::new()),
            Denial::Busy(""),
            RouteError::Timeout { node: node(), timeout: std::time::Duration::ZERO }.into(),
        ]);
        for denial in denials {
            let (status, label, _) = denial.response_row();
            assert!(
                ErrorCode::ALL.iter().any(|(_, name)| *name == label) || DENIALS.contains(&label),
                "{label} is not exposed from the start"
            );
            let has_row = |line: &str| {
                let mut cells = line.split(" | ");
                cells.next() == Some(&format!("| {}", status.as_u16()))
                    && cells.next().is_some_and(|labels| labels.contains(&format!("`{label}`")))
            };
            assert!(reference.lines().any(has_row), "{} {label}", status.as_u16());
        }
    }

    #[test]
    fn the_hint_for_a_targets_tls_error_depends_on_the_error() {
        use tokio_rustls::rustls::AlertDescription::{InternalError, UnknownCA};
        let next = |fault| Denial::TargetTls(fault).next_step();
        for fault in [
            TlsHandshakeError::UnknownIssuer,
            TlsHandshakeError::Name(vec!["node9".to_owned()]),
            TlsHandshakeError::CaUsedAsEndEntity,
        ] {
            assert!(next(fault.clone()).contains("target_ca of [server.https]"), "{fault}");
        }
        assert!(next(TlsHandshakeError::AlertReceived(UnknownCA)).contains("target_cert of [server.https]"));
        assert!(
            next(TlsHandshakeError::Other(format!("alert {InternalError:?}"))).contains("kubectl get csr")
        );
    }

    #[test]
    fn a_denial_has_its_tls_alert() {
        for (denial, description) in
            [(Denial::NoServerName, 112), (Denial::Forbidden(String::new()), 49), (Denial::Busy("full"), 80)]
        {
            assert_eq!(denial.alert()[..], [21, 3, 3, 0, 2, 2, description]);
        }
    }
}
