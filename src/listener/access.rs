//! Access to listeners: builds their access policies from the settings.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use http::HeaderMap;
use http::header::{AUTHORIZATION, PROXY_AUTHORIZATION};
use parking_lot::Mutex;
use tracing::info;

use crate::admin;
use crate::admin::page::{PageViewers, UserFuture};
use crate::config::access::{AccessConfig, PasswordAuthConfig};
use crate::config::admin_listener::AdminConfig;
use crate::config::admin_ports::AdminPorts;
use crate::config::server::Tls;
use crate::listener::admission::AccessPolicy;
use crate::listener::admission::basis::ClientIdentity;
use crate::listener::auth::{PasswordChecker, Users};
use crate::listener::denial::Denial;
use crate::startup::{NotPrepared, StartupErrorCollector, StartupErrorKind};
use tunnel_base::policy::Networks;
use tunnel_net::reload::{FileWatcher, ReloadedValue};
use tunnel_net::tls::client_certificate::ClientCertificate;

/// Builds the access policies of listeners. Tables that name the same user file share its checker, and failed logins at
/// any of their ports count together.
#[derive(Debug, Default)]
pub struct AccessPolicyBuilder {
    /// The checker of each file that an access policy uses.
    files: BTreeMap<PathBuf, Weak<PasswordChecker>>,
    /// Files that were read since the last [`Self::watch`].
    unwatched: Vec<ReloadedValue<Users>>,
    policies: ListenerPolicies,
}

/// The reloadable access policies in use, each with the key of its table. A closed listener's policy is in use while it
/// has sessions, so there may be several for one table. Cheap to clone; clones share the list.
#[derive(Debug, Clone, Default)]
pub struct ListenerPolicies(Arc<Mutex<Vec<KeyedPolicy>>>);

/// The key of a table, and an access policy that follows it.
type KeyedPolicy = (String, Weak<ArcSwap<AccessPolicy>>);

/// Access to one port, with the lists and files that decide it.
#[derive(Debug, Clone)]
pub struct ListenerAccess {
    /// The networks of load balancers in front of the port.
    pub proxies: Networks,
    /// The access policy, which follows the settings.
    pub policy: Arc<ArcSwap<AccessPolicy>>,
}

impl AccessPolicyBuilder {
    /// Reads what the port of the table with this key needs.
    pub fn prepare(
        &mut self,
        table: &str,
        access: &AccessConfig,
        startup: &mut StartupErrorCollector,
    ) -> Result<ListenerAccess, NotPrepared> {
        let logins = match &access.auth {
            PasswordAuthConfig::None => None,
            PasswordAuthConfig::Basic { users, key } => Some(self.logins(users, key, startup)?),
        };
        let AccessConfig { proxy_protocol, allow_from, rules, names, .. } = access.clone();
        let policy = Arc::new(ArcSwap::from_pointee(AccessPolicy { allow_from, logins, names, rules }));
        let mut policies = self.policies.0.lock();
        policies.retain(|(_, policy)| policy.strong_count() > 0);
        policies.push((table.to_owned(), Arc::downgrade(&policy)));
        Ok(ListenerAccess { proxies: proxy_protocol, policy })
    }

    /// Returns the checker of a user file, which is read unless an access policy uses it already.
    fn logins(
        &mut self,
        path: &Path,
        key: &str,
        startup: &mut StartupErrorCollector,
    ) -> Result<Arc<PasswordChecker>, NotPrepared> {
        if let Some(logins) = self.files.get(path).and_then(Weak::upgrade) {
            return Ok(logins);
        }
        let shown = path.display().to_string();
        let parse = move |text: &[u8]| {
            Users::parse(&String::from_utf8_lossy(text)).map_err(|cause| format!("{shown}: {cause}"))
        };
        let users = startup.collect(StartupErrorKind::Config, &[key], ReloadedValue::file(path, parse))?;
        let logins = Arc::new(PasswordChecker::new(users.clone()));
        self.unwatched.push(users);
        self.files.retain(|_, logins| logins.strong_count() > 0);
        self.files.insert(path.to_owned(), Arc::downgrade(&logins));
        Ok(logins)
    }

    /// Returns the people that may open the private pages of the admin listener from other machines: users with a
    /// password, and clients with an accepted certificate. `table` is the table of their settings.
    pub fn viewers(
        &mut self,
        table: &'static str,
        AdminConfig { tls, access, .. }: &AdminConfig,
        startup: &mut StartupErrorCollector,
    ) -> Result<Option<PageViewers>, NotPrepared> {
        let has_passwords = access.auth != PasswordAuthConfig::None;
        if !has_passwords && tls.as_ref().is_none_or(|tls| tls.client_ca.is_none()) {
            return Ok(None);
        }
        let policy = self.prepare(table, access, startup)?.policy;
        let user = move |certificate: Option<ClientCertificate>, head: HeaderMap, from| -> UserFuture {
            let policy = policy.load_full();
            // The policy reads the credentials for proxies; a browser sends the same ones to a server.
            let credentials =
                head.get(AUTHORIZATION).map(|credentials| (PROXY_AUTHORIZATION, credentials.clone()));
            let credentials = HeaderMap::from_iter(credentials);
            Box::pin(async move {
                let user = match certificate {
                    Some(certificate) => {
                        ClientIdentity::Certificate(certificate).judge(&policy, table).map(|(user, _)| user)
                    }
                    None => policy.authenticate(&credentials, from).await.map(|login| Some(login?.user)),
                };
                let user = user.and_then(|user| user.ok_or(Denial::Credentials));
                user.map_err(|denial| match denial {
                    Denial::Credentials => (denial.name(), "no name and password were sent".to_owned()),
                    _ => (denial.name(), denial.to_string()),
                })
            })
        };
        Ok(Some(PageViewers { authenticate: Arc::new(user), has_passwords }))
    }

    /// Reloads the users' files when they change.
    pub fn watch(&mut self, files: &FileWatcher) {
        for users in self.unwatched.drain(..) {
            files.watch("users", &users);
        }
    }

    /// Returns the access policies, also those that are built later.
    pub fn policies(&self) -> ListenerPolicies {
        self.policies.clone()
    }
}

/// Binds the admin ports of a process with this role. `table` has the keys of `ports`.
pub fn bind_admin(
    role: &str,
    (table, ports): (&str, &AdminPorts),
    admin: &AdminConfig,
    tls: &Tls,
    startup: &mut StartupErrorCollector,
) -> Result<admin::AdminListeners, NotPrepared> {
    let key = |name: &str| format!("{role}.{table}.{name}");
    let log = startup.bind_optional(&key("admin_listen"), ports.admin_listen, ports.is_default);
    let metrics = ports.metrics_listen.map(|at| startup.bind_public(&key("metrics_listen"), at)).transpose();
    let channelz = ports.channelz_listen.map(|at| startup.bind(&key("channelz_listen"), at)).transpose();
    let local = startup.bind_admin(&format!("{role}.admin.listen"), admin);
    let tls = admin.tls.as_ref().map(|files| files.load(tls, startup)).transpose();
    Ok(admin::AdminListeners { log: log?, tls: tls?, metrics: metrics?, channelz: channelz?, local: local? })
}

impl ListenerPolicies {
    /// Updates each access policy from the settings of its table: `allow_from`, `names` and `rules`. If the table was
    /// removed the policy stays unchanged.
    pub fn apply(&self, settings: &[(&str, &AccessConfig)]) {
        for (table, policy) in self.0.lock().iter() {
            let Some((_, access)) = settings.iter().find(|(key, _)| key == table) else { continue };
            let Some(policy) = policy.upgrade() else { continue };
            let old = policy.load_full();
            let AccessConfig { allow_from, names, rules, .. } = access;
            if (&old.allow_from, &old.names, &old.rules) != (allow_from, names, rules) {
                let allow_from = allow_from.clone();
                let names = names.clone();
                let rules = rules.clone();
                policy.store(Arc::new(AccessPolicy {
                    allow_from,
                    names,
                    rules,
                    ..AccessPolicy::clone(&old)
                }));
                info!(listener = table, "access policy reloaded");
            }
        }
    }
}
