//! `[server.clients]`: links of users' programs.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config;
use crate::config::access::{self, AccessConfig};
use crate::config::listen_tls;
use crate::config::table::ConfigTableReader;
use crate::config::value::forms::{FilePath, Millis};
use tunnel_base::policy::grants::GrantBounds;
use tunnel_base::policy::{CertificateGlob, Network, Networks, Rules};
use tunnel_base::serde_forms::non_empty;
use tunnel_proto::names::UserName;

/// `[server.clients]`: the users with links of their own, made by their programs to the port of `[server.links]`, and
/// what they may reach. A session of such a link survives a new address of the user's machine, a broken line and the
/// end of a server. Without this table only users with a grant may link.
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
    /// `invite`, `invitations`, `grant` and `grants`. They may invite anyone but the users in this list, and grant what
    /// a rule above gives them. A change applies at once. Default: none.
    ///
    /// Example: `["alice"]`
    admins: Vec<UserName>,
    /// What grants can give at most: `tunnel grant` and `tunnel invite --user` give rights without a change of this
    /// file. Rules like those above. An empty list lets grants give nothing. Default: everything that a node's edge
    /// permits.
    ///
    /// Example: `[{ nodes = ["edge-*"], ports = [22, 443] }]`
    ceiling: Option<Rules>,
    /// Longest time for which admins may grant over their links. On a server's machine there is no limit. Default:
    /// 12h.
    ///
    /// Example: `"12h"`
    #[serde(with = "Millis::<60_000, MAX_ADMIN_GRANT>")]
    max_admin_grant: Option<Duration>,
    /// File (PEM) of the CA that signs users' certificates, for users without a token. Re-read when it changes. The
    /// names that servers' certificates contain, and the subject of edges, are never accepted. Default: none.
    ///
    /// Example: `"/etc/tunnel/certs/users-ca.crt"`
    client_ca: Option<FilePath>,
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
    /// The file of CAs that sign users' certificates.
    pub client_ca: Option<FilePath>,
}

/// The key of the table.
pub const TABLE: &str = "server.clients";

/// Reads the table.
pub(crate) fn read(server: &mut ConfigTableReader<'_>) -> UserAccessConfig {
    let mut table = server.table("clients");
    let keys: ClientConfigKeys = table.fields();
    listen_tls::require_names(&table);
    if table.has("names") && !table.has("client_ca") {
        let expected = "no certificate is requested; set client_ca to the CA that signs them";
        table.error("names", Some("set, but client_ca is not".to_owned()), expected);
    }
    for (key, rules) in [("rules", &keys.rules), ("ceiling", &keys.ceiling)] {
        if let Some(rules) = rules {
            access::check_rule_users(&table, key, rules, keys.client_ca.is_some());
        }
    }
    let links_need_grant = !table.is_present();
    table.close_optional(&keys);
    let ClientConfigKeys { allow_from, rules, admins, ceiling, max_admin_grant, client_ca, names } = keys;
    // Without rules, other listeners allow everything.
    let closed = |rules: Rules| if rules.is_empty() { Rules::none() } else { rules };
    let rules = closed(rules.unwrap_or_default());
    let ceiling = ceiling.map(closed).unwrap_or_default();
    let max_admin_grant = max_admin_grant.unwrap_or(Duration::from_secs(12 * 3600));
    let bounds = GrantBounds { links_need_grant, ceiling, admins, max_admin_grant };
    let names = names.unwrap_or_default();
    let access = AccessConfig { allow_from, rules, names, bounds, ..AccessConfig::default() };
    UserAccessConfig { access, client_ca }
}

/// A year, in milliseconds.
const MAX_ADMIN_GRANT: u64 = 365 * config::DAY;
