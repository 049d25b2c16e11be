//! An open session through a pod: copying its bytes, and why it broke off.

use std::io::ErrorKind;

use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::client::TlsStream;

use crate::command::Failure;
use crate::net::ByteStream;
use crate::net::socket::{Connection, Socket};
use crate::net::splice::{Ended, Side, close, splice};

/// An open session.
pub(super) struct Session {
    pub(super) carrier: Carrier,
    /// The address of its pod.
    pub(super) pod: String,
    /// Identifies the session in the pod's access log.
    pub(super) trace: String,
}

/// The connection to the pod that carries a session.
pub(super) enum Carrier {
    Tcp(Socket<TcpStream>),
    Unix(Socket<UnixStream>),
    Tls(Box<Socket<TlsStream<TcpStream>>>),
}

impl Session {
    /// Copies bytes between `here`, which is side A, and the session until both have ended. Then closes the connection to
    /// the pod: in good order only if all bytes passed. A dropped call resets the connection.
    pub(super) async fn carry(&mut self, here: &mut impl ByteStream) -> Ended {
        match &mut self.carrier {
            Carrier::Tcp(socket) => carry(here, socket).await,
            Carrier::Unix(socket) => carry(here, socket).await,
            Carrier::Tls(socket) => carry(here, &mut **socket).await,
        }
    }

    /// Returns why the session broke off, as far as its client can know. Only the pod knows the cause, and logs it.
    pub(super) fn broken(&self, kind: ErrorKind) -> Failure {
        let Self { pod, trace, .. } = self;
        let how = match kind {
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::NotConnected => {
                "reset the connection".to_owned()
            }
            ErrorKind::UnexpectedEof => "closed the connection without ending TLS".to_owned(),
            kind => format!("was lost: {kind}"),
        };
        broken_off(&format!(
            "the pod {pod} {how}; its access log says why (trace={trace}), unless it was killed"
        ))
    }
}

/// The failure of a session that broke off.
pub(super) fn broken_off(why: &str) -> Failure {
    Failure { code: BROKEN, text: format!("the session broke off: {why}") }
}

async fn carry<C: Connection>(here: &mut impl ByteStream, pod: &mut Socket<C>) -> Ended {
    // Also if this process is killed: a truncated upload must not look complete to the target.
    pod.io().breaks_off(true);
    let ended = splice(here, pod).await.ended;
    close(pod, Side::B, ended).await;
    ended
}

/// Exit code of a session that broke off, as in sysexits.h (EX_IOERR).
const BROKEN: u8 = 74;
