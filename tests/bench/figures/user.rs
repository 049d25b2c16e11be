//! One download over a user's link, against plain CONNECT next to it.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::Result;
use tunnel::enrolment::store::SecretHash;

use super::Bench;
use crate::load::Kind;
use crate::place::{Place, free_ports};
use crate::process::Process;
use crate::ssh::wait_for;
use crate::table::{Bound, Row, Table, median, short};
use crate::targets::Targets;
use crate::tunnel::{NODE, TOKEN, Tunnel};
use crate::way::{Address, Way, Ways};

/// The rounds of one route: MiB per second, CPU seconds per GiB.
type Rounds = BTreeMap<&'static str, (Vec<f64>, Vec<f64>)>;

impl Bench {
    /// Measures in turns, through the same server and edge: plain CONNECT; a link of `tunnel connect --listen`, and
    /// that of `tunnel proxy`; and for comparison CONNECT inside TLS by `tunnel connect --listen`, which is encrypted
    /// but ends with its line.
    pub(crate) fn user(&self, table: &mut Table) -> Result<()> {
        let Some(binary) = &self.binary else {
            eprintln!("user: skipped, measures only the program");
            return Ok(());
        };
        let dir = tempfile::tempdir_in(&self.dir)?.keep();
        let place = Place::loopback(&dir)?;
        let targets = Targets::start(None, place.edge_address)?;
        let tunnel = Tunnel::configure(&place, &targets, binary)?;
        let [tls] = free_ports()?;
        tunnel.server_has(&server_tables(&place, tls)?)?;
        let mut pair = tunnel.reachable()?;
        let user = User::prepare(&place, binary, tunnel.grpc)?;
        let mut routes = [
            ("plain CONNECT", pair.ways.clone(), None),
            user.connect("own link", &targets, &[])?,
            user.proxy("by the proxy", &targets)?,
            user.connect("CONNECT in TLS", &targets, &tls_flags(&place, tls))?,
        ];
        let mut rounds = Rounds::new();
        for _ in 0..self.rounds {
            for (name, ways, client) in &mut routes {
                pair.ways = ways.clone();
                // The cost of a download is the CPU time of all processes that it passes.
                pair.processes.extend(client.take());
                let (rate, cost) = self.one(&pair, Kind::Download, 1)?;
                *client = (pair.processes.len() > 2).then(|| pair.processes.pop()).flatten();
                let of = rounds.entry(*name).or_default();
                of.0.push(rate);
                of.1.push(cost);
            }
        }
        report(&rounds, table);
        Ok(())
    }
}

fn report(rounds: &Rounds, table: &mut Table) {
    for (name, (rates, costs)) in rounds {
        eprintln!("{name}: MiB/s {rates:.0?}, cpu-s/GiB {costs:.2?}");
    }
    let of = |name| rounds.get(name).cloned().unwrap_or_default();
    let (rate, cost) = (|name| median(of(name).0), |name| median(of(name).1));
    for name in ["own link", "by the proxy"] {
        table.add(Row {
            figure: format!("one download over a user's link ({name}), rate against plain CONNECT's"),
            tunnel: format!("{} MiB/s, {} s of CPU per GiB", short(rate(name)), short(cost(name))),
            reference: format!(
                "plain {} MiB/s, {} s",
                short(rate("plain CONNECT")),
                short(cost("plain CONNECT"))
            ),
            others: format!(
                "CONNECT in TLS {} MiB/s, {} s",
                short(rate("CONNECT in TLS")),
                short(cost("CONNECT in TLS"))
            ),
            value: rate(name) / rate("plain CONNECT"),
            bound: Some(Bound::Least(0.9, 1.0)),
        });
    }
}

/// Returns the tables of a server that accepts the user's link, and CONNECT inside TLS at that port. Writes its store.
fn server_tables(place: &Place, tls: u16) -> Result<String> {
    let (store, hash) = (place.file("enrolled"), serde_json::to_value(SecretHash::of(TOKEN))?);
    let text = serde_json::json!({ "invitations": {}, "tokens": { CLIENT: hash } });
    fs::write(&store, text.to_string())?;
    Ok(format!(
        "\n[server.invitations]\nstore = \"file\"\nfile = {store:?}\n[server.clients]\nrules = [{{ nodes = [\"{NODE}\"] }}]\n\
         [server.http_proxy]\nlisten = \"{}\"\ncert = {:?}\nkey = {:?}\n",
        SocketAddr::from((place.cloud_address, tls)),
        place.certificates.cert(),
        place.certificates.key(),
    ))
}

/// Returns the flags of `tunnel connect` for CONNECT inside TLS at that port.
fn tls_flags(place: &Place, port: u16) -> [String; 2] {
    [format!("--server=https://localhost:{port}"), format!("--ca={}", place.certificates.ca().display())]
}

/// A route with a name, and the process on the client's side that it leads through.
type Route = (&'static str, Ways, Option<Process>);

/// The machine of a user whose device has joined.
struct User<'a> {
    place: &'a Place,
    binary: &'a Path,
}

impl<'a> User<'a> {
    /// Writes `client.toml`.
    fn prepare(place: &'a Place, binary: &'a Path, server: SocketAddr) -> Result<Self> {
        fs::create_dir_all(place.file("home/tunnel"))?;
        let (file, ca) = (place.file("home/tunnel/client.toml"), place.certificates.ca());
        let (user, device) = CLIENT.split_once('/').unwrap_or_default();
        fs::write(
            &file,
            format!(
                "servers = [\"localhost:{}\"]\nca = {ca:?}\nuser = \"{user}\"\ndevice = \"{device}\"\ntoken = \"{TOKEN}\"\n",
                server.port()
            ),
        )?;
        fs::set_permissions(file, Permissions::from_mode(0o600))?;
        Ok(Self { place, binary })
    }

    /// Starts `tunnel connect --listen` to the source, with a link of its own unless `flags` name a port.
    fn connect(&self, name: &'static str, targets: &Targets, flags: &[String]) -> Result<Route> {
        let [port] = free_ports()?;
        let args =
            ["connect".to_owned(), format!("{NODE}:{}", targets.source.port()), format!("--listen={port}")];
        let client = self.start(name, &[&args, flags].concat())?;
        // It listens once it has a link.
        wait_for(port)?;
        Ok((name, Ways::each(targets.all(), |_| Way::local(port)), Some(client)))
    }

    /// Starts `tunnel proxy`.
    fn proxy(&self, name: &'static str, targets: &Targets) -> Result<Route> {
        let [http, socks5] = free_ports()?;
        let client =
            self.start(name, &["proxy".to_owned(), format!("--http={http}"), format!("--socks5={socks5}")])?;
        wait_for(http)?;
        let way = |target: SocketAddr| Way {
            address: Address::Tcp(([127, 0, 0, 1], http).into()),
            connect: Some(format!("{NODE}:{}", target.port())),
        };
        Ok((name, Ways::each(targets.all(), way), Some(client)))
    }

    /// Starts the program.
    fn start(&self, name: &str, args: &[String]) -> Result<Process> {
        let log = self.place.file(&format!("{}.log", name.replace(' ', "-")));
        let environment = [
            "env".to_owned(),
            format!("XDG_CONFIG_HOME={}", self.place.file("home").display()),
            self.binary.display().to_string(),
        ];
        Process::start(None, &[&environment, args].concat(), &log)
    }
}

/// The user and her device.
const CLIENT: &str = "alice/laptop";
