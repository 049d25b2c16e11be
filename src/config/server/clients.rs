//! `[server.clients]`: links of users' programs.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::config::access::{self, AccessConfig};
use crate::config::diagnostics::ConfigDiagnostics;
use crate::config::listen_tls;
use crate::config::table::ConfigTableReader;
use crate::config::value::forms;
use tunnel_base::policy::{CertificateGlob, Network, Networks, Rules};
use tunnel_base::serde_forms::non_empty;
use tunnel_proto::names::UserName;

/// `[server.clients]`: the users with links of their own, made by their programs to the port of `[server.links]`, and
/// what they may reach. A session of such a link survives a new address of the user's machine, a broken line and the
/// end of a server. Without this table such links are refused.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(default)]
struct ClientConfigKeys {
    /// Networks or addresses from which users may link. Default: any.
    ///
    /// Example: `["10.0.0.0/8", "fd00::/8"]`
    #[serde(deserialize_with = "non_empty::<_, Network, _>")]
    allow_from: Option<Networks>,
    /// Access rules: a request must match one rule, and a rule matches if all its parts do. users, from, nodes and
    /// ports are like those of rules in `[server.connect]`. Default: users may reach nothing. A change also ends open
    /// sessions that are no longer allowed.
    ///
    /// Example: `[{ users = ["alice"], nodes = ["edge-*"], ports = [22] }]`
    rules: Option<Rules>,
    /// Users who may send requests of operators over their links: `tunnel nodes` with all nodes, `status`, `sessions`,
    /// `invite` and `invitations`. They may invite anyone but the users in this list. A change applies at once.
    /// Default: none.
    ///
    /// Example: `["alice"]`
    admins: Vec<UserName>,
    /// File (PEM) of the CA that signs users' certificates, for users without a token. Re-read when it changes. The
    /// names that servers' certificates contain, and the subject of edges, are never accepted. Default: none.
    ///
    /// Example: `"/etc/tunnel/certs/users-ca.crt"`
    #[serde(deserialize_with = "forms::file")]
    client_ca: Option<PathBuf>,
    /// Patterns of the names (CN or DNS name) of accepted certificates; '*' matches any run of characters. The user is
    /// the first accepted name. Required with client_ca. No default.
    ///
    /// Example: `["*@example.org"]`
    #[serde(deserialize_with = "non_empty::<_, CertificateGlob, _>")]
    names: Option<Vec<CertificateGlob>>,
}

/// The access of users' programs that link to a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserAccessConfig {
    /// What users may reach, from where, and which names of certificates are users.
    pub access: AccessConfig,
    /// Users who may send requests of operators.
    pub admins: Vec<UserName>,
    /// The file of CAs that sign users' certificates.
    pub client_ca: Option<PathBuf>,
}

/// The key of the table.
pub const TABLE: &str = "server.clients";

/// Reads the table. Returns `None` if it is absent.
pub(crate) fn read(
    server: &mut ConfigTableReader<'_>,
    report: &mut ConfigDiagnostics,
) -> Option<UserAccessConfig> {
    let mut table = server.table("clients", report);
    let keys: ClientConfigKeys = table.fields(report);
    listen_tls::require_names(&table, report);
    if table.has("names") && !table.has("client_ca") {
        let expected = "no certificate is requested; set client_ca to the CA that signs them";
        table.error("names", Some("set, but client_ca is not".to_owned()), expected, report);
    }
    if let Some(rules) = &keys.rules {
        access::check_rule_users(&table, rules, keys.client_ca.is_some(), report);
    }
    let is_present = table.is_present();
    table.close_optional(&keys, report);
    let ClientConfigKeys { allow_from, rules, admins, client_ca, names } = keys;
    // Without rules, other listeners allow everything.
    let rules = rules.filter(|rules| !rules.is_empty()).unwrap_or_else(Rules::none);
    let access =
        AccessConfig { allow_from, rules, names: names.unwrap_or_default(), ..AccessConfig::default() };
    is_present.then_some(UserAccessConfig { access, admins, client_ca })
}
