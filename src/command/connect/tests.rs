use std::net::Ipv4Addr;
use std::os::unix::fs::fchown;

use clap::Parser as _;
use tokio::net::TcpSocket;

use crate::command::CommandResult;
use crate::command::connect::port::ConnectPortClient;

use super::*;

#[derive(Debug, clap::Parser)]
struct Line {
    #[command(flatten)]
    connect: ConnectArgs,
}

fn connect_args(args: &[&str]) -> ConnectArgs {
    Line::try_parse_from([&["connect"], args].concat()).unwrap().connect
}

#[test]
fn connect_takes_a_target_as_one_argument_or_as_host_and_port() {
    for (args, expected) in [
        (&["node1:22"][..], "node1:22"),
        (&["node1", "22"], "node1:22"),
        (&["fd00::1", "22"], "[fd00::1]:22"),
        (&["[fd00::1]", "22"], "[fd00::1]:22"),
        (&["[fd00::1]:22"], "[fd00::1]:22"),
    ] {
        assert_eq!(target(&connect_args(args)).unwrap().to_string(), expected, "{args:?}");
    }
    for (args, expected) in [
        (&["node1"][..], "\"node1\" has no port; expected host:port"),
        (&["node1:x"], "\"node1:x\" has no port; expected host:port"),
        (&["node1", "0"], "\"0\" is not a port; expected 1 to 65535"),
    ] {
        let failed = target(&connect_args(args)).unwrap_err();
        assert!(failed.code == 64 && failed.text.starts_with(expected), "{failed}");
    }
}

#[test]
fn connect_listens_on_loopback_unless_an_address_is_given() {
    let at = |listen| connect_args(&["n:1", "--listen", listen]).listen.unwrap().to_string();
    assert_eq!(at("8022"), "127.0.0.1:8022");
    assert_eq!(at("[::1]:8022"), "[::1]:8022");
    let error = Line::try_parse_from(["connect", "n:1", "--listen=localhost:8022"]).unwrap_err().to_string();
    assert!(error.contains("--listen") && error.contains("expected IP:PORT"), "{error}");
}

fn endpoint(args: &[&str]) -> CommandResult<ConnectPortClient> {
    ConnectPortClient::new(&ClientSettings::find(&connect_args(args).client, |_| None)?)
}

#[test]
fn wrong_server_settings_of_connect_are_reported_with_a_remedy() {
    for (args, part) in [
        (
            &["n:1", "--server=ftp://cloud:2222"][..],
            "--server \"ftp://cloud:2222\": unsupported URL; expected HOST:PORT",
        ),
        (&["n:1", "--server=cloud"], "invalid host and port"),
        (&["n:1", "--server=unix:a"], "begin with /"),
        (&["n:1", "--server=ops:secret@cloud:8000"], "--password-file"),
        (&["n:1", "--user=ops"], "--user \"ops\": a user requires --password-file"),
        (&["n:1", "--user=o:secret", "--password-file=/x"], "--user: contains :"),
        (&["n:1", "--password-file=/x"], "requires a user"),
        (&["n:1", "--user=ops", "--password-file=/nowhere"], "cannot read /nowhere"),
        (&["n:1", "--ca=/x"], "use https://"),
        (&["n:1", "--server=https://cloud:8000", "--ca=/nowhere"], "/nowhere"),
    ] {
        let failed = endpoint(args).err().unwrap();
        assert!(failed.text.contains(part) && !failed.text.contains("secret"), "{args:?}: {failed}");
    }
    for (args, expected) in [
        (&["n:1"][..], "127.0.0.1:2222"),
        (&["n:1", "--server=cloud:22"], "cloud:22"),
        (&["n:1", "--server=http://[fd00::5]:22/"], "[fd00::5]:22"),
        (&["n:1", "--server=unix:/run/a@b.sock"], "/run/a@b.sock"),
    ] {
        assert_eq!(endpoint(args).ok().unwrap().to_string(), expected);
    }
    assert!(Line::try_parse_from(["connect", "n:1", "--cert=/c"]).is_err(), "a certificate requires its key");
}

#[test]
fn a_ca_from_the_environment_does_not_require_tls() {
    let variable = |name: &str| (name == "TUNNEL_CA").then(|| "/nowhere".to_owned());
    let settings = ClientSettings::find(&connect_args(&["n:1"]).client, variable).unwrap();
    assert!(ConnectPortClient::new(&settings).is_ok());
}

#[tokio::test]
async fn a_password_crosses_a_network_only_over_tls_or_with_insecure() {
    let dir = tempfile::tempdir().unwrap();
    let file = format!("--password-file={}", dir.path().join("pw").display());
    std::fs::write(dir.path().join("pw"), "secret").unwrap();
    let opened = async |server: &str, more: &[&str]| {
        let login = ["n:1", "--user=ops", &file, &format!("--server={server}")];
        let server = endpoint(&[&login, more].concat()).ok().unwrap();
        server.check_password_path().await
    };
    for refused in
        ["192.0.2.1:2222", "http://192.0.2.1:2222", "http://[2001:db8::1]:2222", "[::ffff:192.0.2.1]:1"]
    {
        let error = opened(refused, &[]).await.unwrap_err();
        assert_eq!(error.code, 64);
        assert!(error.text.contains("unencrypted") && error.text.contains("https://"), "{error}");
        assert_eq!(opened(refused, &["--insecure"]).await, Ok(()));
    }
    for local in ["127.0.0.1:1", "http://[::1]:1", "[::ffff:127.0.0.1]:1", "localhost:1", "unix:/a"] {
        assert_eq!(opened(local, &[]).await, Ok(()), "{local}");
    }
    let without = endpoint(&["n:1", "--server=192.0.2.1:1"]).ok().unwrap();
    assert_eq!(without.check_password_path().await, Ok(()), "no password is sent");
}

#[tokio::test]
async fn a_port_on_loopback_serves_only_processes_of_its_user() {
    let (print, mut printed) = tokio::sync::mpsc::channel(9);
    let opener = SessionOpener::Port(endpoint(&["n:1", "--server=127.0.0.1:1"]).unwrap());
    let print_line = move |line: &str| print.try_send(line.to_owned()).unwrap();
    let at = (Ipv4Addr::LOCALHOST, 0).into();
    let serving = listen(at, Arc::new(opener), "n:1".parse().unwrap(), std::future::pending(), print_line);
    let clients = async {
        let at: SocketAddr = printed.recv().await.unwrap().split(' ').next().unwrap().parse().unwrap();
        let mut shown = Vec::new();
        for user in [65534, rustix::process::geteuid().as_raw()] {
            let client = TcpSocket::new_v4().unwrap();
            // Only root can give a socket to another user.
            if fchown(&client, Some(user), None).is_ok() {
                let _client = client.connect(at).await.unwrap();
                shown.push(printed.recv().await.unwrap());
            }
        }
        shown
    };
    let shown = tokio::select! {
        _ = serving => unreachable!(),
        shown = clients => shown,
    };
    assert!(shown[shown.len() - 1].contains("cannot connect to 127.0.0.1:1"), "{shown:?}");
    assert!(shown.len() == 1 || shown[0].contains("another user's process"), "{shown:?}");
}
