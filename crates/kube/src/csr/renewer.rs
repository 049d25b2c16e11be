//! Keeps one certificate file up to date: requests a certificate, waits until it is signed, and requests the next one
//! in time.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, OpenOptions};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client, ResourceExt as _};
use tokio::fs;
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

use crate::cluster::Cluster;
use crate::csr::names::{self, NameLookup, ResolvedNames};
use crate::csr::{CsrError, Profile, SIGNING_TIMEOUT, with_timeout};
use tunnel_base::backoff::Backoff;
use tunnel_base::drain::Drain;
use tunnel_net::pki::CertificateRequest;
use tunnel_net::reload::reload_now;
use tunnel_net::tls;
use tunnel_net::tls::certificate::{NotAfter, date};

/// A renewer of one certificate file: requests a new certificate from Kubernetes before the old one expires.
#[derive(Debug)]
pub struct CertificateRenewer {
    cluster: Cluster,
    profile: Profile,
    file: PathBuf,
    lifetime: Option<Duration>,
    names: CertificateNames,
    /// Random number from 0 to 1 that selects the time of the next renewal within its window.
    chance: f64,
    /// Names of the last request. A signer that leaves names out would otherwise be asked for them endlessly.
    last_requested: Option<BTreeSet<String>>,
}

/// The names and addresses in the certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CertificateNames {
    /// Fixed names.
    Fixed(BTreeSet<String>),
    /// Names and addresses of the listeners, looked up once a minute. A new name triggers a renewal.
    Of(NameLookup),
}

impl CertificateRenewer {
    /// Creates a renewer; sends no request. The file holds certificate and key. `lifetime` is requested from the
    /// signer, at least 600 s; `None` leaves it to the signer.
    pub fn new(
        cluster: Cluster,
        profile: Profile,
        file: PathBuf,
        names: CertificateNames,
        lifetime: Option<Duration>,
    ) -> Self {
        Self { cluster, profile, file, lifetime, names, chance: rand::random(), last_requested: None }
    }

    /// Returns the profile.
    pub fn profile(&self) -> Profile {
        self.profile
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
        tokio::select! {
            () = drain.draining() => {}
            () = work => {}
        }
    }

    /// Requests a certificate if one is due. Returns the time to wait until the next check.
    async fn renew_if_due(&mut self) -> Result<Duration, CsrError> {
        let required = self.required_names().await;
        let held = StoredCertificate::read(&self.file).await.map(|held| {
            let due = due(held.received, held.until, self.chance);
            (held.names, due.duration_since(SystemTime::now()).ok())
        });
        let Issue { names, fallback, delay, why } = match step(required, held, self.last_requested.as_ref())?
        {
            Step::Wait(delay) => return Ok(delay),
            Step::Issue(issue) => issue,
        };
        info!(profile = self.profile.name(), reason = why, "certificate needed");
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
            CertificateNames::Fixed(fixed) => return Ok(names::canonical(fixed.clone())),
            CertificateNames::Of(reach) => reach,
        };
        let ResolvedNames { names, missing } = reach.look_up(&self.cluster).await?;
        missing.map_or(Ok(names), |(name, namespace)| Err(CsrError::NoService(name, namespace)))
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
        let (issued, file) = (request.signed(signed)?, self.file.clone());
        let now = UNIX_EPOCH.elapsed().map_or(0, |now| now.as_secs());
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

/// Delay after a certificate was issued. It prevents a busy loop if the certificate expires immediately.
const AFTER_ISSUE: Duration = Duration::from_secs(2);
/// Time between two checks of the names that the certificate should have.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Delay after a denial, before jitter.
const AFTER_DENIAL: Duration = Duration::from_secs(300);

// The certificate that a file holds.

/// The properties of a stored certificate that a renewal depends on.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StoredCertificate {
    /// Time of receipt: the file's modification time.
    pub(crate) received: SystemTime,
    /// End of validity.
    pub(crate) until: SystemTime,
    /// Alternative names and addresses.
    pub(crate) names: BTreeSet<String>,
}

impl StoredCertificate {
    /// Reads the file. Returns `None` if it holds no valid certificate with its key.
    pub(crate) async fn read(file: &Path) -> Option<Self> {
        let text = fs::read(file).await.ok()?;
        let modified = fs::metadata(file).await.ok()?.modified().ok()?;
        Self::of(&text, file, modified, SystemTime::now())
    }

    fn of(text: &[u8], file: &Path, modified: SystemTime, now: SystemTime) -> Option<Self> {
        tls::private_key(file, text).ok()?;
        let leaf = tls::certs(file, text).ok()?.into_iter().next()?;
        let (_, certificate) = X509Certificate::from_der(&leaf).ok()?;
        let seconds = u64::try_from(certificate.validity().not_after.timestamp()).ok()?;
        let until = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let names = certificate.subject_alternative_name().ok().flatten();
        let names = names.iter().flat_map(|all| &all.value.general_names).filter_map(name).collect();
        // A clock that was set back must not delay the renewal.
        (now < until).then_some(Self { received: modified.min(now), until, names })
    }
}

fn name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match (<[u8; 4]>::try_from(*bytes), <[u8; 16]>::try_from(*bytes)) {
            (Ok(v4), _) => Some(Ipv4Addr::from(v4).to_string()),
            (_, Ok(v6)) => Some(Ipv6Addr::from(v6).to_string()),
            _ => None,
        },
        _ => None,
    }
}

// The decision of one check; it depends only on its arguments.

/// The next step of a [`CertificateRenewer`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Wait for this long.
    Wait(Duration),
    /// Request a certificate.
    Issue(Issue),
}

/// A certificate request that a [`CertificateRenewer`] should make.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Issue {
    /// Names to request.
    pub(crate) names: BTreeSet<String>,
    /// Names to request if those are denied: one forbidden name must not prevent the renewal of the existing
    /// certificate.
    pub(crate) fallback: Option<BTreeSet<String>>,
    /// Time to wait after it was issued.
    pub(crate) delay: Duration,
    /// Reason of the request, as a clause.
    pub(crate) why: &'static str,
}

/// Returns the next step. `required` are the names the certificate should have, and `last_requested` those of the last request.
/// `held` are the names of the current certificate and the time until its renewal (`None` if it is due).
///
/// # Errors
///
/// Fails if the wanted names are unknown and no certificate is due with the names of the current one.
pub(crate) fn step(
    required: Result<BTreeSet<String>, CsrError>,
    held: Option<(BTreeSet<String>, Option<Duration>)>,
    last_requested: Option<&BTreeSet<String>>,
) -> Result<Step, CsrError> {
    let (names, fallback, delay, why) = match (held, required) {
        (None, required) => (required?, None, AFTER_ISSUE, "no certificate"),
        (Some((held, Some(left))), required) => {
            let required = required?;
            if required.is_subset(&held) || last_requested == Some(&required) {
                return Ok(Step::Wait(left.min(CHECK_INTERVAL)));
            }
            // The pause bounds how often a party that can change a name causes a new certificate.
            (required, None, CHECK_INTERVAL, "new name or address")
        }
        (Some((held, None)), Ok(required)) => {
            let fallback = (held != required).then_some(held);
            (required, fallback, AFTER_ISSUE, "renewal is due")
        }
        (Some((held, None)), Err(_)) => (
            held,
            None,
            AFTER_ISSUE,
            "renewal is due; the names it should have are unknown, so its own are used",
        ),
    };
    Ok(Step::Issue(Issue { names, fallback, delay, why }))
}

// The time of a renewal; it depends only on its arguments.

/// Returns the time of the next renewal: after 70 to 90 % of the validity that remained on receipt, selected by
/// `chance` from 0 to 1. The spread keeps certificates issued together from being renewed together. Validity before the
/// receipt does not matter, because signers backdate certificates.
pub(crate) fn due(received: SystemTime, until: SystemTime, chance: f64) -> SystemTime {
    let left = until.duration_since(received).unwrap_or_default();
    // A chance outside of 0 to 1 is a bug of the caller; the middle is used.
    let chance = if (0.0..=1.0).contains(&chance) { chance } else { 0.5 };
    received + left.mul_f64(EARLIEST + (LATEST - EARLIEST) * chance)
}

const EARLIEST: f64 = 0.7;
const LATEST: f64 = 0.9;

// One request for a certificate, from its creation to its end.

/// The state of a submitted CertificateSigningRequest, from its status.
#[derive(Debug, PartialEq, Eq)]
enum RequestState {
    /// Neither signed nor rejected yet; with the state for the error text.
    Waits(&'static str),
    /// Signed: the certificates as PEM.
    Signed(String),
    /// Denied by an approver, for this reason.
    Denied(String),
    /// Rejected by the signer, for this reason.
    Failed(String),
}

/// Submits a request (PEM) and returns the certificates (PEM, leaf first) once they are signed.
///
/// # Errors
///
/// Fails if the request is denied, if its signer fails, or if it is not signed within 15 minutes.
///
/// # Cancel safety
///
/// Cancel safe: Kubernetes deletes abandoned requests.
pub(crate) async fn signed(
    client: Client,
    profile: Profile,
    lifetime: Option<Duration>,
    request: &str,
) -> Result<String, CsrError> {
    let api = Api::all(client);
    let seconds = lifetime.map(|lifetime| i32::try_from(lifetime.as_secs()).unwrap_or(i32::MAX));
    let object = CertificateSigningRequest {
        metadata: ObjectMeta {
            generate_name: Some(format!("tunnel-{}-", profile.name())),
            ..ObjectMeta::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(request.as_bytes().to_vec()),
            signer_name: profile.signer().to_owned(),
            usages: Some(profile.usages().map(str::to_owned).to_vec()),
            expiration_seconds: seconds,
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    };
    let made: CertificateSigningRequest = with_timeout(api.create(&PostParams::default(), &object)).await?;
    let (name, until) = (made.name_any(), Instant::now() + SIGNING_TIMEOUT);
    info!(csr = name, profile = profile.name(), "certificate requested");
    let (mut delay, mut known) = (INITIAL_POLL_DELAY, "not approved");
    loop {
        sleep(delay).await;
        delay = (2 * delay).min(MAX_POLL_DELAY);
        match with_timeout(api.get(&name)).await.map(|csr| state(&csr)) {
            Ok(RequestState::Signed(certificate)) => return Ok(certificate),
            Ok(RequestState::Denied(why)) => return Err(CsrError::Denied { name, why }),
            Ok(RequestState::Failed(why)) => return Err(CsrError::Failed { name, why }),
            Ok(RequestState::Waits(state)) => known = state,
            Err(cause @ (CsrError::ChangedOrDeleted | CsrError::Forbidden(_))) => return Err(cause),
            Err(cause) => debug!(csr = name, error = %cause, "cannot poll request, retrying"),
        }
        if Instant::now() >= until {
            return Err(CsrError::Unsigned { name, state: known, signer: profile.signer() });
        }
    }
}

fn state(csr: &CertificateSigningRequest) -> RequestState {
    let status = csr.status.as_ref();
    if let Some(certificate) = status.and_then(|status| status.certificate.as_ref()) {
        return RequestState::Signed(String::from_utf8_lossy(&certificate.0).into_owned());
    }
    let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let message_of = |kind: &str| {
        let found = conditions.iter().find(|condition| condition.type_ == kind)?;
        Some(found.message.clone().or_else(|| found.reason.clone()).unwrap_or_default())
    };
    match (message_of("Denied"), message_of("Failed"), message_of("Approved")) {
        (Some(why), ..) => RequestState::Denied(why),
        (_, Some(why), _) => RequestState::Failed(why),
        (.., Some(_)) => RequestState::Waits("approved but not signed"),
        _ => RequestState::Waits("not approved"),
    }
}

/// Delay between two polls of a request.
const INITIAL_POLL_DELAY: Duration = Duration::from_millis(200);
const MAX_POLL_DELAY: Duration = Duration::from_secs(5);

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
        let names = CertificateNames::Fixed(BTreeSet::new());
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

#[cfg(test)]
mod step_tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn unknown() -> CsrError {
        CsrError::NoService("s".to_owned(), "n".to_owned())
    }

    const LEFT: Option<Duration> = Some(Duration::from_secs(5));

    fn issue(step: Result<Step, CsrError>) -> (BTreeSet<String>, Option<BTreeSet<String>>, Duration) {
        match step.unwrap() {
            Step::Issue(Issue { names, fallback, delay, .. }) => (names, fallback, delay),
            other @ Step::Wait(_) => panic!("{other:?}"),
        }
    }

    #[test]
    fn new_names_are_requested_at_most_once_a_minute() {
        let (old, new) = (set(&["a", "b"]), set(&["a", "c"]));
        let held = || Some((old.clone(), LEFT));
        assert_eq!(step(Ok(set(&["a"])), held(), None).unwrap(), Step::Wait(Duration::from_secs(5)));
        let (names, fallback, delay) = issue(step(Ok(new.clone()), held(), None));
        assert_eq!((names, fallback), (new.clone(), None));
        assert!(delay >= Duration::from_secs(60), "{delay:?}");
        // A name that the signer leaves out is not requested again.
        assert_eq!(step(Ok(new.clone()), held(), Some(&new)).unwrap(), Step::Wait(Duration::from_secs(5)));
    }

    #[test]
    fn a_due_certificate_is_renewed_even_with_unknown_or_denied_names() {
        let (old, new) = (set(&["a", "b"]), set(&["a", "c"]));
        let due = || Some((old.clone(), None));
        assert_eq!(issue(step(Err(unknown()), due(), None)).0, old);
        let (names, fallback, _) = issue(step(Ok(new.clone()), due(), None));
        assert_eq!(
            (names, fallback),
            (new.clone(), Some(old.clone())),
            "the old names are requested if the new ones are denied"
        );
        assert_eq!(issue(step(Ok(old.clone()), due(), None)).1, None);
        // An error is returned if there is no certificate, or if it is not due yet.
        assert!(step(Err(unknown()), Some((old.clone(), LEFT)), None).is_err());
        assert!(step(Err(unknown()), None, None).is_err());
        assert_eq!(issue(step(Ok(new.clone()), None, None)).0, new);
    }
}

#[cfg(test)]
mod due_tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn renewal_is_due_at_70_to_90_percent_of_the_remaining_lifetime(
            begin in 0_u64..4_000_000_000, life in 0_u64..1_000_000_000, chance in 0.0_f64..=1.0,
        ) {
            let received = SystemTime::UNIX_EPOCH + Duration::from_secs(begin);
            let life = Duration::from_secs(life);
            let after = due(received, received + life, chance).duration_since(received).unwrap();
            prop_assert!(after >= life.mul_f64(0.699_999) && after <= life.mul_f64(0.900_001), "{after:?} of {life:?}");
        }
    }

    #[test]
    fn an_expired_certificate_is_due_at_once_and_an_invalid_chance_is_the_mean() {
        let now = SystemTime::now();
        assert_eq!(due(now, now - Duration::from_secs(9), 0.5), now);
        let (end, hundred) = (now + Duration::from_secs(100), Duration::from_secs(100));
        for odd in [7.0, -1.0, f64::NAN] {
            assert_eq!(due(now, end, odd), now + hundred.mul_f64(0.8), "{odd}");
        }
    }
}

#[cfg(test)]
mod request_tests {
    use serde_json::json;

    use super::*;

    fn state_of(status: &serde_json::Value) -> RequestState {
        let csr = json!({
            "metadata": {"name": "c"}, "spec": {"request": "", "signerName": "s"}, "status": status,
        });
        state(&serde_json::from_value(csr).unwrap())
    }

    #[test]
    fn a_request_waits_until_it_is_signed_denied_or_failed() {
        let conditions = |kinds: &[&str]| {
            let condition = |kind: &&str| json!({"type": kind, "status": "True", "reason": "r", "message": format!("it is {kind}")});
            json!({"conditions": kinds.iter().map(condition).collect::<Vec<_>>()})
        };
        assert_eq!(state_of(&json!({})), RequestState::Waits("not approved"));
        assert_eq!(state_of(&conditions(&["Approved"])), RequestState::Waits("approved but not signed"));
        assert_eq!(state_of(&conditions(&["Denied"])), RequestState::Denied("it is Denied".to_owned()));
        assert_eq!(
            state_of(&conditions(&["Approved", "Failed"])),
            RequestState::Failed("it is Failed".to_owned())
        );
        // base64 of "pem"
        assert_eq!(state_of(&json!({"certificate": "cGVt"})), RequestState::Signed("pem".to_owned()));
    }
}
