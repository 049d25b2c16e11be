//! Keys of listeners: an address (our form) or a port on all interfaces (SuperEdge's form).

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use crate::config::admin_listener::{LISTEN, unix_path};
use crate::config::table::ConfigTableReader;
use tunnel_proto::serde_as_text;

/// The address of a listener that may be a port or a Unix socket.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
pub(crate) enum ListenAddress {
    /// An address with a port.
    Port(SocketAddr),
    /// A Unix socket.
    #[display("unix:{}", _0.display())]
    Unix(PathBuf),
}

impl FromStr for ListenAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        let port = text.parse().map(Self::Port);
        port.ok()
            .or_else(|| unix_path(text).map(Self::Unix))
            .ok_or("expected ip:port, for example 127.0.0.1:8000, or unix:/path")
    }
}

serde_as_text!(ListenAddress);

/// Records an error if a listener's table is present without an address.
pub(crate) fn require(table: &ConfigTableReader<'_>) {
    if table.is_present() && !table.has(LISTEN) {
        table.error(LISTEN, None, "set the address to listen on: listen = \"ip:port\"");
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Environment;
    use crate::config::access::AccessConfig;
    use crate::config::access::AuthMethods;
    use crate::config::access::PasswordFile;
    use crate::config::listen_tls::PortTlsState;
    use crate::config::listen_tls::require_names;
    use crate::config::table::read_file;

    const SSH: &str = "[ssh]\nallow_from = [\"10.0.0.0/8\"]\nproxy_protocol = [\"10.0.0.5\"]\nauth = \"basic\"\n\
                       users = \"/ssh\"\nrules = [{ ports = [22] }]\n[module]\n";

    const PASSWORD: AuthMethods = AuthMethods { password: true, tls: PortTlsState::Unsupported };
    const PASSWORD_OVER_TLS: AuthMethods =
        AuthMethods { password: true, tls: PortTlsState::On { client_certificate: false } };
    const NO_METHOD: AuthMethods = AuthMethods { password: false, tls: PortTlsState::Unsupported };
    const CERTIFICATE_NOT_REQUESTED: AuthMethods =
        AuthMethods { password: false, tls: PortTlsState::On { client_certificate: false } };
    const CERTIFICATE: AuthMethods =
        AuthMethods { password: false, tls: PortTlsState::On { client_certificate: true } };

    /// Returns the rules of `ssh` and of another module, and the errors and warnings.
    fn read(text: &str, proofs: AuthMethods) -> (AccessConfig, AccessConfig, Vec<String>) {
        let reading = read_file(text, &Environment::default(), |file| {
            let mut table = file.table("ssh");
            let ssh = AccessConfig::read(&mut table, PASSWORD, &AccessConfig::default());
            table.finish();
            let mut table = file.table("module");
            if proofs.tls != PortTlsState::Unsupported {
                table.ignore("client_ca");
            }
            let module = AccessConfig::read(&mut table, proofs, &ssh);
            require_names(&table);
            let at = "0.0.0.0:1".parse().unwrap();
            module.warn_if_open(table.key("listen"), at, proofs, "every node", &mut table.report());
            table.finish();
            (ssh, module)
        });
        let (ssh, module) = reading.settings;
        let errors = reading.errors.iter().map(ToString::to_string);
        (ssh, module, errors.chain(reading.warnings.iter().map(ToString::to_string)).collect())
    }

    #[test]
    fn a_listener_inherits_absent_access_keys_from_the_connect_listener() {
        let (ssh, module, reported) = read(SSH, PASSWORD_OVER_TLS);
        assert_eq!((&module, reported), (&ssh, vec![]));
        assert_eq!(module.auth.unwrap().key, "ssh.users");
    }

    #[test]
    fn a_listeners_access_keys_override_only_its_own() {
        let own = "allow_from = [\"192.0.2.0/24\"]\nproxy_protocol = []\nusers = \"/own\"\nrules = []\n";
        let (ssh, module, reported) = read(&format!("{SSH}{own}"), PASSWORD_OVER_TLS);
        assert_eq!(reported, [""; 0]);
        assert!(!ssh.rules.is_empty() && module.rules.is_empty());
        assert!(!ssh.proxy_protocol.is_empty() && module.proxy_protocol.is_empty());
        let from = module.allow_from.unwrap();
        assert!(from.contains("192.0.2.1".parse().unwrap()) && !from.contains("10.0.0.1".parse().unwrap()));
        assert_eq!(module.auth, Some(PasswordFile { users: "/own".into(), key: "module.users".into() }));
        let (_, module, reported) = read(&format!("{SSH}auth = \"none\""), PASSWORD);
        assert_eq!((module.auth, reported), (None, vec![]), "restricted by allow_from");
    }

    #[test]
    fn basic_auth_is_an_error_for_a_protocol_without_passwords() {
        for text in [SSH, "[module]\nauth = \"basic\"\nusers = \"/own\""] {
            let (_, module, reported) = read(text, NO_METHOD);
            assert_eq!(module.auth, None);
            assert!(
                reported[0].contains("module.auth: \"basic\"") && reported[0].contains("auth = \"none\""),
                "{reported:?}"
            );
        }
        assert_eq!(read(&format!("{SSH}auth = \"none\""), NO_METHOD).2, [""; 0]);
        assert_eq!(read(SSH, CERTIFICATE).2, [""; 0], "the certificate replaces the password");
    }

    #[test]
    fn names_require_client_certificates() {
        let text = "[module]\nnames = [\"system:*\", \"*.example.org\"]";
        let (_, module, reported) = read(text, CERTIFICATE);
        let may = |name| module.names.iter().any(|glob| glob.matches(name));
        assert!(may("System:kube-apiserver") && may("a.example.org") && !may("example.org"));
        assert_eq!(reported, [""; 0]);
        assert!(read(text, CERTIFICATE_NOT_REQUESTED).2[0].contains("set client_ca"));
        assert!(read(text, NO_METHOD).2[0].contains("module.names: unknown key"));
        let users = "[module]\nrules = [{ users = [\"kube-apiserver\"] }]";
        assert_eq!(read(users, CERTIFICATE).2, [""; 0]);
        assert!(read(users, CERTIFICATE_NOT_REQUESTED).2[0].contains("no client has a user name"));
    }

    #[test]
    fn client_ca_requires_a_list_of_names() {
        let (_, _, reported) = read("[module]\nclient_ca = \"/ca\"", CERTIFICATE);
        assert!(
            reported.len() == 1 && reported[0].contains("module.names: missing: list the names"),
            "{reported:?}"
        );
        assert!(reported[0].contains("[\"*\"] accepts every certificate"), "{reported:?}");
        let (_, module, reported) = read("[module]\nclient_ca = \"/ca\"\nnames = [\"*\"]", CERTIFICATE);
        assert_eq!(reported, [""; 0]);
        assert!(module.names[0].matches("anyone") && module.names[0].matches_everything());
        for wrong in ["[]", "[\"\"]", "1"] {
            let reported = read(&format!("[module]\nclient_ca = \"/ca\"\nnames = {wrong}"), CERTIFICATE).2;
            assert!(reported.len() == 1 && !reported[0].contains("missing"), "{reported:?}");
        }
    }

    #[test]
    fn an_open_listener_is_a_warning_with_the_keys_that_restrict_it() {
        for (proofs, hint) in [
            (PASSWORD, "set auth = \"basic\" or allow_from"),
            (PASSWORD_OVER_TLS, "set client_ca, auth = \"basic\" or allow_from"),
            (CERTIFICATE_NOT_REQUESTED, "set client_ca or allow_from"),
            (NO_METHOD, "; set allow_from"),
        ] {
            let reported = read("[module]", proofs).2;
            let begin =
                "module.listen: anyone who reaches 0.0.0.0:1 can reach every node without authentication";
            assert!(reported[0].starts_with(begin) && reported[0].ends_with(hint), "{reported:?}");
        }
        for closed in ["allow_from = [\"10.0.0.0/8\"]", "auth = \"basic\"\nusers = \"/own\""] {
            assert_eq!(read(&format!("[module]\n{closed}"), PASSWORD_OVER_TLS).2, [""; 0], "{closed}");
        }
        assert_eq!(read("[module]", CERTIFICATE).2, [""; 0]);
    }
}
