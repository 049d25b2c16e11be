//! Keeps one certificate file up to date: requests a certificate, waits until it is signed, and requests the next one
//! in time.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, OpenOptions};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::fs;
use tokio::time::sleep;
use tracing::{info, warn};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::cluster::Cluster;
use crate::csr::error::CsrError;
use crate::csr::profile::Profile;
use crate::csr::renewal::{RenewalStep, due, step};
use crate::csr::request::signed;
use crate::csr::server_name_sources::{ServerNameSources, canonical};
use tunnel_base::backoff::Backoff;
use tunnel_base::drain::Drain;
use tunnel_base::unix_time::now;
use tunnel_net::pki::CertificateRequest;
use tunnel_net::reload::reload_now;
use tunnel_net::tls::certificate::{NotAfter, alternative_names, date, name_text};
use tunnel_net::tls::pem;

/// A renewer of one certificate file: requests a new certificate from Kubernetes before the old one expires.
#[derive(Debug)]
pub struct CertificateRenewer {
    cluster: Cluster,
    /// What the certificate is for.
    pub profile: Profile,
    file: PathBuf,
    lifetime: Option<Duration>,
    names: CertificateNameSource,
    /// Random number from 0 to 1 that selects the time of the next renewal within its window.
    chance: f64,
    /// Names of the last request. A signer that leaves names out would otherwise be asked for them endlessly.
    last_requested: Option<BTreeSet<String>>,
}

/// The names and addresses in the certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CertificateNameSource {
    /// Fixed names.
    Fixed(BTreeSet<String>),
    /// Names and addresses of the listeners, looked up once a minute. A new name triggers a renewal.
    Of(ServerNameSources),
}

impl CertificateRenewer {
    /// Creates a renewer; sends no request. The file holds certificate and key. `lifetime` is requested from the
    /// signer, at least 600 s; `None` leaves it to the signer.
    pub fn new(
        cluster: Cluster,
        profile: Profile,
        file: PathBuf,
        names: CertificateNameSource,
        lifetime: Option<Duration>,
    ) -> Self {
        Self { cluster, profile, file, lifetime, names, chance: rand::random(), last_requested: None }
    }

    /// Completes once the file holds a valid certificate, immediately if it already does. Retries endlessly and logs
    /// the reasons.
    pub async fn first(&mut self) {
        let mut backoff = Backoff::new();
        while StoredCertificate::read(&self.file).await.is_none() {
            if let Err(cause) = self.renew_if_due().await {
                warn!(profile = self.profile.name(), error = %cause, "no certificate yet, startup waits for it");
                sleep(pause(&cause, &mut backoff)).await;
            }
        }
    }

    /// Keeps the certificate valid until draining starts. Calls `report` with the result of each check; it must not
    /// block.
    pub async fn keep(mut self, report: impl Fn(Result<(), String>), drain: Drain) {
        let work = async {
            let mut backoff = Backoff::new();
            loop {
                let delay = match self.renew_if_due().await {
                    Ok(delay) => {
                        backoff = Backoff::new();
                        report(Ok(()));
                        delay
                    }
                    Err(cause) => {
                        warn!(
                            profile = self.profile.name(), error = %cause,
                            "cannot renew certificate, keeping the old one"
                        );
                        report(Err(cause.to_string()));
                        pause(&cause, &mut backoff)
                    }
                };
                sleep(delay).await;
            }
        };
        drain.run_until(Box::pin(work)).await;
    }

    /// Requests a certificate if one is due. Returns the time to wait until the next check.
    async fn renew_if_due(&mut self) -> Result<Duration, CsrError> {
        let required = self.required_names().await;
        let held = StoredCertificate::read(&self.file).await.map(|held| {
            let due = due(held.received, held.until, self.chance);
            (held.names, due.duration_since(SystemTime::now()).ok())
        });
        let (names, fallback, delay, why) = match step(required, held, self.last_requested.as_ref())? {
            RenewalStep::Wait(delay) => return Ok(delay),
            RenewalStep::Issue { names, fallback, delay, why } => (names, fallback, delay, why),
        };
        info!(profile = self.profile.name(), reason = why, "certificate needed");
        // A name that the approver refuses must not let the certificate expire with all others.
        match (self.issue(names).await, fallback) {
            (Err(cause @ (CsrError::Denied { .. } | CsrError::Failed { .. })), Some(old)) => {
                warn!(profile = self.profile.name(), error = %cause, "requesting the old names instead");
                self.issue(old).await?;
            }
            (done, _) => done?,
        }
        Ok(delay)
    }

    async fn required_names(&self) -> Result<BTreeSet<String>, CsrError> {
        let reach = match &self.names {
            CertificateNameSource::Fixed(fixed) => return Ok(canonical(fixed.clone())),
            CertificateNameSource::Of(reach) => reach,
        };
        let (names, missing) = reach.look_up(&self.cluster).await?;
        missing.map_or(Ok(names), Err)
    }

    /// Generates a key, has a certificate signed for it, and writes both to the file.
    async fn issue(&mut self, required: BTreeSet<String>) -> Result<(), CsrError> {
        prepare(&self.file)?;
        let profile = self.profile;
        let names: Vec<&str> = required.iter().map(String::as_str).collect();
        let request = CertificateRequest::new(profile.common_name(), profile.organization(), &names)?;
        let (client, _) = self.cluster.connect().await?;
        let signed = signed(client, profile, self.lifetime, request.pem()).await?;
        self.store(request, &signed, required).await
    }

    /// Writes the signed certificate to the file, unless it has already expired. An expired one would be renewed
    /// endlessly, and the current one may last longer.
    async fn store(
        &mut self,
        request: CertificateRequest,
        signed: &str,
        required: BTreeSet<String>,
    ) -> Result<(), CsrError> {
        let issued = request.signed(signed)?;
        let file = self.file.clone();
        let now = now();
        if let Some(NotAfter { first, .. }) = NotAfter::of(signed.as_bytes()).filter(|ends| ends.first <= now)
        {
            return Err(CsrError::Expired { until: date(first), now: date(now) });
        }
        let written = tokio::task::spawn_blocking(move || issued.write_together(&file)).await;
        // The task fails only when the process ends.
        written.unwrap_or(Ok(()))?;
        self.last_requested = Some(required);
        info!(profile = self.profile.name(), file = %self.file.display(), "certificate issued");
        reload_now();
        Ok(())
    }
}

/// Returns the time to wait after a failure. It is long after a denial and with a wrong clock, because retrying cannot
/// help until an operator changes something.
fn pause(cause: &CsrError, backoff: &mut Backoff) -> Duration {
    match cause {
        CsrError::Denied { .. } | CsrError::Failed { .. } | CsrError::Expired { .. } => {
            AFTER_DENIAL.mul_f64(0.5 + rand::random::<f64>() / 2.0)
        }
        _ => backoff.pause(rand::random()),
    }
}

/// Creates the file's directory if it is missing and checks that it is writable. This happens before a certificate is
/// requested that could not be stored.
fn prepare(file: &Path) -> Result<(), CsrError> {
    let dir = file.parent().unwrap_or(file);
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir).and_then(|()| {
        let probe = dir.join(PROBE);
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&probe)?;
        std::fs::remove_file(probe)
    });
    made.map_err(|cause| CsrError::Directory { dir: dir.to_owned(), cause })
}

const PROBE: &str = ".may-write";

/// Delay after a denial, before jitter.
const AFTER_DENIAL: Duration = Duration::from_secs(300);

/// The properties of a stored certificate that a renewal depends on.
#[derive(Debug, PartialEq, Eq)]
struct StoredCertificate {
    /// Time of receipt: the file's modification time.
    received: SystemTime,
    /// End of validity.
    until: SystemTime,
    /// Alternative names and addresses.
    names: BTreeSet<String>,
}

impl StoredCertificate {
    /// Reads the file. Returns `None` if it holds no valid certificate with its key.
    async fn read(file: &Path) -> Option<Self> {
        let text = fs::read(file).await.ok()?;
        let modified = fs::metadata(file).await.ok()?.modified().ok()?;
        Self::of(&text, file, modified, SystemTime::now())
    }

    fn of(text: &[u8], file: &Path, modified: SystemTime, now: SystemTime) -> Option<Self> {
        pem::private_key(file, text).ok()?;
        let leaf = pem::certs(file, text).ok()?.into_iter().next()?;
        let (_, certificate) = X509Certificate::from_der(&leaf).ok()?;
        let seconds = u64::try_from(certificate.validity().not_after.timestamp()).ok()?;
        let until = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let names = alternative_names(&certificate).iter().filter_map(name_text).collect();
        // A clock that was set back must not delay the renewal.
        (now < until).then_some(Self { received: modified.min(now), until, names })
    }
}

#[cfg(test)]
mod tests {
    use tunnel_net::pki::CertificateRequest;

    use super::*;

    /// Otherwise a machine with a clock that is ahead would send a request every two seconds and store nothing.
    #[tokio::test]
    async fn an_expired_signed_certificate_is_not_stored_and_the_next_request_waits_minutes() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("agent.pem");
        let cluster = Cluster { kubeconfig: None, namespace: None };
        let names = CertificateNameSource::Fixed(BTreeSet::new());
        let mut renewer = CertificateRenewer::new(cluster, Profile::Edge, file.clone(), names, None);
        let signer = rcgen::KeyPair::generate().unwrap();
        let signer = rcgen::Issuer::new(rcgen::CertificateParams::default(), signer);
        let mut sign = async |end: i32| {
            let request = CertificateRequest::new("c", "o", &["node1"]).unwrap();
            let mut csr = rcgen::CertificateSigningRequestParams::from_pem(request.pem()).unwrap();
            csr.params.not_before = rcgen::date_time_ymd(2020, 1, 1);
            csr.params.not_after = rcgen::date_time_ymd(end, 1, 1);
            let signed = csr.signed_by(&signer).unwrap().pem();
            renewer.store(request, &signed, BTreeSet::new()).await
        };
        let over = sign(2021).await.unwrap_err();
        assert!(!file.exists() && over.to_string().contains("clock"), "{over}");
        assert!(pause(&over, &mut Backoff::new()) >= Duration::from_secs(120));
        sign(4000).await.unwrap();
        sign(2021).await.unwrap_err();
        assert!(
            StoredCertificate::read(&file).await.is_some(),
            "the certificate that is valid for longer must stay"
        );
    }

    #[test]
    fn the_directory_is_created_private_and_a_failure_has_a_remedy() {
        use std::os::unix::fs::PermissionsExt as _;
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("a/b/server.pem");
        prepare(&file).unwrap();
        let dir = file.parent().unwrap();
        assert_eq!(std::fs::metadata(dir).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0);
        std::fs::write(&file, "").unwrap();
        let why = prepare(&file.join("server.pem")).unwrap_err().to_string();
        assert!(why.contains("cannot write to") && why.contains("make it writable"), "{why}");
    }
}

#[cfg(test)]
mod stored_certificate_tests {
    use tunnel_net::pki::CertificateAuthority;

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    #[tokio::test]
    async fn a_certificate_with_its_key_is_held_until_it_expires() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("server.pem");
        assert_eq!(StoredCertificate::read(&file).await, None);
        let issued =
            CertificateAuthority::new("ours", DAY).unwrap().server(&["a.b", "10.0.0.1", "fd00::1"]).unwrap();
        std::fs::write(&file, issued.cert()).unwrap();
        assert_eq!(StoredCertificate::read(&file).await, None, "the file has no key");
        issued.write_together(&file).unwrap();
        let held = StoredCertificate::read(&file).await.unwrap();
        assert_eq!(held.names, ["10.0.0.1", "a.b", "fd00::1"].map(str::to_owned).into());
        let life = held.until.duration_since(held.received).unwrap();
        assert!(life.abs_diff(DAY) < Duration::from_secs(60), "{life:?}");

        let (text, now) = (std::fs::read(&file).unwrap(), SystemTime::now());
        assert_eq!(StoredCertificate::of(&text, &file, now, now + 2 * DAY), None);
        let ahead = StoredCertificate::of(&text, &file, now + DAY, now).unwrap();
        assert_eq!(ahead.received, now);
    }
}
