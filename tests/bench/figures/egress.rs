//! CONNECT inside mutual TLS, as kube-apiserver's egress selector does it, against a direct TLS connection.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;

use super::Bench;
use crate::figures::echoes::micros;
use crate::place::{Place, free_ports};
use crate::process::Process;
use crate::role::Role;
use crate::sessions::{OpenTls, Opened};
use crate::table::{Row, Table, median};
use crate::targets::Targets;
use crate::tunnel::{NODE, Tunnel};
use crate::way::{Address, Way};

impl Bench {
    /// Measures both with a full handshake, in which the client presents a certificate.
    pub(crate) fn egress(&self, table: &mut Table) -> Result<()> {
        let Some(binary) = &self.binary else {
            eprintln!("egress: skipped, measures only the program");
            return Ok(());
        };
        let dir = tempfile::tempdir_in(&self.dir)?.keep();
        let place = Place::loopback(&dir)?;
        let targets = Targets::start(None, place.edge_address)?;
        let tunnel = Tunnel::configure(&place, &targets, binary)?;
        let [port] = free_ports()?;
        let egress = SocketAddr::from((place.cloud_address, port));
        let files = &place.certificates;
        tunnel.server_has(&format!(
            "\n[server.egress]\nlisten = \"{egress}\"\ncert = {:?}\nkey = {:?}\nclient_ca = {:?}\nnames = [\"*\"]\n",
            files.cert(),
            files.key(),
            files.ca(),
        ))?;
        let _pair = tunnel.reachable()?;
        let mut far = Process::role(
            None,
            &Role::TlsEchoTarget { listen: place.edge_address, certificates: files.clone() },
        )?;
        let direct = Way::straight(far.read_output()?);
        let through =
            Way { address: Address::Tcp(egress), connect: Some(format!("{NODE}:{}", targets.echo.port())) };
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..self.rounds {
            for (way, times) in [&through, &direct].into_iter().zip(&mut times) {
                times.push(self.opened_tls(&place, way)?.echoes.p50());
            }
        }
        eprintln!("first byte, us: {times:.0?}, through egress first");
        let [through, direct] = times.map(median);
        table.add(Row {
            figure: "CONNECT inside mutual TLS to first echoed byte, p50, in direct TLS connections' time"
                .into(),
            tunnel: micros(through),
            reference: format!("direct {}", micros(direct)),
            others: String::new(),
            value: through / direct,
            bound: None,
        });
        Ok(())
    }

    fn opened_tls(&self, place: &Place, way: &Way) -> Result<Opened> {
        let time: Duration = self.time(2.0);
        let open = OpenTls { way: way.clone(), certificates: place.certificates.clone(), time };
        let opened: Opened = Process::role(None, &Role::OpenTls(open))?.read_output()?;
        anyhow::ensure!(opened.failed == 0, "{} failed, the last: {:?}", opened.failed, opened.why);
        Ok(opened)
    }
}
