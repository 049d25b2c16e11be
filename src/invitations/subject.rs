//! Whom an invitation is for: a node, or a user, each of whose devices takes its name when it joins.

use std::fmt;
use std::str::FromStr;

use tunnel_base::names::{ClientName, DeviceName, NameError, NodeName, UserName};

/// A node, a user, or a device of a user. As text `edge7`, `alice/` or `alice/laptop`: no node's name has a slash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// A node.
    Node(NodeName),
    /// A user with all her devices.
    User(UserName),
    /// One device of a user.
    Device(ClientName),
}

impl Subject {
    /// Returns the text that identifies it in the store: names of nodes are in lower case.
    pub(crate) fn key(&self) -> String {
        match self {
            Self::Node(node) => node.as_str().to_ascii_lowercase(),
            Self::User(_) | Self::Device(_) => self.to_string(),
        }
    }

    /// Returns whom the invitation must be for by which it joins.
    pub(crate) fn invitee(&self) -> Self {
        match self {
            Self::Device(client) => Self::User(client.user.clone()),
            Self::Node(_) | Self::User(_) => self.clone(),
        }
    }

    /// Returns the node, if it is one.
    pub fn node(&self) -> Option<&NodeName> {
        match self {
            Self::Node(node) => Some(node),
            Self::User(_) | Self::Device(_) => None,
        }
    }

    /// Returns the user, unless it is a node.
    pub fn user(&self) -> Option<&UserName> {
        match self {
            Self::User(user) | Self::Device(ClientName { user, .. }) => Some(user),
            Self::Node(_) => None,
        }
    }

    /// Returns the device, if it is one.
    pub fn device(&self) -> Option<&DeviceName> {
        match self {
            Self::Device(client) => Some(&client.device),
            Self::Node(_) | Self::User(_) => None,
        }
    }
}

impl FromStr for Subject {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Ok(match text.split_once('/') {
            None => Self::Node(text.parse()?),
            Some((user, "")) => Self::User(user.parse()?),
            Some(_) => Self::Device(text.parse()?),
        })
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => node.fmt(f),
            Self::User(user) => write!(f, "{user}/"),
            Self::Device(client) => client.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_subject_reads_back_as_written_and_only_a_node_has_no_slash(text in "[A-Za-z0-9@._/-]{0,20}") {
            if let Ok(subject) = text.parse::<Subject>() {
                prop_assert_eq!(&subject.to_string().parse::<Subject>().unwrap(), &subject);
                prop_assert_eq!(&subject.key().parse::<Subject>().unwrap(), &subject);
                prop_assert_eq!(subject.node().is_some(), !subject.key().contains('/'));
            }
        }
    }

    #[test]
    fn texts_that_are_no_subject_are_refused() {
        for bad in ["", "/", "/laptop", "a/b/c", "alice//", "al ice/", "alice/lap_top"] {
            assert!(bad.parse::<Subject>().is_err(), "{bad}");
        }
    }
}
