//! Whether this process is ready, and why not; when certificates end.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep};
use tracing::info_span;

use crate::admin::Admin;
use tunnel_base::drain::Drain;
use tunnel_base::metrics::Metrics;
use tunnel_net::reload;
use tunnel_net::tls::certificate::{NotAfter, date};

/// What this process waits for before it is ready, and whether it has it. Cheap to clone; clones share the truth.
#[derive(Debug, Clone)]
pub struct Readiness(Arc<Mutex<BTreeMap<&'static str, ConditionState>>>);

/// How one condition stands.
#[derive(Debug)]
enum ConditionState {
    Ready,
    /// Nobody should be sent here.
    NotReady(String),
    /// Something does not work, but nobody is served better elsewhere. Forgotten at that time, if one is given.
    Degraded(String, Option<Instant>),
}

impl ConditionState {
    fn trouble(&self) -> Option<&String> {
        match self {
            Self::Ready => None,
            Self::Degraded(_, Some(until)) if *until <= Instant::now() => None,
            Self::NotReady(why) | Self::Degraded(why, _) => Some(why),
        }
    }
}

impl Readiness {
    /// Not ready until each of these conditions has been set to `Ok`.
    pub fn waiting_for(conditions: &[&'static str]) -> Self {
        let all =
            conditions.iter().map(|name| (*name, ConditionState::NotReady("not yet".to_owned()))).collect();
        Self(Arc::new(Mutex::new(all)))
    }

    /// Sets the state of a condition; `/readyz` shows why it is not met.
    pub fn set(&self, condition: &'static str, state: Result<(), String>) {
        self.insert(condition, state.map_or_else(ConditionState::NotReady, |()| ConditionState::Ready));
    }

    /// Sets the state of something that this process can serve without: `/readyz` shows it, but it does not make the
    /// process unready.
    pub fn set_degraded(&self, what: &'static str, state: Result<(), String>) {
        self.insert(
            what,
            state.map_or_else(|why| ConditionState::Degraded(why, None), |()| ConditionState::Ready),
        );
    }

    /// As [`Self::note`], for something that is over unless it is noted again before `until`.
    pub fn note_until(&self, what: &'static str, why: String, until: Instant) {
        self.insert(what, ConditionState::Degraded(why, Some(until)));
    }

    /// Whether all is met. One line for each trouble.
    ///
    /// # Errors
    ///
    /// One line for each condition that is not met, and for each trouble.
    pub fn check(&self) -> Result<String, String> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = all.iter().filter_map(|(name, state)| Some(format!("{name}: {}\n", state.trouble()?)));
        let lines: String = lines.collect();
        if all.values().any(|state| matches!(state, ConditionState::NotReady(_))) {
            Err(lines)
        } else {
            Ok(lines)
        }
    }

    /// What troubles a condition, if anything does now.
    pub fn trouble(&self, condition: &str) -> Option<String> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(condition).and_then(ConditionState::trouble).cloned()
    }

    fn insert(&self, condition: &'static str, state: ConditionState) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(condition, state);
    }
}

// When certificates end: shown as metrics, and beside readiness from 30 days before.

/// A file of certificates.
#[derive(Debug, Clone)]
struct CertificateFile {
    /// The key that names it.
    key: &'static str,
    /// Where it is.
    path: PathBuf,
    /// Whether it holds authorities, of which the last that ends counts; of a chain it is the first.
    authorities: bool,
}

impl Admin {
    /// Follows the certificates that a program shows and the authorities that it believes, each with its key, until
    /// `drain` begins.
    pub fn follow_certificates(
        &self,
        shown: Vec<(&'static str, &Path)>,
        believed: Vec<(&'static str, &Path)>,
        drain: &Drain,
    ) {
        let file = |authorities| {
            move |(key, path): (&'static str, &Path)| CertificateFile {
                key,
                path: path.to_owned(),
                authorities,
            }
        };
        let files = shown.into_iter().map(file(false)).chain(believed.into_iter().map(file(true))).collect();
        let followed = follow(files, self.metrics.clone(), self.readiness.clone(), drain.clone());
        drain.spawn(info_span!("certificates"), followed);
    }
}

/// Looks at the files every minute, and when somebody asks for a look at all files, until draining begins. One that cannot
/// be read is told of by who uses it.
async fn follow(files: Vec<CertificateFile>, metrics: Metrics, readiness: Readiness, drain: Drain) {
    let mut asked = reload::asked();
    loop {
        let mut soon = Vec::new();
        for file in &files {
            let Ok(pem) = tokio::fs::read(&file.path).await else { continue };
            let Some(ends) = NotAfter::of(&pem) else { continue };
            let end = if file.authorities { ends.last } else { ends.first };
            metrics.certificates.set(file.key, end);
            soon.extend(warning(file, end, SystemTime::now()));
        }
        readiness.set_degraded(
            CERTIFICATES_CONDITION,
            if soon.is_empty() { Ok(()) } else { Err(soon.join("; ")) },
        );
        tokio::select! {
            biased;
            () = drain.draining() => return,
            // The sender is never dropped.
            _ = asked.changed() => sleep(SETTLED).await,
            () = sleep(INTERVAL) => {}
        }
    }
}

fn warning(file: &CertificateFile, end: u64, now: SystemTime) -> Option<String> {
    let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let what = format!("{} ({})", file.key, file.path.display());
    match end.checked_sub(now) {
        None => Some(format!(
            "{what} ended on {}: write a new one there, it is read without a restart",
            date(end)
        )),
        Some(left) if left < WARN_BEFORE_EXPIRY => {
            let days = left / DAY;
            Some(format!(
                "{what} ends in {days} days, on {}: write a new one there, it is read without a restart",
                date(end)
            ))
        }
        Some(_) => None,
    }
}

/// Its name beside readiness.
const CERTIFICATES_CONDITION: &str = "certificates";
/// How often the files are looked at: their dates are days away.
const INTERVAL: Duration = Duration::from_secs(60);
/// After which a file that is being written is whole.
const SETTLED: Duration = Duration::from_secs(2);
const DAY: u64 = 24 * 3600;
/// When a certificate should be issued anew.
const WARN_BEFORE_EXPIRY: u64 = 30 * DAY;

#[cfg(test)]
mod tests {
    use tunnel_base::metrics::ExpositionFormat;
    use tunnel_net::pki::CertificateAuthority;

    use super::*;

    fn file(path: PathBuf, authorities: bool) -> CertificateFile {
        CertificateFile { key: "mode.cloud.stream.server.cert", path, authorities }
    }

    #[tokio::test]
    async fn what_ends_within_30_days_is_told_and_of_authorities_one_that_lasts_is_enough() {
        let place = tempfile::tempdir().unwrap();
        let day = Duration::from_secs(DAY);
        let [short, long] =
            [29, 40].map(|days| CertificateAuthority::new("ours", days * day + day / 2).unwrap());
        let path = place.path().join("a.crt");
        let readiness = Readiness::waiting_for(&[]);
        for (text, authorities, says) in [
            (short.cert().to_owned(), true, Some("ends in 29 days")),
            (format!("{}{}", short.cert(), long.cert()), true, None),
            (format!("{}{}", long.cert(), short.cert()), false, Some("ends in 29 days")),
            (long.cert().to_owned(), false, None),
        ] {
            std::fs::write(&path, text).unwrap();
            let (metrics, drain) = (Metrics::edge(), Drain::new());
            drain.start();
            follow(vec![file(path.clone(), authorities)], metrics.clone(), readiness.clone(), drain).await;
            let told = readiness.check().unwrap();
            match says {
                Some(says) => assert!(told.contains(says) && told.contains("a.crt"), "{told}"),
                None => assert_eq!(told, ""),
            }
            assert!(
                metrics
                    .encode(ExpositionFormat::Open)
                    .contains("tunnel_certificate_not_after_seconds{key=\"mode.cloud")
            );
        }
        let later = SystemTime::UNIX_EPOCH + Duration::from_secs(200);
        let over = warning(&file(path, false), 100, later).unwrap();
        assert!(over.contains("ended on"), "{over}");
    }
}
