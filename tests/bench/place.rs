//! The place of a measurement: the two machines, either loopback or namespaces, and their files.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tunnel_net::pki::CertificateAuthority;

/// Two machines: one for clients and server, one for edge and targets.
#[derive(Debug)]
pub(crate) struct Place {
    /// The server's namespace, if it has one.
    pub(crate) cloud_space: Option<String>,
    /// The edge's namespace, if it has one.
    pub(crate) edge_space: Option<String>,
    /// The address of all listeners of the server.
    pub(crate) cloud_address: IpAddr,
    /// The edge's address, as seen from the server's machine.
    pub(crate) edge_address: IpAddr,
    /// Certificates for both ends of every proxy.
    pub(crate) certificates: Certificates,
    /// Directory of configs and logs.
    pub(crate) dir: PathBuf,
}

impl Place {
    /// Creates a place in which both machines are this one.
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

    /// Returns the path of a file of this place.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

/// Files of a CA, a certificate for `localhost` and a client's certificate.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Certificates(PathBuf);

impl Certificates {
    /// Creates new files.
    pub(crate) fn make(dir: &Path) -> Result<Self> {
        let authority = CertificateAuthority::new("CA of a benchmark", VALID)?;
        let made = Self(dir.to_owned());
        fs::write(made.ca(), authority.cert())?;
        authority.server(&["localhost", "127.0.0.1"])?.write(&made.cert(), &made.key())?;
        authority.client("client of a benchmark")?.write(&made.client_cert(), &made.client_key())?;
        Ok(made)
    }

    /// The CA, in PEM.
    pub(crate) fn ca(&self) -> PathBuf {
        self.0.join("ca.crt")
    }

    /// The server's certificate, in PEM.
    pub(crate) fn cert(&self) -> PathBuf {
        self.0.join("server.crt")
    }

    /// The server's key, in PEM.
    pub(crate) fn key(&self) -> PathBuf {
        self.0.join("server.key")
    }

    /// The client's certificate, in PEM.
    pub(crate) fn client_cert(&self) -> PathBuf {
        self.0.join("client.crt")
    }

    /// The client's key, in PEM.
    pub(crate) fn client_key(&self) -> PathBuf {
        self.0.join("client.key")
    }
}

/// Returns ports that are currently free, for programs that cannot report their port.
pub(crate) fn free_ports<const N: usize>() -> Result<[u16; N]> {
    let first = FIXED.start + u16::try_from(std::process::id() % 100)? * 100;
    let free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    let ports: Vec<u16> = (first.max(*taken)..FIXED.end).chain(FIXED).filter(free).take(N).collect();
    *taken = ports.last().map_or(0, |port| port + 1);
    ports.try_into().ok().context("no free ports")
}

/// Longer than any benchmark.
const VALID: Duration = Duration::from_secs(24 * 3600);
/// Below the kernel's ephemeral ports. Otherwise an edge that dials a stopped server may get the server's own port, and
/// even connect to itself.
const FIXED: Range<u16> = 20_000..32_000;
/// The next port to try in this run: a free port may already be in the config of another figure.
static TAKEN: Mutex<u16> = Mutex::new(0);
