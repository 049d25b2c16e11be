//! What of a kind the settings name in several tables: files with secrets, etcds, ports for clients.

use std::path::Path;

use super::{Cloud, Egress, EtcdSettings, HttpsMode, Invitations, Publish};
use crate::config::{Access, Auth};

impl Cloud {
    /// The files that hold secrets, each with its key.
    pub fn secrets(&self) -> Vec<(&str, &Path)> {
        let mut all = vec![
            ("mode.cloud.stream.server.key", self.server.key.as_path()),
            ("mode.cloud.stream.server.tokenfile", &self.server.tokenfile),
        ];
        let egress = self.egress.as_ref().map(Egress::access);
        let proxy = self.http_proxy.as_ref().map(|proxy| &proxy.access);
        for access in
            [&self.ssh.access, &self.https.access, &self.admin.access].into_iter().chain(egress).chain(proxy)
        {
            // What several tables take from one is one file.
            if let Auth::Basic { users, key } = &access.auth
                && !all.contains(&(key, users))
            {
                all.push((key, users));
            }
        }
        if let Some(Egress::Port { certificates, .. }) = &self.egress {
            all.push(("mode.cloud.egress.key", &certificates.key));
        }
        if let HttpsMode::Terminate(certificates, targets) = &self.https.mode
            && !self.https.ports.is_empty()
        {
            all.push(("mode.cloud.https.key", &certificates.key));
            all.extend(targets.iter().map(|shown| ("mode.cloud.https.target_key", shown.key.as_path())));
        }
        for (table, etcd) in self.etcds() {
            let (key, password) = if table == REGISTRY {
                ("mode.cloud.registry.etcd_key", "mode.cloud.registry.etcd_password_file")
            } else {
                ("mode.cloud.invitations.etcd_key", "mode.cloud.invitations.etcd_password_file")
            };
            all.extend(etcd.identity.iter().map(|(_, file)| (key, file.as_path())));
            all.extend(etcd.login.iter().map(|(_, file)| (password, file.as_path())));
        }
        if let Some(Invitations::File(file)) = &self.invitations {
            all.push(("mode.cloud.invitations.file", file));
        }
        all
    }

    /// Each etcd that is asked, with the table that names it.
    pub fn etcds(&self) -> impl Iterator<Item = (&'static str, &EtcdSettings)> {
        let publish = match &self.registry.publish {
            Publish::Etcd(etcd) => Some((REGISTRY, etcd)),
            _ => None,
        };
        let invitations = match &self.invitations {
            Some(Invitations::Etcd(etcd)) => Some(("mode.cloud.invitations", etcd)),
            _ => None,
        };
        publish.into_iter().chain(invitations)
    }

    /// The files of certificates that this pod shows, each with its key.
    pub fn certificates(&self) -> Vec<(&'static str, &Path)> {
        let mut all = vec![("mode.cloud.stream.server.cert", self.server.cert.as_path())];
        if let Some(Egress::Port { certificates, .. }) = &self.egress {
            all.push(("mode.cloud.egress.cert", &certificates.cert));
        }
        if let HttpsMode::Terminate(certificates, targets) = &self.https.mode
            && !self.https.ports.is_empty()
        {
            all.push(("mode.cloud.https.cert", &certificates.cert));
            all.extend(targets.iter().map(|shown| ("mode.cloud.https.target_cert", shown.cert.as_path())));
        }
        all
    }

    /// The files of authorities that it believes, each with its key.
    pub fn authorities(&self) -> Vec<(&'static str, &Path)> {
        let mut all = vec![("mode.cloud.stream.server.ca", self.server.ca.as_path())];
        if let Some(Egress::Port { certificates, .. }) = &self.egress {
            all.extend(certificates.client_ca.iter().map(|ca| ("mode.cloud.egress.client_ca", ca.as_path())));
        }
        if let HttpsMode::Terminate(certificates, targets) = &self.https.mode {
            all.extend(certificates.client_ca.iter().map(|ca| ("mode.cloud.https.client_ca", ca.as_path())));
            let ca = targets.iter().filter_map(|shown| shown.ca.as_ref());
            all.extend(ca.map(|ca| ("mode.cloud.https.target_ca", ca.as_path())));
        }
        all
    }

    /// Who may come in at each port for clients, by the key of its table.
    pub fn doors(&self) -> Vec<(&str, &Access)> {
        let tcp = self.tcp.iter().map(|port| (port.key.as_str(), &port.access));
        let egress = self.egress.iter().map(|egress| ("mode.cloud.egress", egress.access()));
        let caught = self.intercept.iter().map(|intercept| ("mode.cloud.intercept", &intercept.access));
        let proxy = self.http_proxy.iter().map(|proxy| ("mode.cloud.http_proxy", &proxy.access));
        let fixed = [
            ("mode.cloud.ssh", &self.ssh.access),
            ("mode.cloud.https", &self.https.access),
            ("mode.cloud.http", &self.http.access),
        ];
        fixed.into_iter().chain(egress).chain(caught).chain(proxy).chain(tcp).collect()
    }
}

/// The table of what is published.
const REGISTRY: &str = "mode.cloud.registry";
