//! The one table from what went wrong to an answer: in HTTP status, label for metrics and logs, and next step; in TLS an
//! alert.

use bytes::Bytes;
use http::StatusCode;

use super::Denial;
use crate::net::tls::Fault;
use crate::protocol::{Code, Refusal};
use crate::registry::{NotFound, NotLocated};
use crate::route::RouteError;

impl Denial {
    /// The answer where TLS comes in place of HTTP: the fatal alert that is closest, RFC 8446 6.2.
    pub(super) fn alert(&self) -> Bytes {
        let description = match self {
            Self::Forbidden(_) => ACCESS_DENIED,
            Self::NoServerName | Self::BadTarget(_) => UNRECOGNIZED_NAME,
            _ => INTERNAL_ERROR,
        };
        Bytes::copy_from_slice(&[ALERT, 3, 3, 0, 2, FATAL, description])
    }

    /// What went wrong. A client that is not `trusted` is shown neither addresses nor times of last contact.
    pub fn sentence(&self, trusted: bool) -> String {
        match self {
            Self::Route(RouteError::Offline { node, .. }) if !trusted => {
                RouteError::Offline { node: node.clone(), missing: NotFound::default() }.to_string()
            }
            Self::Route(RouteError::Refused { node, refusal }) if !trusted => {
                format!("node {node}: {}", in_general(refusal.code))
            }
            Self::Unanswered(_) if !trusted => "the target gave no proper answer".to_owned(),
            Self::TargetTls(_) if !trusted => "TLS with the target failed".to_owned(),
            Self::Direct(refusal) | Self::Cloud(refusal) if !trusted => in_general(refusal.code).to_owned(),
            Self::NotLocated(NotLocated::Ambiguous { ip, .. }) if !trusted => {
                format!("{ip} is an address at several nodes")
            }
            Self::NotLocated(NotLocated::NoService(_) | NotLocated::NoPort { .. }) if !trusted => {
                "there is no such Service, or it has no such port".to_owned()
            }
            Self::NotLocated(NotLocated::NoEndpoint(..)) if !trusted => {
                "the Service has no ready endpoint".to_owned()
            }
            other => other.to_string(),
        }
    }

    /// Status, fixed word and next step for each cause.
    pub(super) fn row(&self) -> (StatusCode, &'static str, &'static str) {
        use StatusCode as S;
        match self {
            Self::BadTarget(_) => {
                (S::BAD_REQUEST, "bad_target", "ask for <node>:<port>, for example node1:22")
            }
            Self::Forbidden(_) => (
                S::FORBIDDEN,
                "forbidden",
                "ask whoever runs this port to allow it there in allow_from, names or rules",
            ),
            Self::Method => (
                S::METHOD_NOT_ALLOWED,
                "method",
                "use this port as a proxy for CONNECT, as ssh and curl -p do",
            ),
            Self::Body => (S::BAD_REQUEST, "body", "leave out Content-Length and Transfer-Encoding"),
            Self::Request(_) => {
                (S::BAD_REQUEST, "bad_request", "see what the client, or a proxy before it, sends")
            }
            Self::Unnamed => (S::MISDIRECTED_REQUEST, "no_node", NO_NODE),
            Self::NoHost => {
                (S::MISDIRECTED_REQUEST, "no_node", "ask by the node's name: http://<node>:<port>/")
            }
            Self::Unanswered(_) => (S::BAD_GATEWAY, "no_answer", NO_ANSWER),
            Self::TargetTls(fault) => (S::BAD_GATEWAY, "target_tls", target_tls(fault)),
            Self::Credentials => (S::PROXY_AUTHENTICATION_REQUIRED, "credentials", GIVE_PASSWORD),
            Self::Password(_) => (S::PROXY_AUTHENTICATION_REQUIRED, "password", CHECK_PASSWORD),
            Self::NoNode(_) => (
                S::MISDIRECTED_REQUEST,
                "no_node",
                "ask for the node by its name, or list the address in [mode.cloud.addresses] of every pod",
            ),
            Self::NotLocated(why) => not_located(why),
            Self::OffLimits(_) => (
                S::FORBIDDEN,
                "off_limits",
                "ask for a node by its name; for its own loopback, as <node>:<port>",
            ),
            Self::Direct(refusal) => not_dialled(refusal, ALLOW_CLIENTS),
            Self::Cloud(refusal) => not_dialled(refusal, ALLOW_EDGES),
            Self::OwnNode(_) => (
                S::MISDIRECTED_REQUEST,
                "own_node",
                "list this machine's names and addresses in the client's no_proxy",
            ),
            Self::Unlinked => {
                (S::BAD_GATEWAY, "offline", "see /readyz of this edge, and what it logs about its link")
            }
            Self::NoServerName => {
                (S::MISDIRECTED_REQUEST, "no_node", "connect to the node by its name, not by an address")
            }
            Self::NoNodes => (S::BAD_GATEWAY, "offline", "see whether `tunnel --m=edge` runs on a node"),
            Self::WrongPasswords => (BUSY.0, BUSY.1, "try again in a minute, with the right password"),
            Self::Busy(_) => BUSY,
            Self::Route(why) => not_routed(why),
        }
    }
}

/// What to do about a target with which this process could not speak TLS.
fn target_tls(fault: &Fault) -> &'static str {
    match fault {
        fault if fault.is_of_the_certificate() => TARGET_CERTIFICATE,
        Fault::Disbelieves(_) => OUR_CERTIFICATE,
        _ => TARGET_TLS,
    }
}

/// The same for a session that found no way.
fn not_routed(why: &RouteError) -> (StatusCode, &'static str, &'static str) {
    match why {
        RouteError::Busy(_) => BUSY,
        RouteError::Offline { .. } => (
            StatusCode::BAD_GATEWAY,
            "offline",
            "check that `tunnel --m=edge` runs on that node, and read what it logs about its link",
        ),
        RouteError::Timeout { .. } => (
            StatusCode::GATEWAY_TIMEOUT,
            "timeout",
            "try again; check how busy that node and its network are",
        ),
        RouteError::Refused { refusal, .. } => refused(refusal),
    }
}

/// The same for a refusal by the far end, docs/protocol.md#codes.
fn refused(refusal: &Refusal) -> (StatusCode, &'static str, &'static str) {
    let (status, next) = match refusal.code {
        Code::TargetRefused => {
            (StatusCode::BAD_GATEWAY, "check that the service listens on that port of the node")
        }
        Code::TargetTimeout => (StatusCode::GATEWAY_TIMEOUT, "check that the node can reach the target"),
        Code::TargetUnreachable => {
            let next = "check that the node can resolve and reach the target; for a target's certificate, ca in \
                        [mode.edge.https] of that node's config";
            (StatusCode::BAD_GATEWAY, next)
        }
        Code::NotAllowed => (
            StatusCode::FORBIDDEN,
            "add the target to [mode.edge.allow] targets in that node's config, and keep what stands there: a list stands alone",
        ),
        Code::NodeNotAllowed => {
            (StatusCode::FORBIDDEN, "add the node to [mode.cloud.allow] nodes in the config of every pod")
        }
        Code::OwnPort => (
            StatusCode::FORBIDDEN,
            "ask for another port: no setting opens this one; for metrics, ask for the port of that edge's metrics_listen",
        ),
        Code::Busy => (
            StatusCode::SERVICE_UNAVAILABLE,
            "try again in a moment, or raise [mode.edge.session] memory in that node's config",
        ),
        Code::NotHere => (
            StatusCode::BAD_GATEWAY,
            "check that `tunnel --m=edge` runs on that node; if it is only moving to another pod, try again",
        ),
        Code::Over | Code::Unknown | Code::Violation | Code::GivenUp | Code::Internal => {
            (StatusCode::BAD_GATEWAY, "search the pod's log for the trace")
        }
    };
    (status, refusal.code.name(), next)
}

/// The same for a target that is nowhere.
fn not_located(why: &NotLocated) -> (StatusCode, &'static str, &'static str) {
    match why {
        NotLocated::Ambiguous { .. } => {
            (StatusCode::MISDIRECTED_REQUEST, "ambiguous", "ask for the node by its name")
        }
        NotLocated::NoAddress(_) => (
            StatusCode::MISDIRECTED_REQUEST,
            "no_address",
            "list the node's address in [mode.cloud.addresses] of every pod, or let the pods ask Kubernetes for it",
        ),
        NotLocated::NoEndpoint(..) => {
            (StatusCode::SERVICE_UNAVAILABLE, "no_endpoint", "check that the pods of the Service are ready")
        }
        NotLocated::NoService(_) | NotLocated::NoPort { .. } => {
            (StatusCode::BAD_GATEWAY, "no_service", "check the name and the ports of the Service")
        }
    }
}

/// The same for a target that a pod could not dial; `allow` says how to let it.
fn not_dialled(refusal: &Refusal, allow: &'static str) -> (StatusCode, &'static str, &'static str) {
    let (status, name, _) = refused(refusal);
    let next = match refusal.code {
        Code::NotAllowed => allow,
        Code::OwnPort => "ask for another port: no setting opens this one",
        Code::Busy => BUSY.2,
        _ => "check that the pod can resolve and reach the target",
    };
    (status, name, next)
}

/// What a code means, without the far end's own text, which may hold addresses.
fn in_general(code: Code) -> &'static str {
    match code {
        Code::TargetRefused => "the target refused the connection",
        Code::TargetTimeout => "the target did not answer in time",
        Code::TargetUnreachable => "the target cannot be reached",
        Code::NotAllowed | Code::OwnPort => "the target is not allowed",
        Code::NodeNotAllowed => "edges may not reach that node",
        Code::NotHere => "the node is not here",
        Code::Busy => "the node can take no more sessions",
        Code::Over | Code::Unknown | Code::GivenUp => "the session was given up",
        Code::Violation => "the protocol was violated",
        Code::Internal => "internal error",
    }
}

/// There is no room, or no more work is taken.
const BUSY: (StatusCode, &str, &str) = (StatusCode::SERVICE_UNAVAILABLE, "busy", "try again in a moment");
/// Whoever has no terminal cannot be asked by `nc`.
const GIVE_PASSWORD: &str = "give the proxy a user and a password: curl -x http://user:password@..., ssh with \
                             ProxyCommand \"ncat --proxy-auth user:password ...\"; nc -P user asks for the password, and \
                             only at a terminal";
const CHECK_PASSWORD: &str = "check the user and the password; whoever runs this port finds the users in the file that users names there";
/// At a port for kubelets.
const NO_NODE: &str = "ask by the node's name; kube-apiserver always does with --kubelet-certificate-authority, and without \
                       it a pod that may ask Kubernetes knows where pods are";
/// A target that was reached has said nothing of use.
const NO_ANSWER: &str = "see what the service at that port of the node logs, whether it speaks HTTP, and, if it asks for a \
                         client's certificate, what it was shown: target_cert of [mode.cloud.https], or else cert and key of \
                         [mode.edge.https] in that node's config";
/// A target's certificate will not do.
const TARGET_CERTIFICATE: &str = "name the authority that signs kubelets' certificates in target_ca of [mode.cloud.https]; \
                                  each certificate has to carry its node's name, as those have that kubelets ask the \
                                  cluster for (serverTLSBootstrap); for those that kubelets have signed themselves, set \
                                  target_insecure = true";
/// A target does not take ours.
const OUR_CERTIFICATE: &str = "see who has signed target_cert of [mode.cloud.https]: for a kubelet it has to be the authority of \
                               its --client-ca-file";
/// TLS with a target has failed before certificates counted.
const TARGET_TLS: &str = "see what the target logs; a kubelet with serverTLSBootstrap answers so until its request for a \
                          certificate is approved: kubectl get csr";
/// What lets clients have a target dialled by a pod.
const ALLOW_CLIENTS: &str = "add the target to [mode.cloud.direct] targets of every pod";
/// The same for edges.
const ALLOW_EDGES: &str = "add the target to [mode.cloud.allow] targets of every pod";
/// TLS's type of record for alerts.
const ALERT: u8 = 21;
/// The level of an alert after which the connection ends.
const FATAL: u8 = 2;
const ACCESS_DENIED: u8 = 49;
const INTERNAL_ERROR: u8 = 80;
const UNRECOGNIZED_NAME: u8 = 112;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_step_is_whoevers_who_can_take_it() {
        let refused = |code| refused(&Refusal::new(code, "whatever the sentence says")).2;
        let cloud = |code| Denial::Cloud(Refusal::new(code, "x")).next_step();
        for (next, says) in [
            (refused(Code::NotAllowed), "[mode.edge.allow] targets in that node's config"),
            (refused(Code::NodeNotAllowed), "[mode.cloud.allow] nodes"),
            (refused(Code::OwnPort), "no setting opens this one"),
            (cloud(Code::NotAllowed), "[mode.cloud.allow] targets"),
            (cloud(Code::OwnPort), "no setting opens this one"),
            (Denial::Credentials.next_step(), "only at a terminal"),
            (Denial::Password("ops".into()).next_step(), "check the user and the password"),
            (Denial::WrongPasswords.next_step(), "in a minute"),
            (Denial::Busy("full").next_step(), "in a moment"),
        ] {
            assert!(next.contains(says), "{next}");
        }
        assert!(!refused(Code::NodeNotAllowed).contains("[mode.edge.allow]"));
    }

    #[test]
    fn what_to_do_about_a_targets_tls_depends_on_what_failed() {
        use tokio_rustls::rustls::AlertDescription::{InternalError, UnknownCA};
        let next = |fault| Denial::TargetTls(fault).next_step();
        for fault in [Fault::Authority, Fault::Name(vec!["node9".to_owned()]), Fault::IsAuthority] {
            assert!(next(fault.clone()).contains("target_ca of [mode.cloud.https]"), "{fault}");
        }
        assert!(next(Fault::Disbelieves(UnknownCA)).contains("target_cert of [mode.cloud.https]"));
        assert!(next(Fault::Other(format!("alert {InternalError:?}"))).contains("kubectl get csr"));
    }

    #[test]
    fn a_denial_is_an_alert() {
        for (denial, description) in
            [(Denial::NoServerName, 112), (Denial::Forbidden(String::new()), 49), (Denial::Busy("full"), 80)]
        {
            assert_eq!(denial.alert()[..], [21, 3, 3, 0, 2, 2, description]);
        }
    }
}
