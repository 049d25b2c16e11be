//! Users whose devices have joined, the links of their programs, and calls of the same role that follow a script.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use http::HeaderMap;
use tonic::Code;
use tunnel::config::edge::{ServerAddress, ServerEntry};
use tunnel::config::{ProxyVariables, SecretString};
use tunnel::enrolment::store::SecretHash;
use tunnel::route::ResumeTimeouts;
use tunnel::uplink::client::{UserCredentials, UserLinkConfig, UserUplinks};
use tunnel_link::table::handles::Session;
use tunnel_net::reload::ReloadedValue;
use tunnel_net::tls::IdentityFiles;
use tunnel_proto::hello::{UserHello, UserProof};
use tunnel_proto::names::{Instance, UserDevice};

use super::call::Call;
use super::programs::{TestDir, TestServer};
use super::{assert_eventually, remote, wait_until};

/// The token of each of the test's devices.
pub(crate) const USER_TOKEN: &str = "a token of 32 letters and digits";

/// Writes the store with the devices that have joined, and returns the tables of a server that accepts their links.
/// `more` continues `[server.clients]` and may open further tables.
pub(crate) fn tables(place: &TestDir, more: &str) -> String {
    let hash = serde_json::to_string(&SecretHash::of(USER_TOKEN)).unwrap();
    let devices = ["alice/laptop", "alice/phone", "bob/laptop"].map(|device| format!("\"{device}\":{hash}"));
    let store =
        place.file("enrolled", &format!("{{\"invitations\":{{}},\"tokens\":{{{}}}}}", devices.join(",")));
    format!(
        "[server.invitations]\nstore = \"file\"\nfile = {store:?}\n[server.clients]\nrules = [{{ users = [\"alice\"], nodes = [\
         \"node*\"] }}]\n{more}\n"
    )
}

/// Starts a server that accepts the devices of [`tables`].
pub(crate) async fn server(place: &TestDir, more: &str) -> TestServer {
    let server = TestServer::with(place, &tables(place, more));
    server.server.enrolment.get().unwrap().refresh().await.unwrap();
    server
}

/// Returns what a device's program links with.
pub(crate) fn config(place: &TestDir, client: &str, servers: &[SocketAddr]) -> UserLinkConfig {
    let UserDevice { user, device } = client.parse().unwrap();
    let tokens = ReloadedValue::fixed(vec![SecretString::new(USER_TOKEN)]);
    UserLinkConfig {
        servers: servers.iter().map(|at| server_address(*at)).collect(),
        device,
        proof: UserCredentials::Token(user, tokens),
        ca: Some(place.files.ca.clone()),
        proxy: ProxyVariables::default(),
        resume_timeouts: ResumeTimeouts::default(),
    }
}

/// Returns the address of a server, whose certificate has it.
pub(crate) fn server_address(at: SocketAddr) -> ServerAddress {
    at.to_string().parse::<ServerEntry>().unwrap().address(None, &BTreeMap::new())
}

/// Links a device's program.
pub(crate) async fn link(place: &TestDir, client: &str, servers: &[SocketAddr]) -> UserUplinks {
    UserUplinks::connect(config(place, client, servers)).await.unwrap()
}

/// Opens a session. Returns the error text if it is refused.
pub(crate) async fn open(links: &UserUplinks, target: &str) -> Result<Session, String> {
    links.open(&target.parse().unwrap()).await.map_err(|error| error.to_string())
}

/// Opens a session once the server has read the grant for it.
pub(crate) async fn granted(links: &UserUplinks, target: &str) -> Session {
    let opened = async {
        loop {
            if let Ok(session) = open(links, target).await {
                return session;
            }
        }
    };
    assert_eventually("a session", opened).await
}

/// Polls until the session is reset, and returns the reason.
pub(crate) async fn reset(session: &mut Session) -> String {
    wait_until("the session has ended", || session.ended().is_some()).await;
    session.ended().unwrap().reason
}

/// Returns the hello of a user's laptop with that proof.
pub(crate) fn hello(proof: UserProof) -> UserHello {
    let (device, instance) = ("laptop".parse().unwrap(), Instance::from_bits(7));
    UserHello { proof, device, instance, is_backup: false }
}

/// Returns the proof by a token.
pub(crate) fn token(user: &str, token: &str) -> UserProof {
    UserProof::Token { user: user.parse().unwrap(), token: token.to_owned() }
}

/// Links with this metadata and certificate. Returns the code if the server refuses.
pub(crate) async fn attempt(
    place: &TestDir,
    server: &TestServer,
    shows: Option<&IdentityFiles>,
    headers: HeaderMap,
) -> Result<Call, Code> {
    let server = server.server.bound.grpc;
    let call = remote::link_as_peer(place, server, shows.cloned(), headers, "pod").await;
    call.map_err(|status| status.code())
}

/// Links as alice's laptop, with the test at that end.
pub(crate) async fn scripted(place: &TestDir, server: &TestServer) -> Call {
    attempt(place, server, None, hello(token("alice", USER_TOKEN)).request()).await.unwrap()
}
