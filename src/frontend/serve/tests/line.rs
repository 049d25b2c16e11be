//! A whole front end: a line `node:port` over a unix socket, answered by `ok` or by why not.
use super::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

pub(super) struct Line;

impl FrontEnd<UnixStream> for Line {
    const NAME: &'static str = "line";
    const CATEGORY: Category = Category::Ssh;
    type Connection = UnixStream;

    fn span(&self, _from: SocketAddr) -> Span {
        Span::none()
    }

    fn rejection_bytes(&self, denial: &Denial, _trace: &str) -> Bytes {
        format!("no: {}\n", denial.sentence(false)).into()
    }

    async fn handshake(&self, mut socket: UnixStream, visit: &mut Visit<'_>) -> Handshake<UnixStream> {
        let mut line = String::new();
        while !line.ends_with('\n') {
            match socket.read_u8().await {
                Ok(byte) => line.push(char::from(byte)),
                Err(_) => return Handshake::Failed { cause: "no_head", socket: Some(socket) },
            }
        }
        visit.user = socket.peer_cred().ok().map(|user| format!("uid {}", user.uid()));
        let request = line.trim().parse().map(|target| OpenRequest { target, credentials: HeaderMap::new() });
        let (answer, session) = match visit.open(request.map_err(Denial::from), new_trace()).await {
            Ok(session) => ("ok\n".to_owned(), Some(session)),
            Err(denied) => (format!("no: {}\n", denied.denial.sentence(denied.trusted)), None),
        };
        match (socket.write_all(answer.as_bytes()).await, session) {
            (Ok(()), Some(session)) => Handshake::Opened { session, socket, early: Bytes::new() },
            (Ok(()), None) => Handshake::Denied(socket),
            (Err(_), _) => Handshake::Failed { cause: "reset", socket: None },
        }
    }
}

impl Accept for UnixListener {
    type Stream = UnixStream;

    fn at(&self) -> impl std::fmt::Display {
        "a unix socket"
    }

    async fn accept(&self) -> (UnixStream, SocketAddr) {
        (self.accept().await.unwrap().0, ([127, 0, 0, 1], 0).into())
    }
}
