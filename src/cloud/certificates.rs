//! Reads what a client port behind TLS shows and asks for.

use tokio_rustls::rustls::{ClientConfig, ServerConfig};

use super::files;
use crate::config::cloud::{Certificates, Cloud, TargetIdentity};
use crate::net::pem;
use crate::net::reload::Reload;
use crate::net::tls::{ClientCertificates, ClientSettings, Identity, ServerSettings, Trust};
use crate::startup::{FaultKind, Startup};

/// The TLS of a port for HTTP/1; `None`: it has faults, which `startup` has noted.
pub(super) fn read(
    settings: &Cloud,
    certificates: &Certificates,
    startup: &mut Startup,
) -> Option<Reload<ServerConfig>> {
    let Certificates { cert, key, client_ca, .. } = certificates;
    let keys = ["cert", "key", "client_ca"].map(|file| certificates.key(file));
    let offer = files::offer(settings, startup);
    // Each file by itself, so that all faults are noted.
    let has_cert = startup.holds(&keys[0], cert, |text| pem::certs(cert, text));
    let has_key = startup.holds(&keys[1], key, |text| pem::key(key, text));
    let ca = client_ca.as_ref();
    let has_ca = ca.is_none_or(|ca| startup.holds(&keys[2], ca, |text| pem::certs(ca, text)));
    let (offer, _) = offer.filter(|_| has_cert && has_key && has_ca)?;
    let identity = Identity { cert: cert.clone(), key: key.clone() };
    let clients = ca.cloned().map_or(ClientCertificates::Anonymous, ClientCertificates::Required);
    let server = ServerSettings { identity, clients, offer, alpn: vec![b"http/1.1".to_vec()] };
    startup.keep(FaultKind::Config, &[&keys[0], &keys[1]], server.load())
}

/// The TLS that a port for HTTP/1 speaks with targets; `None`: it has faults, which `startup` has noted.
pub(super) fn for_targets(shown: &TargetIdentity, startup: &mut Startup) -> Option<Reload<ClientConfig>> {
    let TargetIdentity { cert, key, ca } = shown.clone();
    let keys = ["cert", "key", "ca"].map(|file| format!("mode.cloud.https.target_{file}"));
    let [has_cert, has_key] = [
        startup.holds(&keys[0], &cert, |text| pem::certs(&cert, text)),
        startup.holds(&keys[1], &key, |text| pem::key(&key, text)),
    ];
    let has_ca = ca.as_ref().is_none_or(|ca| startup.holds(&keys[2], ca, |text| pem::certs(ca, text)));
    if !(has_cert && has_key && has_ca) {
        return None;
    }
    let identity = Some(Identity { cert, key });
    let trust = ca.map_or(Trust::Anyone, Trust::Ca);
    let client = ClientSettings { trust, identity, alpn: vec![b"http/1.1".to_vec()] };
    startup.keep(FaultKind::Config, &[&keys[0]], client.load())
}
