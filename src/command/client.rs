//! The server that clients connect to, and how they log in: from flags, otherwise the environment, otherwise a file.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::command::CommandError;
use tunnel_base::files;

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

/// The server, and how a client logs in there. Each value has its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClientSettings {
    /// The CONNECT port.
    pub(crate) server: Setting<String>,
    pub(crate) user: Option<Setting<String>>,
    pub(crate) password_file: Option<Setting<PathBuf>>,
    pub(crate) ca: Option<Setting<PathBuf>>,
    /// Client certificate and its key.
    pub(crate) identity: Option<(Setting<PathBuf>, Setting<PathBuf>)>,
    /// Whether the password may cross a network unencrypted.
    pub(crate) insecure: bool,
}

/// A value, and where it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Setting<T> {
    pub(crate) value: T,
    pub(crate) source: Source,
}

/// Where a value was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// The command line, with this flag.
    Flag(&'static str),
    /// This environment variable.
    Variable(&'static str),
    /// This key of a file.
    File(&'static str, PathBuf),
    Default,
}

/// The contents of `client.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientFile {
    server: Option<String>,
    user: Option<String>,
    /// Relative to the file's directory, like the other paths.
    password_file: Option<PathBuf>,
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl ClientSettings {
    /// Finds each value on its own. `variable` returns environment variables by name.
    ///
    /// # Errors
    ///
    /// Returns an error if `client.toml` exists, but cannot be read or has an error, or if a certificate has no key.
    pub(crate) fn find(
        flags: &ClientArgs,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, CommandError> {
        let path = client_file(&variable);
        let file = path.as_deref().map(ClientFile::read).transpose()?.unwrap_or_default();
        let path = path.unwrap_or_default();
        let in_dir = |name: PathBuf| path.parent().map_or_else(|| name.clone(), |dir| dir.join(&name));
        let keys = |names| SettingKeys { names, variable: &variable, file: &path };
        let server = keys(["--server", "TUNNEL_SERVER", "server"]).first(flags.server.clone(), file.server);
        let cert = keys(["--cert", "TUNNEL_CERT", "cert"]).first(flags.cert.clone(), file.cert.map(in_dir));
        let key = keys(["--key", "TUNNEL_KEY", "key"]).first(flags.key.clone(), file.key.map(in_dir));
        let default = || Setting { value: DEFAULT_SERVER.to_owned(), source: Source::Default };
        Ok(Self {
            server: server.unwrap_or_else(default),
            user: keys(["--user", "TUNNEL_USER", "user"]).first(flags.user.clone(), file.user),
            password_file: keys(["--password-file", "TUNNEL_PASSWORD_FILE", "password_file"])
                .first(flags.password_file.clone(), file.password_file.map(in_dir)),
            ca: keys(["--ca", "TUNNEL_CA", "ca"]).first(flags.ca.clone(), file.ca.map(in_dir)),
            identity: match (cert, key) {
                (Some(cert), Some(key)) => Some((cert, key)),
                (None, None) => None,
                (Some(given), None) | (None, Some(given)) => {
                    return Err(CommandError::usage(format!(
                        "{}: a certificate needs its key; set both files",
                        given.source
                    )));
                }
            },
            insecure: flags.insecure,
        })
    }
}

/// The places of one value: its flag, its environment variable, and its key in the file.
struct SettingKeys<'a, V> {
    names: [&'static str; 3],
    variable: &'a V,
    file: &'a Path,
}

impl<V: Fn(&str) -> Option<String>> SettingKeys<'_, V> {
    /// Returns the value of the first place that has one.
    fn first<T: From<String>>(&self, flag: Option<T>, in_file: Option<T>) -> Option<Setting<T>> {
        let [option, name, key] = self.names;
        let setting = |value, source| Setting { value, source };
        flag.map(|value| setting(value, Source::Flag(option)))
            .or_else(|| (self.variable)(name).map(|value| setting(value.into(), Source::Variable(name))))
            .or_else(|| in_file.map(|value| setting(value, Source::File(key, self.file.to_owned()))))
    }
}

impl<T> Setting<T> {
    /// Returns true if the value was found on the command line.
    pub(crate) fn is_flag(&self) -> bool {
        matches!(self.source, Source::Flag(_))
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(name) | Self::Variable(name) => f.write_str(name),
            Self::File(key, path) => write!(f, "{key} in {}", path.display()),
            Self::Default => f.write_str("default server"),
        }
    }
}

impl ClientFile {
    /// Reads a file, which may be missing. Errors do not quote it, because somebody may put a password there.
    fn read(path: &Path) -> Result<Self, CommandError> {
        let wrong = |why: &dyn fmt::Display| CommandError::unusable(format!("{}: {why}", path.display()));
        let text = match files::read_text(path) {
            Err(cause) if matches!(cause.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Ok(Self::default());
            }
            read => read.map_err(|cause| wrong(&format_args!("cannot read: {cause}")))?,
        };
        toml::from_str(&text).map_err(|cause| {
            let before = cause.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            let line = before.matches('\n').count() + 1;
            wrong(&format_args!("line {line}: {}", cause.message()))
        })
    }
}

/// Returns the path of `client.toml`, as the XDG Base Directory Specification defines it.
fn client_file(variable: &impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let absolute = |name: &str| variable(name).map(PathBuf::from).filter(|dir| dir.is_absolute());
    let config = absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")));
    config.map(|dir| dir.join("tunnel/client.toml"))
}

/// The CONNECT port of a server on this machine, as `tunnel init` configures it.
const DEFAULT_SERVER: &str = "http://127.0.0.1:2222";

#[cfg(test)]
mod tests {
    use super::*;

    fn found(flags: &ClientArgs, variables: &[(&str, &str)]) -> Result<ClientSettings, CommandError> {
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        ClientSettings::find(flags, variable)
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
        assert_eq!((settings.server.value.as_str(), settings.server.is_flag()), ("flag:1", true));
        let user = settings.user.unwrap();
        assert_eq!((user.value.as_str(), user.source.to_string().as_str()), ("env", "TUNNEL_USER"));
        let password = settings.password_file.unwrap();
        assert_eq!(password.value, dir.join("pw"), "a path is relative to the file");
        assert!(password.source.to_string().starts_with("password_file in /"), "{}", password.source);
        assert_eq!(settings.ca.unwrap().value, Path::new("/abs/ca"));
        let (cert, key) = settings.identity.unwrap();
        assert_eq!([cert.value, key.value], [dir.join("me.crt"), dir.join("me.key")]);
        let settings = found(&flags, &[at_home, ("TUNNEL_CERT", "/c"), ("TUNNEL_KEY", "/k")]).unwrap();
        assert_eq!(settings.identity.unwrap().0.value, Path::new("/c"));
        let error = found(&ClientArgs::default(), &[("TUNNEL_CERT", "/c")]).unwrap_err();
        assert_eq!(error.text, "TUNNEL_CERT: a certificate needs its key; set both files");

        let other = ("XDG_CONFIG_HOME", "/nowhere");
        let settings = found(&ClientArgs::default(), &[at_home, other]).unwrap();
        assert_eq!((settings.server.value.as_str(), settings.user), (DEFAULT_SERVER, None));
    }

    #[test]
    fn an_error_in_the_client_file_has_its_line_and_no_secret() {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join("tunnel")).unwrap();
        let xdg = ("XDG_CONFIG_HOME", home.path().to_str().unwrap());
        for (text, expected) in [
            (
                "server = \"a:1\"\npassword = \"secret-1\"\n",
                "line 2: unknown field `password`, expected one of",
            ),
            ("user = 7\n", "line 1: invalid type"),
            ("user = \"secret-1\n", "line 1: "),
        ] {
            std::fs::write(home.path().join("tunnel/client.toml"), text).unwrap();
            let error = found(&ClientArgs::default(), &[xdg]).unwrap_err();
            assert!(error.code == 78 && error.text.contains(expected), "{error}");
            assert!(!error.text.contains("secret-1"), "{error}");
        }
    }
}
