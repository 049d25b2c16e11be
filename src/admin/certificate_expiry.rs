//! Expiry of certificates: served as metrics, and reported with the readiness starting 30 days before.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use tokio::time::timeout;
use tracing::warn;

use crate::admin::readiness::Readiness;
use tunnel_base::drain::Drain;
use tunnel_base::files;
use tunnel_base::logging::dropped_lines::audit_disk;
use tunnel_base::metrics::Metrics;
use tunnel_net::reload::FileWatcher;
use tunnel_net::tls::certificate::{NotAfter, date};

/// The files of certificates that the config names. Cheap to clone; clones share the list.
#[derive(Debug, Clone, Default)]
pub struct MonitoredCertificates(Arc<ArcSwap<Vec<CertificateFile>>>);

/// A file of certificates that the config names. It is read at intervals, to warn before they expire.
#[derive(Debug, Clone)]
pub(super) struct CertificateFile {
    /// Config key that names it.
    key: String,
    /// Path of the file.
    path: PathBuf,
    /// Whether it contains CAs. Of CAs the last expiry matters; of a certificate chain the first one does.
    authorities: bool,
}

impl MonitoredCertificates {
    /// Replaces the list: `shown` are the certificates that a program presents, and `believed` the CAs that it trusts,
    /// each with its config key. This is noticed within a minute.
    pub fn set(&self, shown: Vec<(String, PathBuf)>, believed: Vec<(String, PathBuf)>) {
        let file = |authorities| move |(key, path)| CertificateFile { key, path, authorities };
        let files = shown.into_iter().map(file(false)).chain(believed.into_iter().map(file(true))).collect();
        self.0.store(Arc::new(files));
    }
}

/// Reports files that cannot be reloaded, and the expiry of certificates, until draining starts. Checks the
/// certificates every minute and after each reload.
pub(super) async fn follow(
    certificates: MonitoredCertificates,
    watcher: FileWatcher,
    metrics: Metrics,
    readiness: Readiness,
    drain: Drain,
) {
    let mut changes = watcher.changes();
    loop {
        readiness.set_degraded(FILES_CONDITION, watcher.check());
        let mut soon = Vec::new();
        let files = certificates.0.load_full();
        // A reload may have removed a certificate, whose old date must not cause an alarm.
        metrics.certificates.retain(&files.iter().map(|file| file.key.as_str()).collect());
        for file in files.iter() {
            let Ok(pem) = tokio::fs::read(&file.path).await.and_then(files::decode) else { continue };
            let Some(ends) = NotAfter::of(&pem) else { continue };
            let end = if file.authorities { ends.last } else { ends.first };
            metrics.certificates.set(&file.key, end);
            soon.extend(warning(file, end, SystemTime::now()));
        }
        let lasting = if soon.is_empty() { Ok(()) } else { Err(soon.join("; ")) };
        // Each is logged once when it begins; the condition lasts.
        let report = |condition, state: Result<(), String>, message: &str| {
            if let Err(why) = &state
                && readiness.trouble(condition).is_none()
            {
                warn!(error = %why, "{message}");
            }
            readiness.set_degraded(condition, state);
        };
        report(CERTIFICATES_CONDITION, lasting, "certificates end soon");
        if let Some(room) = audit_disk() {
            report(AUDIT_CONDITION, room, "audit log is about to fill its disk");
        }
        // The watcher keeps the sender.
        if drain.run_until(timeout(INTERVAL, changes.changed())).await.is_none() {
            return;
        }
    }
}

pub(super) fn warning(file: &CertificateFile, end: u64, now: SystemTime) -> Option<String> {
    let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let expires = match end.checked_sub(now) {
        None => "expired".to_owned(),
        Some(left) if left < WARN_BEFORE_EXPIRY => format!("expires in {} days,", left / DAY),
        Some(_) => return None,
    };
    let key = &file.key;
    let path = file.path.display();
    let date = date(end);
    Some(format!("{key} ({path}) {expires} on {date}; replace the file, it is reloaded without a restart"))
}

/// Condition: changed files can be reloaded.
const FILES_CONDITION: &str = "files";
/// Condition: no certificate expires soon.
const CERTIFICATES_CONDITION: &str = "certificates";
/// Condition: the disk of the audit log has room.
const AUDIT_CONDITION: &str = "audit_log";
/// Time between two checks of the files: expiry dates are days away.
const INTERVAL: Duration = Duration::from_secs(60);
pub(super) const DAY: u64 = 24 * 3600;
/// Time before its expiry from which a certificate is reported, in seconds.
const WARN_BEFORE_EXPIRY: u64 = 30 * DAY;

#[cfg(test)]
mod tests {
    use tunnel_base::metrics::format::ExpositionFormat;
    use tunnel_net::pki::CertificateAuthority;

    use super::*;

    fn file(path: PathBuf, authorities: bool) -> CertificateFile {
        CertificateFile { key: "server.links.cert".to_owned(), path, authorities }
    }

    #[tokio::test]
    async fn expiry_within_30_days_is_reported_unless_another_ca_of_the_file_lasts() {
        let place = tempfile::tempdir().unwrap();
        let day = Duration::from_secs(DAY);
        let [short, long] =
            [29, 40].map(|days| CertificateAuthority::new("ours", days * day + day / 2).unwrap());
        let path = place.path().join("a.crt");
        let readiness = Readiness::waiting_for(&[]);
        for (text, authorities, expected) in [
            (short.cert().to_owned(), true, Some("expires in 29 days")),
            (format!("{}{}", short.cert(), long.cert()), true, None),
            (format!("{}{}", long.cert(), short.cert()), false, Some("expires in 29 days")),
            (long.cert().to_owned(), false, None),
        ] {
            std::fs::write(&path, text).unwrap();
            let (metrics, drain) = (Metrics::edge(), Drain::new());
            drain.start();
            let watcher = FileWatcher::new(&drain);
            let file = file(path.clone(), authorities);
            follow(
                MonitoredCertificates(Arc::new(ArcSwap::from_pointee(vec![file]))),
                watcher,
                metrics.clone(),
                readiness.clone(),
                drain,
            )
            .await;
            let report = readiness.check().unwrap();
            match expected {
                Some(expected) => assert!(report.contains(expected) && report.contains("a.crt"), "{report}"),
                None => assert_eq!(report, ""),
            }
            assert!(
                metrics
                    .encode(ExpositionFormat::Open)
                    .contains("tunnel_certificate_expiration_timestamp_seconds{key=\"server")
            );
        }
        let later = SystemTime::UNIX_EPOCH + Duration::from_secs(200);
        let over = warning(&file(path, false), 100, later).unwrap();
        assert!(over.contains("expired on"), "{over}");
    }
}
