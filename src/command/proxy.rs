//! `tunnel proxy`: keeps the links of a user, and gives them to her programs as an HTTP proxy and SOCKS5.

use std::future::pending;
use std::net::{Ipv4Addr, SocketAddr};

use futures_util::{FutureExt as _, Stream, StreamExt as _};
use tracing::{info, warn};

use crate::command::connect::local_address;
use crate::command::connect::opener::no_link;
use crate::command::{CommandError, CommandResult, Format, client};
use crate::config::Environment;
use crate::startup::systemd;
use crate::uplink::client::UserUplinks;
use crate::uplink::path_report::report_links;
use crate::uplink::proxy::{UserProxy, serves_own_user_only};
use tunnel_net::listen::TcpListenSocket;

/// Arguments of `tunnel proxy`.
#[derive(Debug, Clone, clap::Args)]
pub struct ProxyArgs {
    /// Local address (IP:PORT, or PORT on 127.0.0.1) of the HTTP proxy, for CONNECT and http:// URLs. Without it 3128,
    /// if that port is free.
    #[arg(long, value_name = "IP:PORT", value_parser = local_address)]
    pub http: Option<SocketAddr>,
    /// Local address (IP:PORT, or PORT on 127.0.0.1) of SOCKS5. Without it 1080, if that port is free.
    #[arg(long, value_name = "IP:PORT", value_parser = local_address)]
    pub socks5: Option<SocketAddr>,
    /// Log level: 0 info, 2 debug, 4 debug of libraries too, 6 trace except frames, 8 frames too.
    #[arg(short, long, value_name = "LEVEL", default_value_t = 0, allow_negative_numbers = true)]
    pub verbosity: i32,
    /// Format of log lines.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: Format,
}

/// Serves until the first of `signals`, and ends without delivering the last bytes at the next one. `print_line` prints
/// a line for a person at the terminal, if there is one: when the proxy is ready, and what happens to its link.
///
/// # Errors
///
/// Returns an error if `client.toml` names no servers, a port that is set or both default ports are taken, or a server
/// denies the link. A server that is not reached is dialled again.
pub async fn run(
    args: &ProxyArgs,
    env: &Environment,
    mut signals: impl Stream<Item = ()> + Unpin,
    print_line: Option<impl Fn(&str)>,
) -> CommandResult {
    let config = client::joined(env)?;
    let http = bind("--http", args.http, 3128)?;
    let socks5 = bind("--socks5", args.socks5, 1080)?;
    if http.is_none() && socks5.is_none() {
        return Err(CommandError::unavailable("both default ports are taken; set --http or --socks5"));
    }
    let ports = [("http", &http), ("socks5", &socks5)];
    let ports = ports.iter().filter_map(|(scheme, port)| Some(format!("{scheme}://{}", port.as_ref()?.at())));
    let ready = format!("ready: {}; press Ctrl-C to stop", ports.collect::<Vec<_>>().join(", "));
    let links = tokio::select! {
        links = UserUplinks::start(config) => links.map_err(|why| no_link(&why))?,
        _ = signals.next() => return Ok(String::new()),
    };
    let proxy = UserProxy::start(links, http, socks5);
    systemd::notify_ready();
    let notices = async {
        if let Some(print_line) = print_line {
            print_line(&ready);
            report_links(&proxy.links, print_line).await;
        }
    };
    tokio::select! {
        _ = signals.next() => {}
        () = notices.then(|()| pending()) => {}
    }
    info!("stopping");
    systemd::notify_stopping();
    tokio::select! {
        () = proxy.shutdown() => {}
        _ = signals.next() => {}
    }
    Ok(String::new())
}

/// Listens on the address of a flag, or on a default port if it is free.
fn bind(
    flag: &'static str,
    set: Option<SocketAddr>,
    default_port: u16,
) -> CommandResult<Option<TcpListenSocket>> {
    let at = set.unwrap_or(SocketAddr::from((Ipv4Addr::LOCALHOST, default_port)));
    if !serves_own_user_only(at) {
        let risk = "anyone who reaches this address reaches nodes with your rights";
        warn!(key = flag, local_addr = %at, risk, "insecure configuration");
    }
    TcpListenSocket::optional(TcpListenSocket::bind(at), set.is_none())
        .map_err(|cause| CommandError::unavailable(format!("{flag}: {cause}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_taken_port_that_was_set_is_an_error() {
        let other = TcpListenSocket::bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let taken = other.at();
        assert!(bind("--http", None, taken.port()).unwrap().is_none());
        assert!(bind("--http", Some(taken), 0).unwrap_err().to_string().contains("--http: cannot listen on"));
        assert!(bind("--http", None, 0).unwrap().is_some());
    }
}
