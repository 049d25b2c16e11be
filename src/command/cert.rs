//! `tunnel cert`: certificates of the CA that `tunnel init` has made.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Subcommand, value_parser};

use crate::command::file_edit::{self, FileEdit};
use crate::command::init::{
    APISERVER, DAY, client_folders, read_authority, refused, write_client, write_issued,
};
use crate::command::machine_files::host_of_server;
use crate::command::output_dir::OutputDir;
use crate::command::{CommandError, CommandResult, examples};
use tunnel_net::pki::CertificateAuthority;
use tunnel_proto::names::Host;

/// Commands of `tunnel cert`.
#[derive(Debug, Clone, Subcommand)]
pub enum CertCommand {
    /// Issue a certificate and its key into a new folder.
    #[command(after_help = examples("tunnel cert issue"))]
    Issue(IssueArgs),
    /// Renew certificates and keys of a folder that `tunnel init` has made. Names and CA stay; no other file changes.
    #[command(after_help = examples("tunnel cert renew"))]
    Renew(SigningCaArgs),
}

/// Arguments of `tunnel cert issue`.
#[derive(Debug, Clone, clap::Args)]
pub struct IssueArgs {
    /// The kind of certificate.
    #[command(subcommand)]
    pub kind: CertificateKind,
    /// The CA.
    #[command(flatten)]
    pub ca: SigningCaArgs,
    /// Folder for the files. [default: a new one in --dir]
    #[arg(long, value_name = "DIR", global = true)]
    pub out_dir: Option<PathBuf>,
}

/// The kind of certificate that `tunnel cert issue` makes.
#[derive(Debug, Clone, Subcommand)]
pub enum CertificateKind {
    /// A server's certificate, for edges, peers and clients.
    #[command(after_help = examples("tunnel cert issue server"))]
    Server {
        /// Name or address at which edges reach the server; may be repeated.
        #[arg(long = "name", value_name = "HOST", required = true, value_parser = host_of_server)]
        names: Vec<Host>,
    },
    /// A client's certificate.
    #[command(after_help = examples("tunnel cert issue client"))]
    Client {
        /// Name in the certificate, which `names` of the listener's table contains.
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// The certificate of a client of the egress port, for kube-apiserver with its selector's file.
    #[command(after_help = examples("tunnel cert issue egress-client"))]
    EgressClient {
        /// Name in the certificate, which `names` of [server.egress] contains.
        #[arg(value_name = "NAME")]
        name: String,
        /// Host of the egress port in kube-apiserver's selector.
        #[arg(
            long,
            value_name = "HOST",
            required_if_eq("name", "system:kube-apiserver"),
            value_parser = host_of_server
        )]
        server: Option<Host>,
    },
}

/// The CA that signs.
#[derive(Debug, Clone, clap::Args)]
pub struct SigningCaArgs {
    /// Folder that `tunnel init` has made.
    #[arg(long, value_name = "DIR", default_value = "tunnel-files", global = true)]
    pub dir: PathBuf,
    /// Certificate (PEM) of the CA that signs. [default: ca.crt in --dir]
    #[arg(long, value_name = "FILE", requires = "ca_key", global = true)]
    pub ca_cert: Option<PathBuf>,
    /// Its key (PEM). [default: ca.key in --dir]
    #[arg(long, value_name = "FILE", requires = "ca_cert", global = true)]
    pub ca_key: Option<PathBuf>,
    /// Validity in days, at most that of the CA.
    #[arg(long, default_value_t = 365, value_parser = value_parser!(u32).range(1..=3650), global = true)]
    pub days: u32,
}

impl SigningCaArgs {
    fn authority(&self) -> CommandResult<CertificateAuthority> {
        let path = |given: &Option<PathBuf>, name| given.clone().unwrap_or_else(|| self.dir.join(name));
        let flag = if self.ca_cert.is_some() { "--ca-cert" } else { "--dir" };
        let authority = read_authority(flag, &path(&self.ca_cert, "ca.crt"), &path(&self.ca_key, "ca.key"))?;
        Ok(authority.signing_for(DAY * self.days))
    }
}

/// Runs a command of `tunnel cert`. Returns lines for the terminal. Blocks on the disk.
///
/// # Errors
///
/// Returns an error if the CA cannot sign, or a file cannot be read or written.
pub fn run(cert_args: &CertCommand) -> CommandResult {
    match cert_args {
        CertCommand::Issue(cert_args) => issue(cert_args),
        CertCommand::Renew(cert_args) => renew(cert_args),
    }
}

fn issue(cert_args: &IssueArgs) -> CommandResult {
    let authority = cert_args.ca.authority()?;
    // All names are known before a file is made: the folder refuses to overwrite an earlier certificate.
    let mut files = vec!["client.crt", "client.key", "ca.crt"];
    let (folder, next) = match &cert_args.kind {
        CertificateKind::Server { names } => {
            files = vec!["server.crt", "server.key", "ca.crt"];
            let first = names.first().map(ToString::to_string).unwrap_or_default();
            let next = "copy server.crt and server.key over cert and key of [server.links] at the server";
            (format!("server-{}", first.replace(':', "-")), next.to_owned())
        }
        CertificateKind::Client { name } => (
            client_folder(name)?,
            format!("add {name:?} to names of the listener's table in the servers' config"),
        ),
        CertificateKind::EgressClient { name, .. } => {
            files.extend((name == APISERVER).then_some("egress-selector.yaml"));
            (client_folder(name)?, format!("add {name:?} to names of [server.egress] in the servers' config"))
        }
    };
    let out = cert_args.out_dir.clone().unwrap_or_else(|| cert_args.ca.dir.join(folder));
    let folder = OutputDir::start(&out, files.iter().map(|file| (*file).to_owned()))?;
    match &cert_args.kind {
        CertificateKind::Server { names } => {
            write_issued(&folder, "server", &authority.server(names).map_err(|cause| refused(&cause))?)?;
            folder.write("ca.crt", authority.cert())?;
        }
        CertificateKind::Client { name } => write_client(name, "", None, &authority, &folder)?,
        CertificateKind::EgressClient { name, server } => {
            write_client(name, "", server.as_ref(), &authority, &folder)?;
        }
    }
    folder.finish()?;
    Ok(format!("created in {}, for this user only: {}\nnext: {next}\n", out.display(), files.join(", ")))
}

/// Returns the folder for a client's files.
fn client_folder(name: &str) -> CommandResult {
    client_folders("NAME", &[name.to_owned()]).map(|mut folders| folders.remove(0))
}

/// Renews each certificate of the folder that the CA has issued. Either file of a pair is replaced at once; a program
/// that reads them between the two keeps the earlier pair.
fn renew(cert_args: &SigningCaArgs) -> CommandResult {
    let authority = cert_args.authority()?;
    let mut text = String::new();
    let mut renewed = 0;
    for cert in certificates(&cert_args.dir)? {
        let edit = FileEdit::start(&cert)?;
        let issued = match authority.renew(&edit.text) {
            Ok(issued) => issued,
            Err(cause) => {
                // Writing to a String cannot fail.
                let _ = writeln!(text, "skipped {}: {cause}", cert.display());
                continue;
            }
        };
        let key = cert.with_extension("key");
        let before = fs::read_to_string(&key);
        let before = before
            .map_err(|cause| CommandError::unusable(format!("cannot read {}: {cause}", key.display())))?;
        file_edit::replace(&key, issued.key())?;
        if let Err(error) = edit.replace(issued.cert()) {
            // The earlier pair must match again.
            file_edit::replace(&key, &before)?;
            return Err(error);
        }
        renewed += 1;
        let _ = writeln!(text, "renewed {} and its key, for {} days", cert.display(), cert_args.days);
    }
    if renewed == 0 {
        let dir = cert_args.dir.display();
        return Err(CommandError::unusable(format!(
            "{text}{dir} contains no certificate of this CA; name the folder that tunnel init has made with --dir"
        )));
    }
    if text.matches("server.crt and").count() > 1 {
        text += "note: servers use one of these server.crt, that which you copied to them last: each has the names of its `tunnel cert issue`\n";
    }
    Ok(format!(
        "{text}next: copy each pair over the earlier one on its machines; servers and edges reload it within 6 s\n"
    ))
}

/// Returns the certificates with a key in the folder and its subfolders, sorted; not the CA's.
fn certificates(dir: &Path) -> CommandResult<Vec<PathBuf>> {
    let unreadable = |cause| CommandError::unusable(format!("cannot read {}: {cause}", dir.display()));
    let mut folders = vec![dir.to_owned()];
    for entry in fs::read_dir(dir).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        folders.push(path.join("certs"));
        folders.push(path);
    }
    let mut found = Vec::new();
    for folder in folders {
        // Files, and subfolders without certificates.
        let Ok(entries) = fs::read_dir(folder) else { continue };
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let certs = paths.filter(|path| path.extension().is_some_and(|extension| extension == "crt"));
        found.extend(certs.filter(|path| path.with_extension("key").exists() && *path != dir.join("ca.crt")));
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use clap::Parser as _;

    use super::*;
    use crate::command::{Args, Command, init};

    fn tunnel(line: &[&str]) -> CommandResult {
        match Args::parse_from([&["tunnel"], line].concat()).command {
            Command::Init(cert_args) => init::run(&cert_args),
            Command::Cert(cert_args) => run(&cert_args),
            other => panic!("{other:?}"),
        }
    }

    /// Makes a folder by `tunnel init`. Returns its path.
    fn folder(place: &Path) -> String {
        let dir = place.join("files").display().to_string();
        let names = ["--name", "cloud.test", "--name", "10.0.0.1", "--node", "node1", "--egress-client", "a"];
        tunnel(&[&["init", &dir][..], &names].concat()).unwrap();
        dir
    }

    /// Returns the content of every file in the folder.
    fn contents(dir: &Path) -> Vec<(PathBuf, String)> {
        let mut found = Vec::new();
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                found.extend(contents(&path));
            } else {
                found.push((path.clone(), fs::read_to_string(&path).unwrap()));
            }
        }
        found.sort();
        found
    }

    #[test]
    fn cert_renew_changes_only_certificates_and_keys() {
        let place = tempfile::tempdir().unwrap();
        let dir = folder(place.path());
        let before = contents(Path::new(&dir));
        let output = tunnel(&["cert", "renew", "--dir", &dir]).unwrap();
        let after = contents(Path::new(&dir));
        let changed: Vec<_> = before
            .iter()
            .zip(&after)
            .filter(|(before, after)| {
                assert_eq!(before.0, after.0);
                before.1 != after.1
            })
            .map(|(before, _)| before.0.strip_prefix(&dir).unwrap().display().to_string())
            .collect();
        let pairs = [
            "client-a/client.crt",
            "client-a/client.key",
            "server/certs/server.crt",
            "server/certs/server.key",
        ];
        assert_eq!(changed, pairs, "{output}");
        assert!(!output.contains("note:"), "{output}");
        let key = Path::new(&dir).join("server/certs/server.key");
        assert_eq!(fs::metadata(key).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn cert_renew_with_another_ca_is_refused_and_changes_nothing() {
        let place = tempfile::tempdir().unwrap();
        let dir = folder(place.path());
        let other = tempfile::tempdir().unwrap();
        let foreign = folder(other.path());
        let [cert, key] = ["ca.crt", "ca.key"].map(|file| format!("{foreign}/{file}"));
        let before = contents(Path::new(&dir));
        let args = ["cert", "renew", "--dir", &dir, "--ca-cert", &cert, "--ca-key", &key];
        let refused = tunnel(&args).unwrap_err();
        assert!(refused.code == 78 && refused.text.contains("was issued by another CA"), "{refused}");
        assert_eq!(contents(Path::new(&dir)), before);
        fs::remove_file(Path::new(&dir).join("ca.key")).unwrap();
        let refused = tunnel(&["cert", "renew", "--dir", &dir]).unwrap_err();
        assert!(refused.code == 78 && refused.text.contains("ca.key"), "{refused}");
    }

    #[test]
    fn cert_issue_writes_a_new_folder_and_overwrites_nothing() {
        let place = tempfile::tempdir().unwrap();
        let dir = folder(place.path());
        tunnel(&["cert", "issue", "server", "--name", "b.test", "--dir", &dir]).unwrap();
        tunnel(&["cert", "issue", "client", "b", "--dir", &dir]).unwrap();
        let apiserver = ["egress-client", "system:kube-apiserver", "--server", "b.test"];
        let output = tunnel(&[&["cert", "issue", "--dir", &dir][..], &apiserver].concat()).unwrap();
        assert!(output.contains("add \"system:kube-apiserver\" to names of [server.egress]"), "{output}");
        let there = |file: &str| Path::new(&dir).join(file).exists();
        assert!(there("server-b.test/server.key") && there("client-b/client.crt"));
        assert!(there("client-system-kube-apiserver/egress-selector.yaml"));
        let renewed = tunnel(&["cert", "renew", "--dir", &dir]).unwrap();
        let note = "note: servers use one of these server.crt, that which you copied to them last: ";
        assert!(renewed.contains(note), "{renewed}");
        let again = tunnel(&["cert", "issue", "client", "b", "--dir", &dir]).unwrap_err();
        assert_eq!(again.code, 73);
        let bad = tunnel(&["cert", "issue", "client", "a*", "--dir", &dir]).unwrap_err();
        assert!(bad.code == 64 && bad.text.contains("NAME \"a*\": expected"), "{bad}");
    }
}
