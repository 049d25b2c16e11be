//! Users whose devices have joined; and their revocation, by the clock, at servers that share only the store.
#![expect(clippy::print_stdout, reason = "the times are worth reading")]

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::thread;

use serde_json::json;
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;
use tunnel::config::edge::ServerEntry;
use tunnel::config::{ProxyVariables, SecretString};
use tunnel::enrolment::store::SecretHash;
use tunnel::route::ResumeTimeouts;
use tunnel::uplink::client::{UserCredentials, UserLinkConfig, UserLinkError, UserUplinks};
use tunnel_link::table::handles::Session;
use tunnel_net::reload::ReloadedValue;
use tunnel_proto::names::{Target, UserDevice};

use crate::enrol::run_tunnel;
use crate::parts::{free_port, loopback};
use crate::process::TIMEOUT;
use crate::tunnel::{Edge, ServerProcess, TestDir};
use crate::wait::wait_until;

/// The token of each device.
pub(crate) const USER_TOKEN: &str = "a token of 32 letters and digits";

/// Writes the store with these devices (`USER/DEVICE`), and returns the tables of a server that accepts their links.
/// `clients` is the content of `[server.clients]`.
pub(crate) fn tables(
    place: &TestDir,
    devices: impl IntoIterator<Item: Into<String>>,
    clients: &str,
) -> String {
    let hash = serde_json::to_value(SecretHash::of(USER_TOKEN)).unwrap();
    let tokens: serde_json::Map<_, _> =
        devices.into_iter().map(|device| (device.into(), hash.clone())).collect();
    let store = place.path().join("enrolled");
    std::fs::write(&store, json!({ "invitations": {}, "tokens": tokens }).to_string()).unwrap();
    format!("[server.invitations]\nstore = \"file\"\nfile = {store:?}\n[server.clients]\n{clients}\n")
}

/// Returns what the program of a device links with, to the server with that port.
pub(crate) fn link_config(place: &TestDir, client: &str, port: u16) -> UserLinkConfig {
    let UserDevice { user, device } = client.parse().unwrap();
    UserLinkConfig {
        servers: vec![
            format!("localhost:{port}").parse::<ServerEntry>().unwrap().address(None, &BTreeMap::new()),
        ],
        device,
        proof: UserCredentials::Token(user, ReloadedValue::fixed(vec![SecretString::new(USER_TOKEN)])),
        ca: Some(place.files.ca.clone()),
        proxy: ProxyVariables::default(),
        resume_timeouts: ResumeTimeouts::default(),
    }
}

/// Writes `client.toml` of alice's laptop into a folder, for these servers (HOST:PORT).
pub(crate) fn write_client_file(place: &TestDir, dir: &Path, servers: &[&str]) {
    let ca = &place.files.ca;
    let text = format!(
        "servers = {servers:?}\nca = {ca:?}\nuser = \"alice\"\ndevice = \"laptop\"\ntoken = \"{USER_TOKEN}\"\n"
    );
    std::fs::create_dir_all(dir).unwrap();
    let file = dir.join("client.toml");
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(file, Permissions::from_mode(0o600)).unwrap();
}

/// Starts a target that accepts connections and keeps them. Returns its port.
pub(crate) fn holding_target() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || listener.incoming().map(Result::unwrap).collect::<Vec<_>>());
    port
}

/// The link of a device to one server, and a session over it to that server's node.
struct Device {
    name: String,
    links: UserUplinks,
    session: Session,
}

impl Device {
    fn link(
        place: &TestDir,
        runtime: &Runtime,
        client: &str,
        (number, port): (usize, u16),
        target: u16,
    ) -> Self {
        let target: Target = format!("node{number}:{target}").parse().unwrap();
        let (links, session) = runtime.block_on(async {
            let links = UserUplinks::connect(link_config(place, client, port)).await.unwrap();
            let session = links.open(&target).await.unwrap();
            (links, session)
        });
        Self { name: format!("{client} at server {number}"), links, session }
    }

    fn has_ended(&mut self) -> bool {
        self.session.ended().is_some() && self.links.links() == 0
    }

    fn is_alive(&mut self) -> bool {
        self.session.ended().is_none() && self.links.links() == 1
    }
}

/// Revokes, and prints when each of these devices has lost its link and its session.
fn revoke(args: &[&str], socket: &str, devices: &mut [Device]) {
    let begun = Instant::now();
    let output = run_tunnel(&[&["invitations", "revoke"], args, &[socket]].concat());
    assert!(output.status.success(), "{output:?}");
    println!("{args:?}: the command has returned after {:.2?}", begun.elapsed());
    for device in devices {
        wait_until(&format!("{} has lost everything", device.name), TIMEOUT, || device.has_ended());
        println!("{args:?}: {} has lost everything after {:.2?}", device.name, begun.elapsed());
        let why = device.session.ended().unwrap().reason;
        assert_eq!(why, "the access of user alice was revoked", "{}", device.name);
    }
}

/// Required are 10 s, which the printed times show. The test itself only ends a wait that is endless.
#[test]
fn a_revocation_ends_links_and_sessions_at_both_servers() {
    let place = TestDir::new();
    let devices = ["alice/laptop", "alice/phone", "bob/laptop"];
    let tables = tables(&place, devices, "rules = [{ nodes = [\"node*\"] }]");
    let socket = |number: usize| place.path().join(format!("server{number}.sock")).display().to_string();
    let mut servers = [0, 1].map(|number| {
        let more = format!("[server.admin]\nlisten = \"unix:{}\"\n{tables}", socket(number));
        let at = loopback(free_port());
        ServerProcess::launch(&place, (&format!("server{number}"), at), &more, &[], &[])
    });
    let mut edges = Vec::new();
    for (number, server) in servers.iter_mut().enumerate() {
        server.ready();
        let node = format!("node{number}");
        edges.push(Edge::start_as(&place, &node, &format!("localhost:{}", server.grpc)));
        server.wait_for_node(&node);
    }
    let (runtime, target) =
        (Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap(), holding_target());
    let at_both = |client: &str| {
        [0, 1].map(|number| Device::link(&place, &runtime, client, (number, servers[number].grpc), target))
    };
    let [mut laptop, mut phone, mut other] = devices.map(at_both);
    let socket = format!("--socket={}", socket(0));
    revoke(&["--user", "alice", "--device", "laptop"], &socket, &mut laptop);
    assert!(phone.iter_mut().chain(&mut other).all(Device::is_alive), "only one device was revoked");
    revoke(&["--user", "alice"], &socket, &mut phone);
    assert!(other.iter_mut().all(Device::is_alive), "another user has lost nothing");
    for server in &mut servers {
        let again = UserUplinks::connect(link_config(&place, "alice/phone", server.grpc));
        let again = runtime.block_on(again).unwrap_err();
        assert!(matches!(again, UserLinkError::Denied(_)), "{again}");
        for device in ["laptop", "phone"] {
            let user = format!("user=\"alice\" device={device}");
            server.process.wait_for_log_of(&user, "reason=\"the access of user alice was revoked\"");
        }
    }
}
