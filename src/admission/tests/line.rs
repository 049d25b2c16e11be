//! A minimal listener protocol: a line `node:port` over a unix socket, answered with `ok` or the reason of the denial.

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

use crate::admission::trace_id::new_trace;
use std::future::pending;

use super::*;
use tunnel_net::listen::Accept;

pub(crate) struct Line;

impl ListenerProtocol<UnixStream> for Line {
    fn rejection_bytes(&self, denial: &Denial, _trace: &str) -> Bytes {
        format!("no: {}\n", denial.sentence(false)).into()
    }

    async fn handshake(&self, mut socket: UnixStream, admission: &mut Admission) -> AdmissionOutcome {
        let mut line = String::new();
        while !line.ends_with('\n') {
            match socket.read_u8().await {
                Ok(byte) => line.push(char::from(byte)),
                Err(_) => {
                    return AdmissionOutcome::Failed {
                        reason: "header_missing",
                        socket: Some(Box::new(socket)),
                    };
                }
            }
        }
        if let Ok(user) = socket.peer_cred() {
            admission.client.proof = ClientIdentity::User(format!("uid {}", user.uid()));
        }
        let opened = admission.open(pending(), open_request(line.trim()), new_trace()).await;
        let (answer, session) = match opened.expect("the client stays") {
            Ok(session) => ("ok\n".to_owned(), Some(session)),
            Err(denied) => (format!("no: {}\n", denied.denial.sentence(denied.sees_details)), None),
        };
        match (socket.write_all(answer.as_bytes()).await, session) {
            (Ok(()), Some(session)) => {
                AdmissionOutcome::Opened { session, socket: Box::new(socket), buffered: Bytes::new() }
            }
            (Ok(()), None) => AdmissionOutcome::Closed(Some(Box::new(socket))),
            (Err(_), _) => AdmissionOutcome::Failed { reason: "reset", socket: None },
        }
    }
}

/// A protocol with many lines per connection: each opens a session and is answered with that session's first bytes.
pub(crate) struct Lines;

impl ListenerProtocol<UnixStream> for Lines {
    async fn handshake(&self, socket: UnixStream, admission: &mut Admission) -> AdmissionOutcome {
        let mut lines = BufReader::new(socket);
        let mut line = String::new();
        while lines.read_line(&mut line).await.unwrap() > 0 {
            let opened = match admission.authorize(open_request(line.trim()), new_trace()).await {
                Ok(permitted) => permitted.open().await,
                Err(denied) => Err(denied),
            };
            let answer = match opened {
                Ok(mut granted) => take(&mut granted.session).await.unwrap(),
                Err(denied) => format!("no: {}", denied.denial).into(),
            };
            lines.get_mut().write_all(&[&answer, &b"\n"[..]].concat()).await.unwrap();
            admission.mark_idle();
            line.clear();
        }
        AdmissionOutcome::Closed(Some(Box::new(lines.into_inner())))
    }
}

/// A protocol that authorizes one line as one of many requests, then carries a session over the connection.
pub(crate) struct Switch;

impl ListenerProtocol<UnixStream> for Switch {
    async fn handshake(&self, mut socket: UnixStream, admission: &mut Admission) -> AdmissionOutcome {
        let mut line = String::new();
        BufReader::new(&mut socket).read_line(&mut line).await.unwrap();
        let permitted = admission.authorize(open_request(line.trim()), new_trace()).await.unwrap();
        let session = permitted.open().await.unwrap();
        AdmissionOutcome::Opened { session, socket: Box::new(socket), buffered: Bytes::new() }
    }
}

/// A unix socket that a test has bound.
pub(crate) struct Bound(pub(crate) UnixListener);

impl Accept for Bound {
    type AnyStream = UnixStream;

    fn at(&self) -> impl std::fmt::Display {
        "a unix socket"
    }

    async fn accept(&self) -> (UnixStream, SocketAddr) {
        (self.0.accept().await.unwrap().0, ([127, 0, 0, 1], 0).into())
    }
}
