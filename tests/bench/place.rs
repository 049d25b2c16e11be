//! Where a measurement takes place: the two machines, be they loopback or namespaces, and their files.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context, Result};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

/// Two machines, one for clients and pod, one for edge and targets.
#[derive(Debug)]
pub(crate) struct Place {
    /// The pod's namespace, if it has one.
    pub(crate) cloud_space: Option<String>,
    /// The edge's namespace, if it has one.
    pub(crate) edge_space: Option<String>,
    /// Where the pod listens for everything.
    pub(crate) cloud_address: IpAddr,
    /// The edge's address as the pod's machine sees it.
    pub(crate) edge_address: IpAddr,
    /// Certificates that both ends of every proxy use.
    pub(crate) certificates: Certificates,
    /// Where configs and logs go.
    pub(crate) dir: PathBuf,
}

impl Place {
    /// Both machines are this one.
    pub(crate) fn loopback(dir: &Path) -> Result<Self> {
        let here = IpAddr::from(Ipv4Addr::LOCALHOST);
        Ok(Self {
            cloud_space: None,
            edge_space: None,
            cloud_address: here,
            edge_address: here,
            certificates: Certificates::make(dir)?,
            dir: dir.to_owned(),
        })
    }

    /// A file of this place.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

/// A certificate for `localhost` and its authority, as files.
#[derive(Debug)]
pub(crate) struct Certificates(PathBuf);

impl Certificates {
    /// Makes them afresh.
    pub(crate) fn make(dir: &Path) -> Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate()?;
        let ca = params.self_signed(&key)?;
        let issuer = Issuer::new(params, key);
        let key = KeyPair::generate()?;
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let leaf = CertificateParams::new(names)?.signed_by(&key, &issuer)?;
        let made = Self(dir.to_owned());
        fs::write(made.ca(), ca.pem())?;
        fs::write(made.cert(), leaf.pem())?;
        fs::write(made.key(), key.serialize_pem())?;
        Ok(made)
    }

    /// The authority, PEM.
    pub(crate) fn ca(&self) -> PathBuf {
        self.0.join("ca.crt")
    }

    /// The server's certificate, PEM.
    pub(crate) fn cert(&self) -> PathBuf {
        self.0.join("server.crt")
    }

    /// Its key, PEM.
    pub(crate) fn key(&self) -> PathBuf {
        self.0.join("server.key")
    }
}

/// Ports that were free just now, for programs that cannot say which one they got.
pub(crate) fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let held: Vec<TcpListener> =
        (0..N).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).collect::<io::Result<_>>()?;
    let ports: Vec<u16> =
        held.iter().map(|one| Ok(one.local_addr()?.port())).collect::<io::Result<Vec<u16>>>()?;
    ports.try_into().ok().context("as many ports as listeners")
}
