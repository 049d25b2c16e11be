//! `tunnel connect`: a session to a node, for stdin and stdout or for a local port.

pub(crate) mod opener;
mod port;
mod session;
mod stdio;

use std::net::SocketAddr;
use std::sync::{Arc, Once};

use clap::{Args, ValueHint};
use futures_util::{FutureExt as _, Stream, StreamExt as _};
use tokio::sync::Semaphore;
use tracing::Span;

use crate::command::client::{ClientArgs, ClientSettings};
use crate::command::connect::opener::SessionOpener;
use crate::command::connect::session::interrupted;
use crate::command::connect::stdio::carry;
use crate::command::{CommandError, CommandResult};
use crate::session_io::copy::close::close;
use crate::session_io::copy::{CopyEnd, EndKind, Side};
use crate::uplink::path_report::PrintLine;
use crate::uplink::proxy::{accept_own, serves_own_user_only};
use tunnel_base::drain::Drain;
use tunnel_net::listen::TcpListenSocket;
use tunnel_net::pool::BufferPool;
use tunnel_net::socket::{AnyConnection, Connection as _, Socket};
use tunnel_proto::names::{NameError, Target};

/// Arguments of `tunnel connect`.
#[derive(Debug, Clone, Args)]
pub struct ConnectArgs {
    /// Target as NODE:PORT, as clients of a server name it; or NODE, followed by PORT.
    #[arg(value_name = "NODE:PORT", value_hint = ValueHint::Hostname)]
    pub target: String,
    /// Port, if separate, as in ssh's `%h %p`.
    #[arg(value_name = "PORT")]
    pub port: Option<u16>,
    /// The server, and how to log in there.
    #[command(flatten)]
    pub client: ClientArgs,
    /// Local address (IP:PORT, or PORT on 127.0.0.1) to listen on, with a session for each connection, until Ctrl-C. On
    /// loopback only this user's processes, and root's, are served.
    #[arg(long, value_name = "IP:PORT", value_parser = local_address)]
    pub listen: Option<SocketAddr>,
}

/// Connects stdin and stdout to a target until both directions have ended, or serves a local port. Ends at the first of
/// `signals`, and without delivering the last bytes at the next one. `variable` returns environment variables by name.
/// `print_line` prints a line on the terminal.
///
/// # Errors
///
/// Returns an error if the server refused the session, with its reason, or if the session was interrupted.
pub async fn connect(
    args: &ConnectArgs,
    variable: impl Fn(&str) -> Option<String>,
    mut signals: impl Stream<Item = ()> + Unpin,
    print_line: impl Fn(&str) + Clone + Send + Sync + 'static,
) -> CommandResult {
    let target = target(args)?;
    let notices = print_line.clone();
    let settings = ClientSettings::find(&args.client, variable)?;
    let print_notice: PrintLine = Arc::new(move |line| notices(&format!("tunnel: {line}")));
    // With --listen the first session may come much later. What can be checked is checked while a person watches.
    let reaching = async {
        let opener = SessionOpener::reach(settings, print_notice).await?;
        if args.listen.is_some() {
            opener.check().await?;
        }
        Ok(Arc::new(opener))
    };
    let opener = tokio::select! {
        opener = reaching => opener?,
        _ = signals.next() => return Err(interrupted(BY_SIGNAL)),
    };
    let done = match args.listen {
        None => tokio::select! {
            done = async { carry(opener.open(&target).await?).await } => done,
            _ = signals.next() => Err(interrupted(BY_SIGNAL)),
        },
        Some(at) => listen(at, opener.clone(), target, signals.next().map(drop), print_line).await,
    };
    if let Some(opener) = Arc::into_inner(opener) {
        tokio::select! {
            () = opener.close() => {}
            _ = signals.next() => {}
        }
    }
    done.map(|()| String::new())
}

fn target(args: &ConnectArgs) -> CommandResult<Target> {
    let text = match args.port {
        None => args.target.clone(),
        // ssh passes IPv6 addresses without brackets.
        Some(port) if args.target.contains(':') && !args.target.starts_with('[') => {
            format!("[{}]:{port}", args.target)
        }
        Some(port) => format!("{}:{port}", args.target),
    };
    text.parse().map_err(|cause: NameError| CommandError::usage(cause.to_string()))
}

/// Parses the local address of a flag.
pub(crate) fn local_address(text: &str) -> Result<SocketAddr, &'static str> {
    let port = text.parse::<u16>().map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    port.or_else(|_| text.parse()).map_err(|_| "expected IP:PORT, for example 127.0.0.1:8022, or a port")
}

async fn listen(
    at: SocketAddr,
    opener: Arc<SessionOpener>,
    target: Target,
    stop: impl Future<Output = ()>,
    print_line: impl Fn(&str) + Clone + Send + Sync + 'static,
) -> CommandResult<()> {
    let listener = TcpListenSocket::bind(at).map_err(|cause| CommandError::unavailable(cause.to_string()))?;
    print_line(&format!("{} forwards to {target}; press Ctrl-C to stop", listener.at()));
    if !serves_own_user_only(at) {
        print_line("anyone who reaches that address can reach the target, with your rights at the server");
    }
    let drain = Drain::new();
    // A place is taken before a connection is accepted, so connections beyond the maximum wait in the kernel.
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let pool = BufferPool::new();
    let warning = Once::new();
    let serving = async {
        loop {
            // Only this function owns the semaphore, and never closes it.
            let Ok(permit) = room.clone().acquire_owned().await else { return };
            // Any process may connect to loopback, and would get this user's rights.
            let refused = |_, _| warning.call_once(|| print_line(OTHER_USER));
            let (client, _) = accept_own(&listener, refused).await;
            let client = Socket::new(Box::new(client) as AnyConnection, pool.clone());
            let opener = opener.clone();
            let target = target.clone();
            let print_line = print_line.clone();
            drain.spawn(Span::none(), async move {
                if let Err(why) = serve(client, &opener, &target).await {
                    print_line(&format!("tunnel: {why}"));
                }
                drop(permit);
            });
        }
    };
    tokio::select! {
        () = serving => {}
        () = stop => {}
    }
    drain.finish(std::time::Duration::ZERO, std::future::ready(())).await;
    Ok(())
}

/// Serves one client of the local port. Its connection is reset unless all bytes were transferred.
async fn serve(
    mut client: Socket<AnyConnection>,
    opener: &SessionOpener,
    target: &Target,
) -> CommandResult<()> {
    client.io.set_reset_on_drop(true);
    let mut session = opener.open(target).await?;
    let ended = session.carry(&mut client).await;
    close(&mut client, Side::A, ended).await;
    match ended {
        CopyEnd { by: Side::B, how: EndKind::ReadFailed(kind) | EndKind::WriteFailed(kind) } => {
            Err(session.interruption_error(kind))
        }
        // A client whose own connection failed already knows.
        _ => Ok(()),
    }
}

/// The line for connections to a local port that are not served.
const OTHER_USER: &str = "tunnel: closed a connection of another user's process; to serve all users, listen on an \
                          address that is not loopback";
/// The reason of a session that ends by SIGINT or SIGTERM.
const BY_SIGNAL: &str = "stopped by a signal";

/// Maximum number of concurrent connections; more wait to be accepted.
const MAX_CONNECTIONS: usize = 1000;

#[cfg(test)]
mod tests;
