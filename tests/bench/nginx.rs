//! nginx: a target with TLS, and reverse proxies that can be chained in front of it.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::place::{Place, free_ports};
use crate::process::Process;

/// One nginx with one process.
#[derive(Debug)]
pub(crate) struct Nginx {
    /// The address where it accepts TLS.
    pub(crate) at: SocketAddr,
    pub(crate) process: Process,
}

impl Nginx {
    /// Starts a target that responds to everything with this number of bytes.
    pub(crate) fn target(place: &Place, bytes: usize) -> Result<Self> {
        let answer = "x".repeat(bytes);
        Self::start(place, "target", "", &format!("default_type text/plain; return 200 {answer};"))
    }

    /// Starts a proxy that forwards everything over persistent connections.
    pub(crate) fn proxy(place: &Place, name: &str, to: SocketAddr) -> Result<Self> {
        let upstream = format!(
            "upstream next {{ server {to}; keepalive {KEPT}; keepalive_requests {ENDLESS}; keepalive_timeout 1h; }}"
        );
        let pass = "proxy_pass https://next; proxy_http_version 1.1; proxy_set_header Connection ''; \
                    proxy_set_header Host $host; proxy_ssl_protocols TLSv1.3; proxy_ssl_session_reuse on;";
        Self::start(place, name, &upstream, pass)
    }

    fn start(place: &Place, name: &str, more: &str, location: &str) -> Result<Self> {
        let program = ["/usr/sbin/nginx", "/usr/bin/nginx", "/usr/local/sbin/nginx"];
        let program = program.iter().find(|path| Path::new(path).is_file());
        let program = program.context("nginx is not installed; run scripts/parts.sh")?;
        let [port] = free_ports()?;
        let at = SocketAddr::from((place.cloud_address, port));
        let dir = place.file(&format!("nginx-{name}"));
        fs::create_dir(&dir)?;
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .iter()
            .map(|what| format!("    {what}_temp_path {};\n", dir.join(what).display()))
            .collect();
        // One process each, as two cores are shared by all. Limits that would close connections are disabled.
        let config = format!(
            "daemon off;\nmaster_process off;\npid {pid};\nerror_log stderr;\nevents {{}}\nhttp {{\n{temporary}    \
             access_log off;\n    keepalive_requests {ENDLESS};\n    keepalive_timeout 1h;\n    {more}\n    server {{\n        \
             listen {at} ssl;\n        ssl_certificate {cert};\n        ssl_certificate_key {key};\n        \
             ssl_protocols TLSv1.3;\n        ssl_session_cache shared:sessions:1m;\n        \
             location / {{ {location} }}\n    }}\n}}\n",
            pid = dir.join("pid").display(),
            cert = place.certificates.cert().display(),
            key = place.certificates.key().display(),
        );
        let file = dir.join("nginx.conf");
        fs::write(&file, config)?;
        let (prefix, file) = (dir.display().to_string(), file.display().to_string());
        let log = dir.join("log");
        let mut process = Process::start(None, &[program, "-p", &prefix, "-e", "stderr", "-c", &file], &log)?;
        let since = Instant::now();
        while TcpStream::connect(at).is_err() {
            ensure!(
                process.alive() && since.elapsed() < COME_UP,
                "nginx did not start: {}",
                fs::read_to_string(&log)?
            );
            thread::sleep(Duration::from_millis(10));
        }
        Ok(Self { at, process })
    }
}

/// Persistent connections to the next hop: as many as there are clients.
const KEPT: usize = 64;
/// Requests per connection; the default closes it after 1000.
const ENDLESS: u32 = 1_000_000_000;
/// Timeout for the start.
const COME_UP: Duration = Duration::from_secs(5);
