//! People's listeners, reached from another machine: curl and `tunnel connect` send passwords over TLS, and the page of
//! the admin listener is encrypted.

use std::path::Path;

use crate::certificates::Files;
use crate::network::Machine;
use crate::parts::{are_installed, is_root};
use crate::process::{ProcessOutput, Running, TIMEOUT, run_command};
use crate::tunnel::{PROGRAM, TestDir, clear_environment};

/// The server's address on the cable to its clients.
const SERVER: &str = "10.81.0.1";

/// Runs a program on the machine of the clients.
fn run(machine: &Machine, program: &str, args: &[&str], env: &[(&str, &Path)]) -> ProcessOutput {
    let mut command = clear_environment(machine.command(program));
    command.args(args).envs(env.iter().copied());
    run_command(program, &mut command, None, TIMEOUT)
}

/// Starts a server and the edge `node1` on one machine, and a web server with one page there.
fn start(place: &TestDir, machine: &Machine) -> [Running; 3] {
    let Files { ca, cert, key } = &place.files;
    let users = place.path().join("users");
    std::fs::write(&users, format!("ops:{}\n", bcrypt::hash("pw", 4).unwrap())).unwrap();
    let (tls, basic) =
        (format!("cert = {cert:?}\nkey = {key:?}\n"), format!("auth = \"basic\"\nusers = {users:?}\n"));
    let certified = format!("{tls}client_ca = {ca:?}\nnames = [\"ops\"]\n");
    let server = format!(
        "{}[server.connect]\nlisten = \"{SERVER}:2222\"\nplain_listen = \"{SERVER}:22\"\n{tls}{basic}\
         [server.http_proxy]\nlisten = \"{SERVER}:8080\"\n{certified}auth = \"none\"\n\
         [server.admin]\nlisten = \"unix:{}\"\nusers = {users:?}\n{tls}",
        place
            .cloud_config("127.0.0.1:9000".parse().unwrap(), 9010)
            .replace("127.0.0.1:9010", &format!("{SERVER}:9010")),
        place.path().join("server.sock").display(),
    );
    let edge = place
        .edge_config("node1", "127.0.0.1:9000", 9011)
        .replace("127.0.0.1:9011", &format!("{SERVER}:9011"))
        + &format!(
            "[edge.admin]\nlisten = \"unix:{}\"\n{certified}",
            place.path().join("edge.sock").display()
        );
    let start =
        |role: &str, config: &str| place.tunnel_as(machine.command(PROGRAM), (role, role), config, &[], &[]);
    let (mut server, edge) = (start("server", &server), start("edge", &edge));
    server.wait_for_log("node is linked");
    let pages = place.path().join("pages");
    std::fs::create_dir(&pages).unwrap();
    std::fs::write(pages.join("page"), "of node1").unwrap();
    let mut httpd = machine.command("busybox");
    httpd.args(["httpd", "-f", "-p", "127.0.0.1:9100", "-h"]).arg(&pages);
    [server, edge, Running::start("pages", place.path(), &mut httpd)]
}

#[test]
fn curl_and_tunnel_connect_send_passwords_over_tls_from_another_machine() {
    if !are_installed(&["ip", "nsenter", "unshare", "curl", "busybox"]) || !is_root() {
        return;
    }
    let place = TestDir::serving(&[SERVER]);
    let (here, laptop) = (Machine::new(), Machine::new());
    here.cable(("laptop", &format!("{SERVER}/24")), &laptop, ("wan", "10.81.0.2/24"));
    let [server, _edge, _pages] = start(&place, &here);
    let ca = place.files.ca.as_path();
    let [cert, key, password] = ["ops.crt", "ops.key", "pw"].map(|name| place.path().join(name));
    place.authority.0.client("ops").unwrap().write(&cert, &key).unwrap();
    std::fs::write(&password, "pw\n").unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();

    // curl, with a password and with a certificate.
    let page = "http://node1:9100/page";
    let curl = |args: &[&str]| run(&laptop, "curl", &[&["-sS", "-m", "30"], args].concat(), &[]);
    let with_ca = ["--proxy-cacert", &text(ca)];
    let connect = |login: &str| {
        let proxy = format!("https://{login}{SERVER}:2222");
        curl(&[&["-p", "-x", &proxy][..], &with_ca, &[page]].concat())
    };
    assert_eq!(connect("ops:pw@").stdout, "of node1");
    for wrong in ["", "ops:wrong@"] {
        assert!(connect(wrong).stderr.contains("407"), "{wrong:?}: {:?}", connect(wrong));
    }
    let proxy = format!("https://{SERVER}:8080");
    let identity = ["--proxy-cert", &text(&cert), "--proxy-key", &text(&key)];
    for how in [&["-x"][..], &["-p", "-x"]] {
        let output = curl(&[how, &[&proxy], &with_ca, &identity, &[page]].concat());
        assert_eq!(output.stdout, "of node1", "{output:?}");
    }
    assert!(!curl(&[&["-x", &proxy][..], &with_ca, &[page]].concat()).status.success(), "no certificate");

    // The page, with a password at the server and with a certificate at the edge.
    let status = |port: u16, more: &[&str]| {
        let url = format!("https://{SERVER}:{port}/status");
        curl(&[&["--cacert", &text(ca), "-w", "%{http_code}", "-o", "/dev/null"][..], more, &[&url]].concat())
            .stdout
    };
    assert_eq!([status(9010, &["-u", "ops:pw"]), status(9010, &[])], ["200", "401"]);
    assert_eq!(
        [status(9011, &["--cert", &text(&cert), "--key", &text(&key)]), status(9011, &[])],
        ["200", "000"]
    );

    // tunnel connect: a password without TLS only if it is permitted; the system's CAs; client.toml.
    let home = place.path().join("home");
    std::fs::create_dir_all(home.join("tunnel")).unwrap();
    let ask = |args: &[&str], roots: &Path| {
        let line = [&["connect", "node1:9100"], args].concat();
        let words = line.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
        let get = format!("printf 'GET /page HTTP/1.0\\r\\n\\r\\n' | '{PROGRAM}' {words}");
        run(&laptop, "sh", &["-c", &get], &[("SSL_CERT_FILE", roots), ("XDG_CONFIG_HOME", &home)])
    };
    let login = ["--user=ops", &format!("--password-file={}", password.display())];
    let (plain, encrypted) =
        (format!("--server=http://{SERVER}:22"), format!("--server=https://{SERVER}:2222"));
    let refused = ask(&[&login[..], &[&plain]].concat(), ca);
    assert_eq!(refused.status.code(), Some(64), "{refused:?}");
    assert!(refused.stderr.contains("unencrypted") && refused.stderr.contains("--insecure"), "{refused:?}");
    for args in [&[&*plain, "--insecure"][..], &[&encrypted]] {
        let output = ask(&[&login[..], args].concat(), ca);
        assert!(output.stdout.ends_with("of node1"), "{args:?}: {output:?}");
    }
    let unknown = ask(&[&login[..], &[&encrypted]].concat(), &cert);
    assert!(unknown.stderr.contains("TLS failed") && unknown.stderr.contains("check --ca"), "{unknown:?}");
    let file =
        format!("server = \"https://{SERVER}:8080\"\nca = {ca:?}\ncert = \"../../ops.crt\"\nkey = {key:?}\n");
    std::fs::write(home.join("tunnel/client.toml"), file).unwrap();
    let output = ask(&[], &cert);
    assert!(output.stdout.ends_with("of node1"), "{output:?}");

    // The risk is in the log once, for the port without TLS.
    let log = server.log();
    let risks: Vec<_> = log.lines().filter(|line| line.contains("unencrypted")).collect();
    assert!(risks.len() == 1 && risks[0].contains("key=server.connect.plain_listen"), "{risks:?}");
}
