//! What the process on this machine says of itself, at its admin listener: whether it runs, and its conditions.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use tokio::time::sleep;

use crate::command::admin_sockets;
use crate::command::doctor::{DoctorFindings, Finding, TIMEOUT};
use crate::config::Environment;
use crate::config::admin_listener::AdminConfig;
use crate::config::admin_ports::AdminPorts;
use crate::config::listen::ListenAddress;
use tunnel_base::silence::unless_silent;
use tunnel_net::dial::dial;
use tunnel_net::listen::TcpListenSocket;
use tunnel_proto::names::Host;

/// Where the program with a config responds: at the port that a key sets, unless it uses TLS. Otherwise at its socket,
/// as another program may have the default port. `None` if there is no socket.
pub(super) type AdminAddress = Option<ListenAddress>;

pub(super) async fn admin_address(ports: &AdminPorts, admin: &AdminConfig) -> AdminAddress {
    let at = ports.admin_listen;
    if !ports.is_default && admin.tls.is_none() {
        let local = SocketAddr::new([127, 0, 0, 1].into(), at.port());
        return Some(ListenAddress::Port(if at.ip().is_unspecified() { local } else { at }));
    }
    let env = Environment { runtime_dir: admin.runtime_dir.clone(), ..Environment::default() };
    let sockets = admin_sockets::sockets(admin.listen.clone(), &[admin.name], &env).await;
    sockets.into_iter().next().map(|(_, path)| ListenAddress::Unix(path))
}

/// Returns status and body of a page of the admin listener. Otherwise the reason why it cannot be reached; `None` if it
/// accepts the connection, and does not respond.
pub(super) async fn fetch_page(at: &AdminAddress, path: &str) -> Result<(u16, String), Option<String>> {
    let page = async {
        match at {
            None => Err("no admin socket at the default paths".to_owned()),
            Some(ListenAddress::Port(at)) => {
                let socket = dial(&Host::Ip(at.ip()), &[*at], TIMEOUT).await;
                let socket = socket.map_err(|cause| format!("{at}: {cause}"))?;
                let page = admin_sockets::exchange(socket, Method::GET, path, Bytes::new()).await;
                page.map_err(|cause| format!("{at}: {cause}"))
            }
            Some(ListenAddress::Unix(socket)) => {
                admin_sockets::ask(socket, Method::GET, path, "").await.map_err(|error| error.text)
            }
        }
    };
    unless_silent(TIMEOUT, page).await.ok_or(None)?.map_err(Some)
}

/// Checks that the program on this machine runs, and adds its conditions. Returns true if it is an edge that is linked.
pub(super) async fn check_running(
    program: &'static str,
    at: &AdminAddress,
    token_file: Option<&Path>,
    ports: &[(String, SocketAddr)],
    found: &mut DoctorFindings,
) -> bool {
    let is_edge = program == "edge";
    let health = fetch_page(at, if is_edge { "/edge/healthz" } else { "/readyz" }).await;
    let status = match health {
        Ok((status, _)) => status,
        Err(why) => {
            not_responding(program, at, why, ports, found);
            return false;
        }
    };
    let is_linked = is_edge && status == 200;
    if is_linked && let Some(file) = token_file {
        wait_until_tried(file).await;
    }
    let (ready, body) = fetch_page(at, "/readyz").await.unwrap_or_default();
    add_conditions(program, &body, found);
    // A link to a server that stops has only its earlier sessions.
    if is_linked && ready == 200 {
        found.add_ok("link", "the edge on this machine runs and is connected");
    } else if !is_edge && ready == 200 && body.trim() == "ok" {
        found.add_ok("server", "the server on this machine is ready");
    }
    is_linked
}

/// Records that the program on this machine hangs, or that none runs. Then it tries its `ports`, each with its key.
fn not_responding(
    program: &'static str,
    at: &AdminAddress,
    why: Option<String>,
    ports: &[(String, SocketAddr)],
    found: &mut DoctorFindings,
) {
    let unit = if program == "edge" { "tunnel-edge" } else { "tunnel-server" };
    let Some(why) = why else {
        let text = format!("the {program} on this machine runs, but did not respond within {TIMEOUT:?}");
        let hint = format!("check its state and its log, or restart it with systemctl restart {unit}");
        return found.add_error(program, text, "a response", &hint);
    };
    if matches!(at, Some(ListenAddress::Port(at)) if at.port() == 0) {
        found.add_warning(program, "its admin_listen has port 0, so it cannot be asked whether it runs", "");
    } else {
        let text = format!("no {program} on this machine responds: {why}");
        let hint = format!("start it with systemctl start {unit}; if it ends, see journalctl -u {unit}");
        found.add_error(program, text, &format!("a running {program}"), &hint);
    }
    for (key, at) in ports {
        // The units grant the right to ports below 1024.
        if let Err(error) = TcpListenSocket::bind(*at)
            && error.cause.kind() != ErrorKind::PermissionDenied
        {
            let hint = "end that program, or set another address";
            found.add_error("port", format!("{key}: {error}"), "an address that is free", hint);
        }
    }
}

/// Adds the conditions of a running program, which are the lines of its `/readyz`. Most of them are warnings.
fn add_conditions(program: &'static str, body: &str, found: &mut DoctorFindings) {
    for line in body.lines().filter(|line| *line != "ok") {
        match line.split(':').next() {
            Some("link") => {
                found.add_error(program, line, "", "see the check that fails below, or the log of the edge")
            }
            Some("draining") => found.add_error(program, line, "", "start it again once it has ended"),
            Some("node_name") => found.add_error("name", line, "", "give each machine its own name"),
            // The edge's text has the hint of its error.
            Some("token") => found.0.push(Finding::token(line, None)),
            Some("certificates") if line.contains(" expired on ") => {
                found.add_error("certificate dates", line, "files that are valid now", "")
            }
            _ => found.add_warning(program, line, ""),
        }
    }
}

/// Waits until a connected edge has tried the tokens of a file that has just changed. Only the edge can try them: for
/// the servers, this command is another process with the name of its node.
async fn wait_until_tried(file: &Path) {
    let changed = std::fs::metadata(file).and_then(|found| found.modified());
    let age = changed.map_or(TOKEN_TRIED_WITHIN, |at| at.elapsed().unwrap_or_default());
    sleep(TOKEN_TRIED_WITHIN.saturating_sub(age)).await;
}

/// Time in which an edge reads a changed token file and dials with it.
const TOKEN_TRIED_WITHIN: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_long_page_may_arrive_slowly() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = Some(ListenAddress::Port(listener.local_addr().unwrap()));
        let page = async {
            let mut socket = listener.accept().await.unwrap().0;
            let _ = socket.read(&mut [0; 1000]).await.unwrap();
            socket.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n").await.unwrap();
            for _ in 0..5 {
                sleep(TIMEOUT - Duration::from_secs(1)).await;
                socket.write_all(b"a").await.unwrap();
            }
        };
        let (fetched, ()) = tokio::join!(fetch_page(&at, "/nodes"), page);
        assert_eq!(fetched, Ok((200, "aaaaa".to_owned())));
    }

    #[test]
    fn doctor_fails_only_for_conditions_that_need_action_now() {
        let mut found = DoctorFindings::default();
        let key = "edge.uplink.ca (/etc/tunnel/certs/ca.crt)";
        let body = format!(
            "ok\ncertificates: {key} expires in 10 days, on 2026-12-06; replace the file\nfiles: token is empty\n"
        );
        add_conditions("edge", &body, &mut found);
        assert!(found.is_well() && found.0.len() == 2, "{found:?}");
        for (line, check) in [
            (format!("certificates: {key} expired on 2026-11-01; replace the file"), "certificate dates"),
            ("token: no link with the changed token".to_owned(), "token"),
            ("link: no server answers; reconnecting".to_owned(), "edge"),
            ("node_name: two machines".to_owned(), "name"),
        ] {
            let mut found = DoctorFindings::default();
            add_conditions("edge", &line, &mut found);
            assert!(!found.is_well() && found.0[0].check == check, "{found:?}");
        }
    }

    #[test]
    fn doctor_prints_findings_with_expectation_and_hint() {
        let mut found = DoctorFindings::default();
        found.add_ok("config", "fine");
        assert!(found.is_well());
        found.add_error("token", "invalid token", "the cloud's", "compare them");
        assert!(!found.is_well());
        let text = found.text();
        for part in
            ["ok   config", "FAIL token", "expected the cloud's", "hint compare them", "2 checks, 1 failed"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let json: serde_json::Value = serde_json::from_str(&found.json()).unwrap();
        assert_eq!((&json[1]["status"], &json[1]["check"]), (&"error".into(), &"token".into()));
        assert!(json[0].get("hint").is_none());
    }
}
