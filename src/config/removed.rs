//! Keys and tables that the config no longer has, each with a sentence that says what to use instead.
//!
//! [`ConfigDiagnostics::unknown`](crate::config::diagnostics::ConfigDiagnostics::unknown) looks an unknown key up here. A
//! row has the full key, as messages have it (`server.links.x`, or `server.x` for a whole table), without names that a
//! user chose.

/// Removed keys that are ignored with a warning, so that a new version starts with an old file.
pub(crate) const IGNORED: &[(&str, &str)] = &[
    ("edge.uplink.node_ips", LIST_ADDRESSES),
    ("server.intercept.trust_edge_addresses", LIST_ADDRESSES),
    (
        "server.socks5",
        "use [server.connect], [server.http_proxy], or SOCKS5 of tunnel proxy on the user's machine",
    ),
];

/// Removed keys that restricted access. They are errors: without them a file would admit more than its author allowed.
pub(crate) const REFUSED: &[(&str, &str)] = &[
    #[cfg(test)]
    ("server.refused_in_tests", "set rules of [server.connect]"),
];

const LIST_ADDRESSES: &str = "list the addresses of nodes at the servers: in [server.addresses.nodes], or as ip= in a node's line of the \
                              token file";

/// Returns the sentence of a key in one of these tables.
pub(crate) fn replacement(table: &[(&str, &'static str)], key: &str) -> Option<&'static str> {
    table.iter().find(|(removed, _)| *removed == key).map(|(_, instead)| *instead)
}
