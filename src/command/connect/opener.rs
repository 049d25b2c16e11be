//! Opening sessions as the settings say: at a CONNECT port, or over a link of this process.

use crate::admission::denial::Denial;
use crate::command::client::ClientSettings;
use crate::command::connect::port::ConnectPortClient;
use crate::command::connect::session::{ConnectSession, ConnectStream};
use crate::command::{CommandError, CommandResult};
use crate::uplink::client::{UserLinkError, UserUplinks};
use crate::uplink::path_report::{PathReport, PrintLine};
use tunnel_proto::names::Target;

/// Opens sessions: at a CONNECT port, or over links of this process.
pub(crate) enum SessionOpener {
    Port(ConnectPortClient),
    Links(Box<UserUplinks>, PrintLine),
}

impl SessionOpener {
    /// Returns the CONNECT port that the settings name. Links to their servers instead if they name none.
    pub(crate) async fn reach(settings: ClientSettings, print_line: PrintLine) -> CommandResult<Self> {
        let Some(links) = settings.links else { return Ok(Self::Port(ConnectPortClient::new(&settings)?)) };
        let links = UserUplinks::connect(links).await.map_err(|why| no_link(&why))?;
        Ok(Self::Links(Box::new(links), print_line))
    }

    /// Checks early that sessions may be opened.
    pub(super) async fn check(&self) -> CommandResult<()> {
        match self {
            Self::Port(port) => port.check_password_path().await,
            Self::Links(..) => Ok(()),
        }
    }

    /// Opens a session to a target. Cancel safe.
    pub(crate) async fn open(&self, target: &Target) -> CommandResult<ConnectSession> {
        let (links, print_line) = match self {
            Self::Port(port) => return port.open(target).await,
            Self::Links(links, print_line) => (links, print_line.clone()),
        };
        let session = links.open(target).await;
        let session = session.map_err(|error| denied(&Denial::of_user(error.why, &links.route)))?;
        let from = "the servers".to_owned();
        let trace = session.id().to_string();
        let report = PathReport::new(target.clone(), links, print_line);
        Ok(ConnectSession { stream: ConnectStream::Link(session, report), from, trace })
    }

    /// Closes the links of this process.
    pub(super) async fn close(self) {
        if let Self::Links(links, _) = self {
            links.close().await;
        }
    }
}

/// Returns the error of a command that needs links, if there are none.
pub(crate) fn no_link(why: &UserLinkError) -> CommandError {
    let text = format!("cannot link to a server: {why}");
    match why {
        UserLinkError::Config(_) => CommandError::unusable(text),
        UserLinkError::Denied(_) => CommandError::refused(text),
        UserLinkError::Unreachable(_) => CommandError::unavailable(text),
    }
}

/// Returns the error of a session that was not opened over a link.
fn denied(denial: &Denial) -> CommandError {
    let text = format!("{denial}\n  hint: {}", denial.next_step());
    if denial.is_forbidden() { CommandError::refused(text) } else { CommandError::unavailable(text) }
}
