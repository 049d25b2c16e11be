//! The fixed values of labels. Each is exposed from the start.

/// The other results of sessions with an end here.
pub(super) const ENDS: [&str; 3] = ["aborted", "client_io_error", "target_io_error"];

/// The results of requests that a listener denies itself, in addition to the protocol's error codes.
pub const DENIALS: [&str; 18] = [
    "address_ambiguous",
    "address_unknown",
    "bad_request",
    "bad_target",
    "body",
    "credentials_invalid",
    "credentials_missing",
    "forbidden",
    "method",
    "no_ready_endpoint",
    "node_not_named",
    "service_unknown",
    "target_forbidden",
    "target_is_local_node",
    "target_tls",
    "timeout",
    "upstream_no_response",
    "upstream_timeout",
];

pub(super) const LINKS_CLOSED: [&str; 7] = [
    "closed_by_remote",
    "closed_locally",
    "name_in_use",
    "protocol_error",
    "replaced_by_backup",
    "timed_out",
    "write_stalled",
];

pub(super) const LINKS_REJECTED: [&str; 28] = [
    "bad_metadata",
    "bad_role",
    "call_timeout",
    "evicted",
    "file_limit",
    "forbidden",
    "gone",
    "invitation",
    "limit_reached",
    "name_in_use",
    "no_invitations",
    "no_primary_link",
    "no_room",
    "no_users",
    "overloaded",
    "plain_dialect",
    "protocol_version",
    "proxy_header",
    "stopping",
    "timed_out",
    "tls",
    "tls_timeout",
    "token",
    "too_many_guesses",
    "too_many_links",
    "unchecked",
    "unknown_method",
    "websocket",
];

pub(super) const DIAL_FAILURES: [&str; 22] = [
    "address_unknown",
    "call_timeout",
    "closed_by_remote",
    "credentials_missing",
    "dns",
    "internal",
    "local_error",
    "name_in_use",
    "no_primary_link",
    "plain_dialect",
    "protocol_version",
    "proxy",
    "refused",
    "rejected",
    "stopping",
    "timeout",
    "tls",
    "tls_timeout",
    "token",
    "too_many_links",
    "unreachable",
    "websocket",
];

pub(super) const FRAMES_DROPPED: [&str; 8] = [
    "bad_field",
    "bad_session_id",
    "bad_target",
    "unexpected",
    "unknown_session",
    "unknown_type",
    "wrong_node",
    "wrong_opener",
];

pub(super) const CONNECTIONS_REJECTED: [&str; 21] = [
    "client_hello_missing",
    "client_hello_too_large",
    "evicted",
    "file_limit",
    "forbidden",
    "gone",
    "header_invalid",
    "header_missing",
    "header_timeout",
    "header_too_large",
    "limit_reached",
    "not_redirected",
    "not_socks5",
    "not_tls",
    "proxy_header",
    "reset",
    "reset_while_opening",
    "ssh_without_proxy_command",
    "timed_out",
    "tls",
    "tls_timeout",
];

/// Buckets in seconds, from a link on one machine to a link that is given up.
pub(super) const RTT_SECONDS: [f64; 15] =
    [0.0005, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 2.0, 3.0, 5.0];

/// Buckets in seconds, from a target on one machine to the longest timeout.
pub(super) const OPEN_SECONDS: [f64; 15] =
    [0.0005, 0.001, 0.0025, 0.01, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 3.0, 5.0, 12.0];
