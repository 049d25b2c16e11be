//! Links through nginx and HAProxy that pass only HTTP/1.1, as WebSockets.

use std::io::{Read as _, Write as _, copy};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;

use crate::certificates::{Authority, Files};
use crate::parts::{are_installed, find, free_port, loopback};
use crate::process::{Running, TIMEOUT};
use crate::tunnel::{ServerProcess, TestDir};
use crate::wait::wait_until;
use crate::web::nginx_with;

/// Starts a proxy with a certificate, at the first port, for a server at the second one.
type StartProxy = fn(&TestDir, &Files, u16, u16) -> Running;

#[test]
fn links_pass_nginx_and_haproxy_and_their_sessions_outlive_a_restart_of_the_proxy() {
    if !are_installed(&["nginx", "haproxy"]) {
        return;
    }
    let other_ca = "a proxy ends TLS with another certificate";
    // Where the edge finds the CA of the proxy.
    for (start, ca_from, why) in [
        (nginx as StartProxy, "SSL_CERT_FILE", other_ca),
        (nginx, "ca", "a proxy offers no HTTP/2 in TLS"),
        (haproxy, "websocket_ca", other_ca),
        (haproxy, "ca", "HTTP/2 is answered with status 502"),
    ] {
        let (place, front) = (TestDir::new(), free_port());
        let mut cloud = ServerProcess::start(&place);
        let public = place.path().join("public");
        std::fs::create_dir(&public).unwrap();
        let public = Authority::new().write(&public, &["127.0.0.1"]);
        let files = if ca_from == "ca" { &place.files } else { &public };
        let proxy = start(&place, files, front, cloud.grpc);
        let server = format!("127.0.0.1:{front}");
        let mut config = place.edge_config("node1", &server, free_port());
        let mut trusted = public.ca.display().to_string();
        if ca_from == "websocket_ca" {
            config += &format!("websocket_ca = {{ \"{server}\" = \"{trusted}\" }}\n");
            trusted = place.files.ca.display().to_string();
        }
        let mut edge = place.tunnel(("edge", "edge"), &config, &[("SSL_CERT_FILE", &trusted)], &[]);
        cloud.wait_for_node("node1");
        edge.wait_for_log(&format!("websocket=\"{why}\""));

        let target = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = format!("node1:{}", target.local_addr().unwrap().port());
        std::thread::spawn(move || {
            let mut client = target.accept().unwrap().0;
            copy(&mut client.try_clone().unwrap(), &mut client).unwrap();
        });
        let mut client = TcpStream::connect(loopback(cloud.connect)).unwrap();
        write!(client, "CONNECT {at} HTTP/1.1\r\n\r\n").unwrap();
        let mut head = [0; 39];
        client.read_exact(&mut head).unwrap();
        assert!(
            head.starts_with(b"HTTP/1.1 200 ") && head.ends_with(b"\r\n\r\n"),
            "{}",
            String::from_utf8_lossy(&head)
        );
        let sent: Vec<u8> = (0..BYTES).map(|n| (n % 251) as u8).collect();
        let mut writer = client.try_clone().unwrap();
        let all = sent.clone();
        let writing = std::thread::spawn(move || {
            writer.write_all(&all).unwrap();
            writer.shutdown(Shutdown::Write).unwrap();
        });
        let mut back = vec![0; BYTES / 4];
        client.read_exact(&mut back).unwrap();
        drop(proxy);
        let _proxy = start(&place, files, front, cloud.grpc);
        client.read_to_end(&mut back).unwrap();
        writing.join().unwrap();
        assert!(back == sent, "{} of {} bytes, or wrong ones", back.len(), sent.len());
    }
}

fn nginx(place: &TestDir, files: &Files, front: u16, server: u16) -> Running {
    let Files { cert, key, .. } = files;
    let servers = format!(
        r#"server {{
    listen 127.0.0.1:{front} ssl;
    ssl_certificate {};
    ssl_certificate_key {};
    location /tunnel/link {{
        proxy_pass https://127.0.0.1:{server};
        proxy_http_version 1.1;
        proxy_set_header Upgrade $http_upgrade;
        proxy_set_header Connection upgrade;
    }}
}}"#,
        cert.display(),
        key.display()
    );
    nginx_with(place, &servers, front)
}

fn haproxy(place: &TestDir, files: &Files, front: u16, server: u16) -> Running {
    let pem = place.path().join("haproxy.pem");
    let both = [&files.cert, &files.key].map(|file| std::fs::read_to_string(file).unwrap()).concat();
    std::fs::write(&pem, both).unwrap();
    let file = place.path().join("haproxy.cfg");
    let config = format!(
        "defaults\n mode http\n timeout connect 5s\n timeout client 30s\n timeout server 30s\n\
         frontend links\n bind 127.0.0.1:{front} ssl crt {}\n default_backend server\n\
         backend server\n server server 127.0.0.1:{server} ssl verify none\n",
        pem.display()
    );
    std::fs::write(&file, config).unwrap();
    let mut running = Running::start(
        "haproxy",
        place.path(),
        Command::new(find("haproxy").unwrap()).arg("-db").arg("-f").arg(file),
    );
    wait_until("HAProxy listens", TIMEOUT, || {
        running.assert_running();
        TcpStream::connect(loopback(front)).is_ok()
    });
    running
}

/// More than the buffers on the way hold.
const BYTES: usize = 32 << 20;
