//! Asks the pods of a cloud, one after another, until one has answered.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use rand::seq::SliceRandom as _;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;

use super::{AUTHORITY, Join};
use crate::command::Failure;
use crate::command::folder::Folder;
use crate::config::Environment;
use crate::enrol::CloudAuthority;
use crate::names::{Host, Target};
use crate::net::dial::dial;
use crate::net::proxy::Proxy;
use crate::net::resolver::Resolver;
use crate::net::tls::{ClientSettings, Trust, server_name};
use crate::protocol::grpc::{Joining, PetitionError, Wish, petition};

/// What is asked, and of whom.
pub(super) struct Asking<'a> {
    asked: &'a Join,
    joining: Joining,
    /// In the cloud's certificate.
    name: ServerName<'static>,
    folder: &'a Folder,
    /// Where the pinned authority is written.
    pinned: PathBuf,
    proxy: Option<Proxy>,
    resolver: Resolver,
}

/// Why nobody has let us in.
pub(super) struct NotJoined {
    pub(super) failure: Failure,
    /// Whether it is certain that no pod has.
    pub(super) is_final: bool,
}

/// Why one pod has not.
enum Miss {
    /// It said no.
    Refused(String),
    /// It is another cloud, which was told nothing.
    Foreign(String),
    /// It did not answer, after the invitation was sent, or before.
    Unanswered { text: String, sent: bool },
    /// Something here is in the way.
    Here(Failure),
}

impl<'a> Asking<'a> {
    pub(super) fn new(
        asked: &'a Join,
        token: &str,
        folder: &'a Folder,
        env: &Environment,
    ) -> Result<Self, Failure> {
        let name = match asked.dns.as_ref().unwrap_or(&asked.cloud.host) {
            Host::Ip(ip) => ip.to_string(),
            Host::Name(name) => name.to_string(),
        };
        let proxy = env.https_proxy.as_ref().map(|url| {
            Proxy::new(url.reveal(), env.no_proxy.as_deref().unwrap_or_default())
                .map_err(|cause| Failure::unusable(format!("HTTPS_PROXY: {cause}")))
        });
        Ok(Self {
            asked,
            joining: Joining {
                secret: asked.code.secret(),
                node: asked.node.to_string(),
                token: token.to_owned(),
            },
            name: server_name(&name).map_err(|cause| Failure::usage(cause.to_string()))?,
            pinned: folder.unfinished().join(AUTHORITY),
            folder,
            proxy: proxy.transpose()?.flatten(),
            resolver: Resolver::system().map_err(|cause| Failure::unavailable(cause.to_string()))?,
        })
    }

    /// The authorities (PEM) by which the cloud is to be believed. Each address of it is asked several times.
    pub(super) async fn ask(&self) -> Result<String, NotJoined> {
        let (mut last, mut was_sent) = (String::new(), false);
        let mut pause = FIRST_PAUSE;
        for round in 0..ROUNDS {
            if round > 0 {
                sleep(pause).await;
                pause *= 2;
            }
            let mut may_mend = false;
            for at in self.addresses().await.map_err(|failure| NotJoined { failure, is_final: !was_sent })? {
                match self.ask_at(at).await {
                    Ok(authority) => return Ok(authority),
                    Err(Miss::Refused(text)) => {
                        return Err(NotJoined { failure: Failure::refused(text), is_final: true });
                    }
                    Err(Miss::Here(failure)) => return Err(NotJoined { failure, is_final: !was_sent }),
                    Err(Miss::Foreign(text)) => last = text,
                    Err(Miss::Unanswered { text, sent }) => {
                        (was_sent, may_mend) = (was_sent | sent, true);
                        last = text;
                    }
                }
            }
            if !may_mend {
                // All of it is another cloud's, which time does not mend.
                break;
            }
        }
        let hint =
            if was_sent { "; it may have been granted: say the same again, and it goes on" } else { "" };
        let text = format!("{}: {last}{hint}", self.asked.cloud);
        Err(NotJoined { failure: Failure::unavailable(text), is_final: !was_sent })
    }

    /// Asks one pod: first for its authority, of which the invitation has a hash; and only once that fits, and the pod has
    /// proved that it is its, with the invitation.
    async fn ask_at(&self, at: SocketAddr) -> Result<String, Miss> {
        let authority = self.asked.cloud.to_string();
        let anyone = self.encrypted(at, Trust::Anyone).await?;
        let shown = petition(anyone, &authority, Wish::Authority).await.map_err(|why| miss(why, false))?;
        // Of several it is believed by this one alone.
        let pin = self.asked.code.pin();
        let fits = |block: &&str| {
            let mut block = block.as_bytes();
            rustls_pemfile::certs(&mut block)
                .any(|der| der.is_ok_and(|der| CloudAuthority::pin_of(&der) == pin))
        };
        let pinned = shown.split_inclusive(END).find(fits);
        let pinned = pinned.ok_or_else(|| Miss::Foreign(format!("{at} {NOT_THE_CLOUD}")))?;
        self.folder.write_anew(AUTHORITY, pinned).map_err(Miss::Here)?;
        let proved = self.encrypted(at, Trust::Ca(self.pinned.clone())).await?;
        let wish = Wish::Join(self.joining.clone());
        petition(proved, &authority, wish).await.map_err(|why| miss(why, true))
    }

    async fn encrypted(&self, at: SocketAddr, trust: Trust) -> Result<TlsStream<TcpStream>, Miss> {
        let failed = |text: String| Miss::Unanswered { text, sent: false };
        let tls = ClientSettings { trust, identity: None, alpn: vec![b"h2".to_vec()] }.load();
        let tls = tls.map_err(|cause| failed(cause.to_string()))?;
        let socket = match self.proxy.as_ref().filter(|proxy| proxy.applies_to(&self.asked.cloud)) {
            Some(proxy) => {
                proxy.connect(&[at], &self.asked.cloud, PATIENCE).await.map_err(|e| failed(e.to_string()))
            }
            None => dial(&[at], PATIENCE).await.map_err(|e| failed(e.to_string())),
        };
        let shaken =
            timeout(PATIENCE, TlsConnector::from(tls.load()).connect(self.name.clone(), socket?)).await;
        let shaken = shaken.map_err(|_| failed(format!("{at} did not finish the TLS handshake")))?;
        shaken.map_err(|cause| failed(format!("TLS with {at} as {:?} failed: {cause}", self.name.to_str())))
    }

    /// Those of the cloud, or of the proxy on the way there.
    async fn addresses(&self) -> Result<Vec<SocketAddr>, Failure> {
        let proxy = self.proxy.as_ref().filter(|proxy| proxy.applies_to(&self.asked.cloud));
        let Target { host, port } = proxy.map_or(&self.asked.cloud, Proxy::at);
        let found = match host {
            Host::Ip(ip) => vec![*ip],
            Host::Name(name) => {
                self.resolver.lookup(name).await.map_err(|cause| Failure::unavailable(cause.to_string()))?
            }
        };
        let mut addresses: Vec<_> = found.into_iter().map(|ip| SocketAddr::new(ip, *port)).collect();
        addresses.shuffle(&mut rand::rng());
        Ok(addresses)
    }
}

fn miss(why: PetitionError, sent: bool) -> Miss {
    match why {
        PetitionError::Refused(text) => Miss::Refused(text),
        PetitionError::Unserved => Miss::Refused(why.to_string()),
        PetitionError::Unanswered(text) => Miss::Unanswered { text, sent },
    }
}

/// Said of a pod whose authority is another one.
const NOT_THE_CLOUD: &str = "is not the cloud that has made this invitation, or it has another authority by now: nothing \
                             was told to it; check the address, or ask for a new invitation";

/// The last line of each certificate.
const END: &str = "-----END CERTIFICATE-----";

/// How often each address is asked, and the first pause between; it doubles.
const ROUNDS: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// For each step on the way.
const PATIENCE: Duration = Duration::from_secs(10);
