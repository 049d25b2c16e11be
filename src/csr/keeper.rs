//! Keeps one file issued: asks for a certificate, waits until it is signed, and asks for the next one in time.

mod held;
mod step;

use std::collections::BTreeSet;
use std::fs::{DirBuilder, OpenOptions};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::sleep;
use tracing::{info, warn};

use super::error::CsrError;
use super::reach::Found;
use super::request::signed;
use super::{Profile, Reach, names, renewal};
use crate::drain::Drain;
use crate::net::backoff::Backoff;
use crate::net::reload::look_now;
use crate::net::tls::{Ends, date};
use crate::pki;
use crate::registry::Cluster;
use held::Held;
use step::{Issue, Step, step};

/// Keeps the certificate of one profile.
#[derive(Debug)]
pub struct Keeper {
    cluster: Cluster,
    profile: Profile,
    file: PathBuf,
    lifetime: Option<Duration>,
    names: Names,
    /// From 0 to 1: when in its span the next one is asked for.
    chance: f64,
    /// What was asked for last: a signer that leaves names out would be asked without end.
    asked: Option<BTreeSet<String>>,
}

/// The names and addresses that stand in the certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Names {
    /// These.
    Fixed(BTreeSet<String>),
    /// Those by which the ports are reached, which are looked up once a minute; with a new one the certificate is asked for
    /// anew.
    Of(Reach),
}

impl Keeper {
    /// Asks nothing yet. The file holds certificate and key; `lifetime` is what the signer is asked for, at least 600 s,
    /// else it decides.
    pub fn new(
        cluster: Cluster,
        profile: Profile,
        file: PathBuf,
        names: Names,
        lifetime: Option<Duration>,
    ) -> Self {
        Self { cluster, profile, file, lifetime, names, chance: rand::random(), asked: None }
    }

    /// What it keeps.
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// Completes once the file holds a certificate that is valid: at once if it does already. It tries for ever, and tells
    /// in the log why it has to.
    pub async fn first(&mut self) {
        let mut backoff = Backoff::new();
        while Held::read(&self.file).await.is_none() {
            if let Err(cause) = self.look().await {
                warn!(
                    profile = self.profile.name(),
                    "no certificate yet, and nothing starts without it: {cause}"
                );
                sleep(pause(&cause, &mut backoff)).await;
            }
        }
    }

    /// Keeps the file issued until draining begins. `report` is told how it stands, and must be quick.
    pub async fn keep(mut self, report: impl Fn(Result<(), String>), drain: Drain) {
        let work = async {
            let mut backoff = Backoff::new();
            loop {
                let rest = match self.look().await {
                    Ok(rest) => {
                        backoff = Backoff::new();
                        report(Ok(()));
                        rest
                    }
                    Err(cause) => {
                        warn!(
                            profile = self.profile.name(),
                            "no new certificate, the old one stays: {cause}"
                        );
                        report(Err(cause.to_string()));
                        pause(&cause, &mut backoff)
                    }
                };
                sleep(rest).await;
            }
        };
        tokio::select! {
            () = drain.draining() => {}
            () = work => {}
        }
    }

    /// Asks for a certificate if it is time. How long to rest until the next look.
    async fn look(&mut self) -> Result<Duration, CsrError> {
        let wanted = self.wanted().await;
        let held = Held::read(&self.file).await.map(|held| {
            let due = renewal::due(held.received, held.until, self.chance);
            (held.names, due.duration_since(SystemTime::now()).ok())
        });
        let Issue { names, or, rest, why } = match step(wanted, held, self.asked.as_ref())? {
            Step::Rest(rest) => return Ok(rest),
            Step::Issue(issue) => issue,
        };
        info!(profile = self.profile.name(), "a certificate is wanted: {why}");
        match (self.issue(names).await, or) {
            (Err(cause @ (CsrError::Denied { .. } | CsrError::Failed { .. })), Some(old)) => {
                warn!(
                    profile = self.profile.name(),
                    "the names of the old one are asked for instead: {cause}"
                );
                self.issue(old).await?;
            }
            (done, _) => done?,
        }
        Ok(rest)
    }

    async fn wanted(&self) -> Result<BTreeSet<String>, CsrError> {
        let reach = match &self.names {
            Names::Fixed(fixed) => return Ok(names::canonical(fixed.clone())),
            Names::Of(reach) => reach,
        };
        let Found { names, missing } = reach.look_up(&self.cluster).await?;
        missing.map_or(Ok(names), |(name, namespace)| Err(CsrError::NoService(name, namespace)))
    }

    /// Makes a key, has a certificate for it signed, and puts both into the file.
    async fn issue(&mut self, wanted: BTreeSet<String>) -> Result<(), CsrError> {
        prepare(&self.file)?;
        let profile = self.profile;
        let names: Vec<&str> = wanted.iter().map(String::as_str).collect();
        let request = pki::Request::new(profile.common_name(), profile.organization(), &names)?;
        let (client, _) = self.cluster.connect().await?;
        let signed = signed(client, profile, self.lifetime, request.pem()).await?;
        self.take_up(request, &signed, wanted).await
    }

    /// Puts what was signed into the file, unless it is over: that would be asked for anew without end, and what there is may
    /// last longer.
    async fn take_up(
        &mut self,
        request: pki::Request,
        signed: &str,
        wanted: BTreeSet<String>,
    ) -> Result<(), CsrError> {
        let (issued, file) = (request.signed(signed)?, self.file.clone());
        let now = UNIX_EPOCH.elapsed().map_or(0, |now| now.as_secs());
        if let Some(Ends { first, .. }) = Ends::of(signed.as_bytes()).filter(|ends| ends.first <= now) {
            return Err(CsrError::Over { until: date(first), now: date(now) });
        }
        let written = tokio::task::spawn_blocking(move || issued.write_together(&file)).await;
        // The task only ends early with the process.
        written.unwrap_or(Ok(()))?;
        self.asked = Some(wanted);
        info!(profile = self.profile.name(), file = %self.file.display(), "a certificate was issued");
        look_now();
        Ok(())
    }
}

/// How long to wait after a failure. Who has denied a request will do so again until somebody has changed something, and a
/// clock stays wrong.
fn pause(cause: &CsrError, backoff: &mut Backoff) -> Duration {
    match cause {
        CsrError::Denied { .. } | CsrError::Failed { .. } | CsrError::Over { .. } => {
            AFTER_DENIAL.mul_f64(0.5 + rand::random::<f64>() / 2.0)
        }
        _ => backoff.pause(rand::random()),
    }
}

/// Makes the directory of a file if it is missing, and looks whether a file can be written beside it, before anybody signs
/// something that nobody could keep.
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

/// What is signed for no time at all is not asked for without a pause.
const AFTER_ISSUE: Duration = Duration::from_secs(2);
/// Between two looks at what should stand in the certificate.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// After a denial, with jitter.
const AFTER_DENIAL: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;

    /// Else a machine whose clock is ahead would ask every two seconds, and keep nothing.
    #[tokio::test]
    async fn what_is_over_when_it_is_signed_is_not_kept_and_the_next_is_asked_for_minutes_later() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("agent.pem");
        let cluster = Cluster { kubeconfig: None, namespace: None };
        let names = Names::Fixed(BTreeSet::new());
        let mut keeper = Keeper::new(cluster, Profile::Agent, file.clone(), names, None);
        let signer = rcgen::KeyPair::generate().unwrap();
        let signer = rcgen::Issuer::new(rcgen::CertificateParams::default(), signer);
        let mut sign = async |end: i32| {
            let request = pki::Request::new("c", "o", &["node1"]).unwrap();
            let mut asked = rcgen::CertificateSigningRequestParams::from_pem(request.pem()).unwrap();
            asked.params.not_before = rcgen::date_time_ymd(2020, 1, 1);
            asked.params.not_after = rcgen::date_time_ymd(end, 1, 1);
            let signed = asked.signed_by(&signer).unwrap().pem();
            keeper.take_up(request, &signed, BTreeSet::new()).await
        };
        let over = sign(2021).await.unwrap_err();
        assert!(!file.exists() && over.to_string().contains("clock"), "{over}");
        assert!(pause(&over, &mut Backoff::new()) >= Duration::from_secs(120));
        sign(4000).await.unwrap();
        sign(2021).await.unwrap_err();
        assert!(Held::read(&file).await.is_some(), "the one that lasts longer stays");
    }

    #[test]
    fn a_directory_is_made_for_its_owner_alone_and_one_that_cannot_be_is_told_with_a_remedy() {
        use std::os::unix::fs::PermissionsExt as _;
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("a/b/server.pem");
        prepare(&file).unwrap();
        let dir = file.parent().unwrap();
        assert_eq!(std::fs::metadata(dir).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0);
        std::fs::write(&file, "").unwrap();
        let why = prepare(&file.join("server.pem")).unwrap_err().to_string();
        assert!(why.contains("cannot write to") && why.contains("let this user write"), "{why}");
    }
}
