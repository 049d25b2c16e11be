//! Questions of DNS leave by sockets that carry the mark of this process.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use hickory_resolver::net::runtime::iocompat::AsyncIoTokioAsStd;
use hickory_resolver::net::runtime::{RuntimeProvider, TokioRuntimeProvider};
use socket2::SockRef;
use tokio::net::{TcpStream, UdpSocket};

use super::ONE_TRY;
use crate::net::dial::dial;
use crate::net::mark;

/// Runs a resolver on tokio, as its own way to do so does, but for the mark.
#[derive(Clone, Default)]
pub(super) struct Marked(TokioRuntimeProvider);

impl RuntimeProvider for Marked {
    type Handle = <TokioRuntimeProvider as RuntimeProvider>::Handle;
    type Timer = <TokioRuntimeProvider as RuntimeProvider>::Timer;
    type Udp = UdpSocket;
    type Tcp = AsyncIoTokioAsStd<TcpStream>;

    fn create_handle(&self) -> Self::Handle {
        self.0.create_handle()
    }

    fn connect_tcp(
        &self,
        server: SocketAddr,
        _from: Option<SocketAddr>,
        patience: Option<Duration>,
    ) -> Pin<Box<dyn Send + Future<Output = io::Result<Self::Tcp>>>> {
        Box::pin(async move {
            let socket = dial(&[server], patience.unwrap_or(ONE_TRY)).await.map_err(io::Error::other)?;
            Ok(AsyncIoTokioAsStd(socket))
        })
    }

    fn bind_udp(
        &self,
        at: SocketAddr,
        server: SocketAddr,
    ) -> Pin<Box<dyn Send + Future<Output = io::Result<Self::Udp>>>> {
        let bound = self.0.bind_udp(at, server);
        Box::pin(async move {
            let socket = bound.await?;
            mark::put_on(&SockRef::from(&socket))?;
            Ok(socket)
        })
    }
}
