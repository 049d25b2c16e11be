//! A client of kube-apiserver whose connections are dialled as all others of this process are.

use std::io;

use http::Uri;
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kube::client::retry::RetryPolicy;
use kube::client::{Body, ConfigExt as _};
use kube::{Client, Config};
use tokio::net::TcpStream;
use tokio::task::spawn_blocking;
use tower::retry::RetryLayer;
use tower::{BoxError, ServiceBuilder, service_fn};

use super::{ClusterError, REQUEST_TIMEOUT, config_error};
use crate::net::dial::dial;
use crate::net::resolver::Resolver;

/// As kube makes one, but for the dialling. Nothing is asked yet.
///
/// # Errors
///
/// [`ClusterError::Config`].
pub(super) fn client(config: Config) -> Result<Client, ClusterError> {
    if config.proxy_url.is_some() {
        let why = "a proxy on the way to it is not supported: take proxy-url out of the kubeconfig, or HTTPS_PROXY out of the \
                   environment";
        return Err(ClusterError::Config(why.to_owned()));
    }
    let dials = service_fn(|to: Uri| async move { connect(&to).await.map(TokioIo::new) });
    let https = config.rustls_https_connector_with_connector(dials).map_err(|cause| config_error(&cause))?;
    let mut timed = TimeoutConnector::new(https);
    timed.set_connect_timeout(config.connect_timeout);
    timed.set_read_timeout(config.read_timeout);
    timed.set_write_timeout(config.write_timeout);
    timed.set_reset_reader_on_write(config.reset_reader_on_write);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.default_retry.then(|| RetryLayer::new(RetryPolicy::server_retry())))
        .option_layer(config.auth_layer().map_err(|cause| config_error(&cause))?)
        .layer(config.extra_headers_layer().map_err(|cause| config_error(&cause))?)
        .map_err(BoxError::from)
        .service(legacy::Client::builder(TokioExecutor::new()).build::<_, Body>(timed));
    Ok(Client::new(service, config.default_namespace))
}

async fn connect(to: &Uri) -> io::Result<TcpStream> {
    let host = to.host().unwrap_or_default().trim_matches(['[', ']']);
    let port = to.port_u16().unwrap_or(if to.scheme_str() == Some("http") { 80 } else { 443 });
    let ips = match host.parse() {
        Ok(ip) => vec![ip],
        Err(_) => {
            // Its files may have changed since the last time, which is long ago.
            let resolver = spawn_blocking(Resolver::system).await?.map_err(io::Error::other)?;
            resolver.lookup(host).await.map_err(io::Error::other)?
        }
    };
    let at: Vec<_> = ips.into_iter().map(|ip| (ip, port).into()).collect();
    dial(&at, REQUEST_TIMEOUT / 2).await.map_err(io::Error::other)
}
