//! The server that clients connect to, and how they log in: from flags, otherwise the environment, otherwise a file.
//! The file also has the links of a user's device.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::system::uname;
use serde::Deserialize;

use crate::command::{CommandError, CommandResult};
use crate::config::edge::{EXPECTED_ENTRY, ServerEntry};
use crate::config::table::read_file;
use crate::config::value::forms::{FilePath, Millis};
use crate::config::{DAY, Environment, SecretString};
use crate::route::ResumeTimeouts;
use crate::uplink::client::{UserCredentials, UserLinkConfig};
use tunnel_base::files;
use tunnel_net::reload::{ReloadError, ReloadedValue, is_world_readable};
use tunnel_net::tls::{IdentityFiles, Trust};
use tunnel_proto::names::DeviceName;

/// Flags that name a server and the client's credentials.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ClientArgs {
    /// The server's CONNECT port: HOST:PORT, https://HOST:PORT for TLS, or unix:/PATH. [default: 127.0.0.1:2222]
    #[arg(long, value_name = "URL")]
    pub server: Option<String>,
    /// User at the server.
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// File that contains only the password of that user.
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<PathBuf>,
    /// File (PEM) of the CAs that may sign the server's certificate. [default: the system's CAs]
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// File (PEM) of the client certificate; with --key.
    #[arg(long, value_name = "FILE", requires = "key")]
    pub cert: Option<PathBuf>,
    /// File (PEM) of its private key.
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub key: Option<PathBuf>,
    /// Send the password without TLS to a server on another machine, where anyone on the path can read it.
    #[arg(long)]
    pub insecure: bool,
}

/// The server, and how a client logs in there. Values that errors name have their source.
#[derive(Debug, Clone)]
pub(crate) struct ClientSettings {
    /// The CONNECT port.
    pub(crate) server: SourcedValue<String>,
    pub(crate) user: Option<SourcedValue<String>>,
    pub(crate) password_file: Option<SourcedValue<PathBuf>>,
    /// Whom to trust over TLS, and how to authenticate there.
    pub(crate) trust: Trust,
    pub(crate) identity: Option<IdentityFiles>,
    /// Whether a flag sets `trust` or `identity`: then TLS is required.
    pub(crate) requires_tls: bool,
    /// Whether the password may cross a network unencrypted.
    pub(crate) insecure: bool,
    /// The servers to link to instead, and how the user is proved there; `None` if one is named to connect to.
    pub(crate) links: Option<UserLinkConfig>,
}

/// A value, and where it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourcedValue<T> {
    pub(crate) value: T,
    pub(crate) source: SettingSource,
}

/// Where a value was found.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
pub(crate) enum SettingSource {
    /// The command line, with this flag.
    Flag(&'static str),
    /// This environment variable.
    Variable(&'static str),
    /// This key of a file.
    #[display("{_0} in {}", _1.display())]
    File(&'static str, PathBuf),
    #[display("default server")]
    Default,
}

/// `client.toml`: the servers of a user, and how she proves who she is. It is ~/.config/tunnel/client.toml, which
/// `tunnel join --user` writes, or tunnel/client.toml in $XDG_CONFIG_HOME. Paths are relative to its directory. A
/// secret in it that every user of the machine may read is refused.
#[derive(Debug, Default, Deserialize)]
struct ClientConfigFile {
    /// Server's CONNECT port for `tunnel connect` and `tunnel ssh`, unless servers is set: HOST:PORT without TLS,
    /// https://HOST:PORT with TLS, or unix:/PATH. Default: "127.0.0.1:2222".
    server: Option<String>,
    /// User at the server. With cert and key, the certificate names the user.
    user: Option<String>,
    /// File that contains only the user's password, for server.
    password_file: Option<PathBuf>,
    /// File (PEM) of the CAs that may sign the servers' certificates. Default: the system's CAs.
    ca: Option<PathBuf>,
    /// File (PEM) of a client certificate, for users without a token. Requires key.
    cert: Option<PathBuf>,
    /// File (PEM) of its private key.
    key: Option<PathBuf>,
    /// Servers (host:port) to link to, tried in turn. Sessions of links survive a new address, a broken line and the
    /// end of a server.
    servers: Option<Vec<String>>,
    /// Files (PEM) of CAs, each for an entry of servers: websocket_ca = { "proxy.example.org:443" = "proxy-ca.crt" }. A
    /// proxy there that ends TLS may present a certificate from them. Only the TLS around a WebSocket to that server
    /// trusts them. Default: none.
    #[serde(default)]
    websocket_ca: BTreeMap<String, FilePath>,
    /// Name in the certificates of servers. Default: the host of each entry.
    tls_server_name: Option<String>,
    /// Name of this machine at the servers. Default: the host's name, up to the first dot.
    device: Option<String>,
    /// Token of the device. Requires user. Set one of token, token_file, and cert with key.
    token: Option<SecretString>,
    /// File that contains only the token.
    token_file: Option<PathBuf>,
    /// Time for which sessions to port 22 may be without a line, for example while a laptop sleeps. Servers and edges bound
    /// it by their max_resume_timeout. Default: "12h".
    #[serde(default, deserialize_with = "Millis::<1000, DAY>::deserialize")]
    ssh_resume_timeout: Option<Duration>,
    /// The same for sessions to all other ports. Default: "10m".
    #[serde(default, deserialize_with = "Millis::<1000, DAY>::deserialize")]
    resume_timeout: Option<Duration>,
}

impl ClientSettings {
    /// Finds each value on its own. `variable` returns environment variables by name.
    ///
    /// # Errors
    ///
    /// Returns an error if `client.toml` exists, but cannot be read or has an error, or if a certificate has no key.
    pub(crate) fn find(flags: &ClientArgs, variable: impl Fn(&str) -> Option<String>) -> CommandResult<Self> {
        let env = Environment::read(&variable);
        let file = env.client_file.as_deref().map(ClientConfigFile::read).transpose()?.unwrap_or_default();
        let path = env.client_file.clone().unwrap_or_default();
        let keys = |names| SettingPlaces { names, variable: &variable, file: &path };
        let server =
            keys(["--server", "TUNNEL_SERVER", "server"]).first(flags.server.clone(), file.server.clone());
        // A flag or variable with a server is meant for this command, so the links of the file do not apply.
        let is_named =
            server.as_ref().is_some_and(|server| !matches!(server.source, SettingSource::File(..)));
        let links = if is_named { None } else { file.links(&path, &env)? };
        let ca = keys(["--ca", "TUNNEL_CA", "ca"]).first(flags.ca.clone(), file.ca);
        let cert = keys(["--cert", "TUNNEL_CERT", "cert"]).first(flags.cert.clone(), file.cert);
        let key = keys(["--key", "TUNNEL_KEY", "key"]).first(flags.key.clone(), file.key);
        let password_file = keys(["--password-file", "TUNNEL_PASSWORD_FILE", "password_file"])
            .first(flags.password_file.clone(), file.password_file);
        // The user of links has a token instead of a password.
        let user = file.user.filter(|_| file.servers.is_none() || password_file.is_some());
        Ok(Self {
            server: server.unwrap_or_else(|| SourcedValue {
                value: DEFAULT_SERVER.to_owned(),
                source: SettingSource::Default,
            }),
            user: keys(["--user", "TUNNEL_USER", "user"]).first(flags.user.clone(), user),
            password_file,
            trust: ca.map_or(Trust::System, |ca| Trust::Ca(ca.value)),
            identity: match (cert, key) {
                (Some(cert), Some(key)) => Some(IdentityFiles { cert: cert.value, key: key.value }),
                (None, None) => None,
                (Some(given), None) | (None, Some(given)) => {
                    return Err(CommandError::usage(format!(
                        "{}: a certificate needs its key; set both files",
                        given.source
                    )));
                }
            },
            requires_tls: flags.ca.is_some() || flags.cert.is_some(),
            insecure: flags.insecure,
            links,
        })
    }
}

/// Returns the links in `client.toml`, or `None` if it has none.
///
/// # Errors
///
/// Returns an error if the file cannot be read or has an error, or if other users may read a secret.
pub fn links(env: &Environment) -> CommandResult<Option<UserLinkConfig>> {
    let Some(path) = &env.client_file else { return Ok(None) };
    ClientConfigFile::read(path)?.links(path, env)
}

/// Like [`links`], but this machine must be a device of a user.
pub(crate) fn joined(env: &Environment) -> CommandResult<UserLinkConfig> {
    links(env)?.ok_or_else(|| {
        let path = env.client_file.clone().unwrap_or_else(|| "client.toml".into());
        let hint = "get an invitation (`tunnel invite --user`) and run `tunnel join --user`";
        CommandError::unusable(format!("{} names no servers, or does not exist; {hint}", path.display()))
    })
}

/// Like [`links`], but a file that this user may not read is another user's.
pub(crate) fn links_if_readable(env: &Environment) -> CommandResult<Option<UserLinkConfig>> {
    let is_denied =
        |path: &PathBuf| File::open(path).is_err_and(|cause| cause.kind() == ErrorKind::PermissionDenied);
    if env.client_file.as_ref().is_some_and(is_denied) { Ok(None) } else { links(env) }
}

/// The places of one value: its flag, its environment variable, and its key in the file.
struct SettingPlaces<'a, V> {
    names: [&'static str; 3],
    variable: &'a V,
    file: &'a Path,
}

impl<V: Fn(&str) -> Option<String>> SettingPlaces<'_, V> {
    /// Returns the value of the first place that has one.
    fn first<T: From<String>>(&self, flag: Option<T>, in_file: Option<T>) -> Option<SourcedValue<T>> {
        let [option, name, key] = self.names;
        let setting = |value, source| SourcedValue { value, source };
        flag.map(|value| setting(value, SettingSource::Flag(option)))
            .or_else(|| {
                (self.variable)(name).map(|value| setting(value.into(), SettingSource::Variable(name)))
            })
            .or_else(|| in_file.map(|value| setting(value, SettingSource::File(key, self.file.to_owned()))))
    }
}

impl ClientConfigFile {
    /// Reads a file, which may be missing. Errors quote no unknown key's value, which may be a password.
    fn read(path: &Path) -> CommandResult<Self> {
        let text = match files::read_text(path) {
            Err(cause) if matches!(cause.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Ok(Self::default());
            }
            read => read.map_err(|cause| wrong(path, &format_args!("cannot read: {cause}")))?,
        };
        let parsed = read_file(&text, &Environment::default(), |table| table.fields::<Self>());
        let (mut file, _) = parsed.whole().map_err(|errors| wrong(path, &errors))?;
        if file.token.is_some() {
            refuse_readers(path)?;
        }
        let dir = path.parent().unwrap_or(Path::new("/"));
        let Self { password_file, ca, cert, key, token_file, .. } = &mut file;
        // Relative paths start at the file's folder, because a command may run in any folder.
        for name in [password_file, ca, cert, key, token_file].into_iter().flatten() {
            *name = dir.join(&*name);
        }
        file.websocket_ca.values_mut().for_each(|name| name.0 = dir.join(&name.0));
        Ok(file)
    }

    /// Returns the links, or `None` if there are none.
    fn links(&self, path: &Path, env: &Environment) -> CommandResult<Option<UserLinkConfig>> {
        // Without servers these keys have no effect, which their author would not notice.
        let Some(servers) = &self.servers else {
            let fields = [("device", self.device.is_some()), ("token", self.token.is_some())];
            let more = [
                ("token_file", self.token_file.is_some()),
                ("tls_server_name", self.tls_server_name.is_some()),
                ("websocket_ca", !self.websocket_ca.is_empty()),
                ("ssh_resume_timeout", self.ssh_resume_timeout.is_some()),
                ("resume_timeout", self.resume_timeout.is_some()),
            ];
            return match fields.into_iter().chain(more).find(|(_, is_set)| *is_set) {
                Some((key, _)) => Err(wrong(path, &format_args!("{key} requires servers"))),
                None => Ok(None),
            };
        };
        let field = |key, why: &dyn fmt::Display| wrong(path, &format_args!("{key}: {why}"));
        let servers = servers.iter().map(|server| server.parse().map_err(|why| field("servers", &why)));
        let servers: Vec<ServerEntry> = servers.collect::<Result<_, _>>()?;
        if servers.is_empty() {
            return Err(field("servers", &"is empty; name at least one HOST:PORT"));
        }
        if let Some(stray) = ServerEntry::stray_ca(&servers, &self.websocket_ca) {
            return Err(field("websocket_ca", &format_args!("{stray}: {EXPECTED_ENTRY}")));
        }
        let name = self.tls_server_name.as_ref().map(|name| name.parse()).transpose();
        let name = name.map_err(|why| field("tls_server_name", &why))?;
        let device = match &self.device {
            Some(device) => device.parse().map_err(|why| field("device", &why))?,
            None => device_of_this_machine()?,
        };
        let asked = ResumeTimeouts::default();
        Ok(Some(UserLinkConfig {
            servers: servers.iter().map(|server| server.address(name.as_ref(), &self.websocket_ca)).collect(),
            device,
            proof: self.credentials(path)?,
            ca: self.ca.clone(),
            proxy: env.proxy.clone(),
            resume_timeouts: ResumeTimeouts {
                ssh: self.ssh_resume_timeout.unwrap_or(asked.ssh),
                other: self.resume_timeout.unwrap_or(asked.other),
            },
        }))
    }

    fn identity(&self, path: &Path) -> CommandResult<Option<IdentityFiles>> {
        match (&self.cert, &self.key) {
            (None, None) => Ok(None),
            (Some(cert), Some(key)) => Ok(Some(IdentityFiles { cert: cert.clone(), key: key.clone() })),
            (Some(_), None) => Err(wrong(path, &"cert requires key")),
            (None, Some(_)) => Err(wrong(path, &"key requires cert")),
        }
    }

    fn credentials(&self, path: &Path) -> CommandResult<UserCredentials> {
        let tokens = match (&self.token, &self.token_file, self.identity(path)?) {
            (Some(_), None, None) => {
                // The file may change while links use it. Only its token may: links for another user need another
                // process.
                let is_for = (self.servers.clone(), self.user.clone(), self.device.clone());
                reloaded_token(path, move |text| {
                    let file: Self = toml::from_str(text).map_err(|cause| cause.message().to_owned())?;
                    if (file.servers, file.user, file.device) != is_for {
                        return Err(
                            "names other servers, another user or another device; restart this program"
                                .to_owned(),
                        );
                    }
                    file.token.ok_or_else(|| "has no token".to_owned())
                })
                .map_err(|why| wrong(path, &why))?
            }
            (None, Some(file), None) => reloaded_token(file, |text| Ok(SecretString::new(text.trim())))
                .map_err(|why| wrong(path, &format_args!("token_file: {why}")))?,
            (None, None, Some(identity)) => {
                refuse_readers(&identity.key)?;
                return Ok(UserCredentials::Certificate(identity));
            }
            _ => {
                let expected =
                    "set one of token, token_file, and cert with key; `tunnel join --user` writes it";
                return Err(wrong(path, &format_args!("servers: {expected}")));
            }
        };
        let user = self.user.as_ref().ok_or_else(|| wrong(path, &"a token requires user"))?;
        let user = user.parse().map_err(|why| wrong(path, &format_args!("user: {why}")))?;
        Ok(UserCredentials::Token(user, tokens))
    }
}

/// Returns the token in a file, which only this user may read; it is read again when the file changes. `token_in`
/// returns the token in the file's text, or what is wrong with it.
fn reloaded_token(
    path: &Path,
    token_in: impl Fn(&str) -> Result<SecretString, String> + Send + Sync + 'static,
) -> Result<ReloadedValue<Vec<SecretString>>, ReloadError> {
    let file = path.to_owned();
    ReloadedValue::file(path, move |text| {
        refuse_readers(&file).map_err(|error| error.text)?;
        let token = token_in(&String::from_utf8_lossy(text));
        Ok(vec![token.map_err(|why| format!("{}: {why}", file.display()))?])
    })
}

/// Returns the token in the text of a `client.toml`, if it has one.
pub(crate) fn token_in(text: &str) -> Option<String> {
    toml::from_str::<ClientConfigFile>(text).ok()?.token.map(|token| token.reveal().to_owned())
}

/// Returns the default name of this machine among a user's devices.
pub(crate) fn device_of_this_machine() -> CommandResult<DeviceName> {
    let host = uname().nodename().to_string_lossy().into_owned();
    host.split('.').next().unwrap_or_default().parse().map_err(|_| {
        CommandError::usage(format!(
            "the host's name {host:?} is no name of a device; set --device, or device in client.toml"
        ))
    })
}

/// Returns an error of a file.
fn wrong(path: &Path, why: &dyn fmt::Display) -> CommandError {
    CommandError::unusable(format!("{}: {why}", path.display()))
}

/// Refuses a secret that every user of this machine may read.
fn refuse_readers(path: &Path) -> CommandResult<()> {
    if is_world_readable(path) {
        let hint = format_args!("run: chmod o-rwx {}", path.display());
        return Err(wrong(
            path,
            &format_args!("contains a secret, and every user of this machine may read it; {hint}"),
        ));
    }
    Ok(())
}

/// The CONNECT port of a server on this machine, as `tunnel init` configures it.
const DEFAULT_SERVER: &str = "http://127.0.0.1:2222";

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::config::edge::ServerAddress;
    use tunnel_base::drain::Drain;
    use tunnel_net::reload::FileWatcher;

    fn found(flags: &ClientArgs, variables: &[(&str, &str)]) -> CommandResult<ClientSettings> {
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        ClientSettings::find(flags, variable)
    }

    #[tokio::test(start_paused = true)]
    async fn a_running_program_takes_a_new_token_only_for_its_servers_user_and_device() {
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("tunnel/client.toml");
        let write = |user: &str, token: &str| {
            let text = format!("servers = [\"a:9000\"]\nuser = \"{user}\"\ntoken = \"{token}\"\n");
            links(home.path(), &text, 0o600).0.unwrap().unwrap().proof
        };
        let UserCredentials::Token(_, tokens) = write("alice", "t1") else { panic!("a token") };
        let (drain, mut changes) = (Drain::new(), tokens.changes());
        let watcher = FileWatcher::new(&drain);
        watcher.watch("tokens", &tokens);
        write("alice", "t2");
        changes.changed().await.unwrap();
        assert_eq!(tokens.load()[0].reveal(), "t2");
        let mut states = watcher.changes();
        write("bob", "t3");
        states.changed().await.unwrap();
        let error = watcher.check().unwrap_err();
        assert!(error.contains("another user") && error.contains(&*file.to_string_lossy()), "{error}");
        assert_eq!(tokens.load()[0].reveal(), "t2");
        drain.finish(std::time::Duration::ZERO, std::future::pending()).await;
    }

    #[test]
    fn flags_override_the_environment_which_overrides_the_client_file() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join(".config/tunnel");
        std::fs::create_dir_all(&dir).unwrap();
        let text = "server = \"file:1\"\nuser = \"file\"\npassword_file = \"pw\"\nca = \"/abs/ca\"\ncert = \"me.crt\"\n\
                    key = \"me.key\"\n";
        std::fs::write(dir.join("client.toml"), text).unwrap();
        let at_home = ("HOME", home.path().to_str().unwrap());
        let flags = ClientArgs { server: Some("flag:1".into()), ..ClientArgs::default() };

        let settings = found(&flags, &[at_home, ("TUNNEL_SERVER", "env:1"), ("TUNNEL_USER", "env")]).unwrap();
        assert_eq!(settings.server.value, "flag:1");
        let user = settings.user.unwrap();
        assert_eq!((user.value.as_str(), user.source.to_string().as_str()), ("env", "TUNNEL_USER"));
        let password = settings.password_file.unwrap();
        assert_eq!(password.value, dir.join("pw"), "a path is relative to the file");
        assert!(password.source.to_string().starts_with("password_file in /"), "{}", password.source);
        assert_eq!(settings.trust, Trust::Ca("/abs/ca".into()));
        let identity = IdentityFiles { cert: dir.join("me.crt"), key: dir.join("me.key") };
        assert_eq!(settings.identity, Some(identity));
        let settings = found(&flags, &[at_home, ("TUNNEL_CERT", "/c"), ("TUNNEL_KEY", "/k")]).unwrap();
        assert_eq!(settings.identity.unwrap().cert, Path::new("/c"));
        let error = found(&ClientArgs::default(), &[("TUNNEL_CERT", "/c")]).unwrap_err();
        assert_eq!(error.text, "TUNNEL_CERT: a certificate needs its key; set both files");

        let other = ("XDG_CONFIG_HOME", "/nowhere");
        let settings = found(&ClientArgs::default(), &[at_home, other]).unwrap();
        assert_eq!((settings.server.value.as_str(), settings.user), (DEFAULT_SERVER, None));
    }

    /// Writes a `client.toml` of that mode, and returns its links, and the settings of plain CONNECT.
    fn links(
        home: &Path,
        text: &str,
        mode: u32,
    ) -> (CommandResult<Option<UserLinkConfig>>, CommandResult<ClientSettings>) {
        let path = home.join("tunnel/client.toml");
        std::fs::create_dir_all(home.join("tunnel")).unwrap();
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        let xdg = home.to_str().unwrap().to_owned();
        let variable = |name: &str| (name == "XDG_CONFIG_HOME").then(|| xdg.clone());
        (super::links(&Environment::read(variable)), ClientSettings::find(&ClientArgs::default(), variable))
    }

    #[test]
    fn the_links_of_a_device_have_servers_and_one_proof() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("tunnel");
        let read = |text: &str| links(home.path(), text, 0o600).0.unwrap();
        assert!(read("server = \"a:1\"\nuser = \"ops\"\n").is_none());
        let both = "servers = [\"a.example:9000\", \"[::1]:9\"]\nuser = \"alice\"\ndevice = \"Laptop\"\nca = \"ca.crt\"\n";
        let more = "tls_server_name = \"b\"\nwebsocket_ca = { \"[::1]:9\" = \"proxy.crt\" }\n";
        let found = read(&format!("{both}token = \"t1\"\n{more}")).unwrap();
        let token = |found: &UserLinkConfig| match &found.proof {
            UserCredentials::Token(user, tokens) => (user.to_string(), tokens.load()[0].reveal().to_owned()),
            other => panic!("{other:?}"),
        };
        let alice = |token: &str| ("alice".to_owned(), token.to_owned());
        assert_eq!(token(&found), alice("t1"));
        assert!(!format!("{found:?}").contains("t1"));
        let UserLinkConfig { servers, device, ca, .. } = found;
        let server = |at: &str, websocket_ca| ServerAddress {
            at: at.parse().unwrap(),
            dns: "b".parse().unwrap(),
            is_websocket: false,
            websocket_ca,
        };
        let proxy_ca = Some(dir.join("proxy.crt"));
        assert_eq!(servers, [server("a.example:9000", None), server("[::1]:9", proxy_ca)]);
        assert_eq!(ca, Some(dir.join("ca.crt")));
        assert_eq!(device.as_str(), "laptop");
        std::fs::write(dir.join("token"), "t2\n").unwrap();
        std::fs::set_permissions(dir.join("token"), Permissions::from_mode(0o600)).unwrap();
        assert_eq!(token(&read(&format!("{both}token_file = \"token\"\n")).unwrap()), alice("t2"));
        std::fs::set_permissions(dir.join("token"), Permissions::from_mode(0o644)).unwrap();
        let refused = links(home.path(), &format!("{both}token_file = \"token\"\n"), 0o600).0.unwrap_err();
        assert!(refused.text.contains("every user of this machine may read it"), "{refused}");
        let (found, settings) =
            links(home.path(), "servers = [\"a:1\"]\nca = \"ca\"\ncert = \"c\"\nkey = \"/k\"\n", 0o644);
        let identity = IdentityFiles { cert: dir.join("c"), key: "/k".into() };
        let proof = found.unwrap().unwrap().proof;
        assert!(matches!(&proof, UserCredentials::Certificate(shown) if *shown == identity), "{proof:?}");
        assert_eq!(settings.unwrap().identity, Some(identity));
    }

    #[test]
    fn a_client_file_with_a_readable_token_or_an_ambiguous_proof_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let token = "servers = [\"a:1\"]\nuser = \"alice\"\ntoken = \"secret-1\"\n";
        for (text, mode, expected) in [
            (token.to_owned(), 0o604, "every user of this machine may read it; run: chmod o-rwx /"),
            (
                format!("{token}token_file = \"t\"\n"),
                0o600,
                "set one of token, token_file, and cert with key",
            ),
            (format!("{token}cert = \"c\"\nkey = \"k\"\n"), 0o600, "set one of token"),
            (token.replace("user = \"alice\"\n", ""), 0o600, "a token requires user"),
            (token.replace("alice", "a/b"), 0o600, "user: \"a/b\" is not a user"),
            (token.replace("a:1", "a"), 0o600, "servers: \"a\" has no port"),
            (token.replace("\"a:1\"", ""), 0o600, "servers: is empty"),
            (token.replace("servers = [\"a:1\"]\n", ""), 0o600, "token requires servers"),
            (format!("{token}device = \"a_b\"\n"), 0o600, "device: \"a_b\" is not a device"),
            (format!("{token}cert = \"c\"\n"), 0o600, "cert requires key"),
            (
                format!("{token}websocket_ca = {{ \"a:2\" = \"c\" }}\n"),
                0o600,
                "websocket_ca: \"a:2\": expected an entry of servers",
            ),
        ] {
            let error = links(home.path(), &text, mode).0.unwrap_err();
            assert!(error.code == 78 && error.text.contains(expected), "{error}");
            assert!(!error.text.contains("secret-1"), "{error}");
        }
        assert_eq!(links(home.path(), token, 0o604).1.unwrap_err().code, 78);
    }

    #[test]
    fn servers_in_the_client_file_are_linked_to_unless_one_is_named_to_connect_to() {
        let home = tempfile::tempdir().unwrap();
        let xdg = ("XDG_CONFIG_HOME", home.path().to_str().unwrap());
        let text = "servers = [\"a:9000\"]\nca = \"ca.crt\"\nuser = \"alice\"\ntoken = \"secret-1\"\n";
        assert!(links(home.path(), text, 0o600).1.unwrap().links.is_some());
        assert!(found(&ClientArgs::default(), &[xdg, ("TUNNEL_SERVER", "c:1")]).unwrap().links.is_none());
        let flags = ClientArgs { server: Some("c:1".into()), ..ClientArgs::default() };
        assert!(found(&flags, &[xdg]).unwrap().links.is_none());
    }

    #[test]
    fn an_error_in_the_client_file_has_its_line_and_no_secret() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join("tunnel")).unwrap();
        let xdg = ("XDG_CONFIG_HOME", home.path().to_str().unwrap());
        for (text, expected) in [
            (
                "server = \"a:1\"\npassword = \"secret-1\"\n",
                "line 2: password: unknown key: did you mean password_file?",
            ),
            ("user = 7\ntokn = \"secret-1\"\n", "line 1: user: 7: expected a text"),
            ("user = 7\ntokn = \"secret-1\"\n", "line 2: tokn: unknown key: did you mean token?"),
            ("user = \"secret-1\n", "line 1: "),
        ] {
            std::fs::write(home.path().join("tunnel/client.toml"), text).unwrap();
            let error = found(&ClientArgs::default(), &[xdg]).unwrap_err();
            assert!(error.code == 78 && error.text.contains(expected), "{error}");
            assert!(!error.text.contains("secret-1"), "{error}");
        }
    }
}
