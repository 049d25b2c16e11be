//! Access to listeners: builds their access policies from the settings.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use http::HeaderMap;
use http::header::{AUTHORIZATION, PROXY_AUTHORIZATION};
use tracing::info;

use crate::admin::page::{AdminUsers, UserFuture};
use crate::config::listen::{AccessConfig, AdminConfig, AuthConfig};
use crate::listener::admission::AccessPolicy;
use crate::listener::admission::basis::ClientIdentity;
use crate::listener::auth::{PasswordChecker, Users};
use crate::startup::{NotPrepared, Startup, StartupErrorKind};
use tunnel_base::policy::Networks;
use tunnel_base::policy::zone::Zone;
use tunnel_net::reload::{FileWatcher, Reload};
use tunnel_net::tls::verify::ClientCertificate;

/// Builds the access policies of listeners. A user file named by several tables is read once, and failed logins at any
/// of their ports count together.
#[derive(Debug, Default)]
pub struct AccessPolicyBuilder {
    files: BTreeMap<PathBuf, Result<UserFile, NotPrepared>>,
    policies: ListenerPolicies,
}

/// The reloadable access policies of listeners, each with the key of its table. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct ListenerPolicies(Vec<(String, Arc<ArcSwap<AccessPolicy>>)>);

/// Access to one port, with the lists and files that decide it.
#[derive(Debug, Clone)]
pub struct ListenerAccess {
    proxies: Networks,
    policy: Arc<ArcSwap<AccessPolicy>>,
}

/// A file of users, reloaded when it changes, and the checker that all ports with this file share.
#[derive(Debug)]
struct UserFile {
    users: Reload<Users>,
    logins: Arc<PasswordChecker>,
}

impl AccessPolicyBuilder {
    /// Reads what the port of the table with this key needs.
    pub fn prepare(
        &mut self,
        table: &str,
        access: &AccessConfig,
        startup: &mut Startup,
    ) -> Result<ListenerAccess, NotPrepared> {
        let logins = match &access.auth {
            AuthConfig::None => None,
            AuthConfig::Basic { users, key } => {
                let read = || UserFile::read(users, key, startup);
                let file = self.files.entry(users.clone()).or_insert_with(read);
                Some(file.as_ref().map_err(|missing| *missing)?.logins.clone())
            }
        };
        let AccessConfig { proxy_protocol, allow_from, rules, names, .. } = access.clone();
        let policy =
            Arc::new(ArcSwap::from_pointee(AccessPolicy { allow_from, logins, names, rules, zone: None }));
        self.policies.0.push((table.to_owned(), policy.clone()));
        Ok(ListenerAccess { proxies: proxy_protocol, policy })
    }

    /// Returns the people that may open the private pages of the admin listener from other machines: users with a
    /// password, and clients with an accepted certificate. `table` is the table of their settings.
    pub fn viewers(
        &mut self,
        table: &'static str,
        AdminConfig { tls, access, .. }: &AdminConfig,
        startup: &mut Startup,
    ) -> Result<AdminUsers, NotPrepared> {
        let has_passwords = access.auth != AuthConfig::None;
        if !has_passwords && tls.as_ref().is_none_or(|tls| tls.client_ca.is_none()) {
            return Ok(AdminUsers::default());
        }
        let policy = self.prepare(table, access, startup)?.policy(None);
        let user = move |certificate: Option<ClientCertificate>, head: HeaderMap, from| -> UserFuture {
            let policy = policy.load_full();
            // The policy reads the credentials for proxies; a browser sends the same ones to a server.
            let credentials =
                head.get(AUTHORIZATION).map(|credentials| (PROXY_AUTHORIZATION, credentials.clone()));
            let credentials = HeaderMap::from_iter(credentials);
            Box::pin(async move {
                if let Some(certificate) = certificate {
                    return ClientIdentity::Certificate(certificate).judge(&policy, table).ok()?.0;
                }
                Some(policy.authenticate(&credentials, from).await.ok()??.user)
            })
        };
        Ok(AdminUsers::new(has_passwords, user))
    }

    /// Reloads the users' files when they change.
    pub fn watch(self, files: &FileWatcher) -> ListenerPolicies {
        for file in self.files.values().flatten() {
            files.watch("users", &file.users);
        }
        self.policies
    }
}

impl ListenerPolicies {
    /// Updates each access policy from the settings of its table: `allow_from`, `names` and `rules`. If the table was
    /// removed the policy stays unchanged.
    pub fn apply(&self, settings: &[(&str, &AccessConfig)]) {
        for (table, policy) in &self.0 {
            let Some((_, access)) = settings.iter().find(|(key, _)| key == table) else { continue };
            let (old, AccessConfig { allow_from, names, rules, .. }) = (policy.load_full(), access);
            if (&old.allow_from, &old.names, &old.rules) != (allow_from, names, rules) {
                let (allow_from, names, rules) = (allow_from.clone(), names.clone(), rules.clone());
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

impl ListenerAccess {
    /// Returns the networks of load balancers in front of the port.
    pub fn proxies(&self) -> Networks {
        self.proxies.clone()
    }

    /// Returns the access policy of a listener, which follows the settings. `zone` is the zone in which nodes have a
    /// second name.
    pub fn policy(self, zone: Option<Arc<Zone>>) -> Arc<ArcSwap<AccessPolicy>> {
        let policy = AccessPolicy { zone, ..AccessPolicy::clone(&self.policy.load()) };
        self.policy.store(Arc::new(policy));
        self.policy
    }
}

impl UserFile {
    fn read(path: &Path, key: &str, startup: &mut Startup) -> Result<Self, NotPrepared> {
        let shown = path.display().to_string();
        let parse = move |text: &[u8]| {
            Users::parse(&String::from_utf8_lossy(text)).map_err(|cause| format!("{shown}: {cause}"))
        };
        let users = startup.collect(StartupErrorKind::Config, &[key], Reload::file(path, parse))?;
        let logins = Arc::new(PasswordChecker::new(users.clone()));
        Ok(Self { users, logins })
    }
}
