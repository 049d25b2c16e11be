//! Makes this machine a node of a cloud that has invited it.

mod asking;

use std::path::PathBuf;

use super::Failure;
use super::folder::Folder;
use super::init::{EdgeText, checked, folder_on_machine, random_token};
use crate::config::Environment;
use crate::config::edge::EdgeSettings;
use crate::edge::Edge;
use crate::enrol::Code;
use crate::names::{Host, NodeName, Target};
use asking::{Asking, NotJoined};

/// Which cloud, and as whom.
#[derive(Debug, Clone, clap::Args)]
pub struct Join {
    /// Where the cloud is, as its edges dial it.
    #[arg(value_name = "CLOUD:PORT")]
    pub cloud: Target,
    /// What `tunnel invite` has printed there.
    #[arg(long = "invite", value_name = "CODE")]
    pub code: Code,
    /// The node that the invitation is for: this machine's name from now on.
    #[arg(long, value_name = "NAME")]
    pub node: NodeName,
    /// The name in the cloud's certificate, where it is not the one that is dialled.
    #[arg(long, value_name = "NAME")]
    pub dns: Option<Host>,
    /// The folder that gets settings, authority and token; what is in it already stays.
    #[arg(long, value_name = "DIR", default_value = "/etc/tunnel")]
    pub to: PathBuf,
}

/// Joins, and writes what the edge needs; `env` says of proxies on the way. What was made, and what to do next, as lines for
/// the terminal. What was begun and may have been granted goes on when the same is asked again.
///
/// # Errors
///
/// The invitation does not count, the cloud cannot be reached, or nothing can be written here.
pub async fn run(asked: &Join, env: &Environment) -> Result<String, Failure> {
    let to = folder_on_machine("--to", &asked.to)?;
    // Whatever can fail here comes first: an invitation is used once.
    let folder = Folder::resume(&asked.to, ENTRIES.map(str::to_owned))?;
    let token = folder.write_once(TOKEN, &format!("{}\n", random_token()))?;
    let (server, dns) = (asked.cloud.to_string(), asked.dns.as_ref());
    let text = EdgeText { node: &asked.node, server: &server, dns, has_kubelet: false };
    folder.write_anew("edge.toml", &text.at(to))?;
    folder.write_anew(UNIT, &unit(to))?;
    let asking = Asking::new(asked, token.trim(), &folder, env)?;
    let authority = match asking.ask().await {
        Ok(authority) => authority,
        Err(NotJoined { failure, is_final }) => {
            if !is_final {
                // It may have been granted: the same token asks again.
                folder.keep();
            }
            return Err(failure);
        }
    };
    let written = folder.write_anew(AUTHORITY, &authority).and_then(|()| {
        let here = folder.unfinished().to_string_lossy().into_owned();
        checked(EdgeSettings::read(&text.at(&here), &Environment::default()), Edge::check)
    });
    match written {
        Ok(()) => folder.finish()?,
        Err(failure) => {
            folder.keep();
            return Err(failure);
        }
    }
    Ok(format!(
        "{node} has joined; in {to}, for this user alone: edge.toml, certs/ca.crt, token/token, {UNIT}\n\
         next, here:\n  tunnel --m=edge --c={to}/edge.toml\n\
         or, to have systemd start it now and whenever the machine starts:\n  systemctl enable --now {to}/{UNIT}\n",
        node = asked.node,
    ))
}

/// For systemd.
fn unit(to: &str) -> String {
    let program = std::env::current_exe().map_or_else(|_| "tunnel".into(), |path| path.display().to_string());
    format!(
        "[Unit]\n\
         Description=Edge of the tunnel\n\
         Wants=network-online.target\n\
         After=network-online.target\n\
         StartLimitIntervalSec=0\n\
         \n\
         [Service]\n\
         ExecStart={program} --m=edge --c={to}/edge.toml\n\
         Restart=always\n\
         RestartSec=5\n\
         RestartPreventExitStatus=64 77 78\n\
         RuntimeDirectory=tunnel\n\
         RuntimeDirectoryPreserve=yes\n\
         NoNewPrivileges=true\n\
         ProtectSystem=strict\n\
         ProtectHome=true\n\
         PrivateTmp=true\n\
         \n\
         [Install]\n\
         WantedBy=multi-user.target\n"
    )
}

/// What the folder gets.
const ENTRIES: [&str; 4] = ["edge.toml", "certs", "token", UNIT];
const TOKEN: &str = "token/token";
const AUTHORITY: &str = "certs/ca.crt";
const UNIT: &str = "tunnel-edge.service";
