//! Access to listeners: their access policies, which follow the settings.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use http::HeaderMap;
use http::header::{AUTHORIZATION, PROXY_AUTHORIZATION};

use crate::admin;
use crate::admin::page::{PageViewers, UserFuture};
use crate::admission::AccessPolicy;
use crate::admission::auth::{PasswordChecker, Users};
use crate::admission::basis::ClientIdentity;
use crate::admission::denial::Denial;
use crate::config::access::{AccessConfig, PasswordFile};
use crate::config::admin_listener::AdminConfig;
use crate::config::admin_ports::AdminPorts;
use crate::config::listen_tls::Tls;
use crate::session_io::rights::RightsChange;
use crate::startup::{NotPrepared, StartupErrorCollector, StartupErrorKind};
use tunnel_base::policy::grants::Rights;
use tunnel_net::reload::{FileWatcher, ReloadedValue};
use tunnel_net::tls::client_certificate::ClientCertificate;

/// The access policies of a process, one for each table of access rules. Tables that name the same users file share its
/// checker, and failed logins at any of their ports count together.
#[derive(Debug, Default)]
pub struct AccessPolicies {
    /// The checker of each file that an access policy uses.
    files: BTreeMap<PathBuf, Weak<PasswordChecker>>,
    /// Files that were read since the last [`Self::watch`].
    unwatched: Vec<ReloadedValue<Users>>,
    /// The policies by the keys of their tables. A listener that closes and opens again keeps its policy, so that its
    /// earlier sessions are judged by it, too.
    tables: BTreeMap<String, Arc<ArcSwap<AccessPolicy>>>,
}

impl AccessPolicies {
    /// Adds to a change what these tables say: the policy of each, and none for tables that are not among them. If the
    /// users file of a table cannot be read, which is noted, its passwords stay as they are.
    pub fn change(
        &mut self,
        tables: &[(&str, &AccessConfig)],
        change: &mut RightsChange,
        startup: &mut StartupErrorCollector,
    ) {
        // Policies without a port and without a session.
        self.tables.retain(|_, policy| Arc::strong_count(policy) > 1);
        for (table, policy) in &self.tables {
            if !tables.iter().any(|(key, _)| key == table) {
                change.replace(policy, AccessPolicy::removed());
            }
        }
        for (table, access) in tables {
            let known = self.of(table);
            let old = known.load_full();
            let file = access.auth.as_ref();
            let logins = file.map(|PasswordFile { users, key }| self.logins(users, key, startup)).transpose();
            let (logins, is_removed) = match logins {
                Ok(logins) => (logins, false),
                Err(NotPrepared) => (old.logins.clone(), old.is_removed),
            };
            let AccessConfig { allow_from, rules, names, bounds, .. } = (*access).clone();
            let rights = Rights { rules, bounds, grants: old.rights.grants.clone() };
            let certificates = old.certificates.clone();
            let policy = AccessPolicy { allow_from, logins, names, rights, certificates, is_removed };
            change.replace(&known, policy);
        }
    }

    /// Returns the policy of the table with this key. It admits no one until a change with the table is in force.
    pub fn of(&mut self, table: &str) -> Arc<ArcSwap<AccessPolicy>> {
        let removed = ArcSwap::from_pointee(AccessPolicy::removed());
        self.tables.entry(table.to_owned()).or_insert_with(|| Arc::new(removed)).clone()
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
    ) -> Option<PageViewers> {
        let has_passwords = access.auth.is_some();
        if !has_passwords && tls.as_ref().is_none_or(|tls| tls.client_ca.is_none()) {
            return None;
        }
        let policy = self.of(table);
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
        Some(PageViewers { authenticate: Arc::new(user), has_passwords })
    }

    /// Reloads the users' files when they change.
    pub fn watch(&mut self, files: &FileWatcher) {
        for users in self.unwatched.drain(..) {
            files.watch("users", &users);
        }
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
