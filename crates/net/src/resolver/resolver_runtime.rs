//! DNS queries are sent from sockets with this process's mark.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use hickory_resolver::net::runtime::iocompat::AsyncIoTokioAsStd;
use hickory_resolver::net::runtime::{RuntimeProvider, TokioRuntimeProvider};
use socket2::SockRef;
use tokio::net::{TcpStream, UdpSocket};

use crate::dial::dial;
use crate::fd_limit;
use crate::resolver::ONE_TRY;
use tunnel_proto::names::Host;

/// A tokio runtime for the resolver, like its standard one, but with the mark on sockets.
#[derive(Clone, Default)]
pub(crate) struct ResolverRuntime(TokioRuntimeProvider);

impl RuntimeProvider for ResolverRuntime {
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
        timeout: Option<Duration>,
    ) -> Pin<Box<dyn Send + Future<Output = io::Result<Self::Tcp>>>> {
        Box::pin(async move {
            let timeout = timeout.unwrap_or(ONE_TRY);
            let socket = dial(&Host::Ip(server.ip()), &[server], timeout).await.map_err(io::Error::other)?;
            fd_limit::ensure_outside_half_of_reserve(&socket)?;
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
            fd_limit::ensure_outside_half_of_reserve(&socket)?;
            crate::mark::put_on(&SockRef::from(&socket))?;
            Ok(socket)
        })
    }
}
