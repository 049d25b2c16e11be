//! Whom an invitation is for: a node, nodes whose names match a pattern, or a user. Those nodes and the user's devices
//! take their names when they join.

use std::str::FromStr;

use tunnel_base::policy::NodeGlob;
use tunnel_proto::names::{DeviceName, NameError, NodeName, UserDevice, UserName};

/// A node, a pattern of nodes, a user, or a device of a user. As text `edge7`, `edge*`, `alice/` or `alice/laptop`: no
/// node's name has a slash or a star.
#[derive(derive_more::Display, Debug, Clone, PartialEq, Eq)]
pub enum Invitee {
    /// A node.
    Node(NodeName),
    /// All nodes whose names match, for a join key.
    Nodes(NodeGlob),
    /// A user with all her devices.
    #[display("{_0}/")]
    User(UserName),
    /// One device of a user.
    Device(UserDevice),
}

impl Invitee {
    /// Returns the text that identifies it in the store: names of nodes are in lower case.
    pub(crate) fn key(&self) -> String {
        if let Self::Node(node) = self { node.as_str().to_ascii_lowercase() } else { self.to_string() }
    }

    /// Returns true if an invitation for it lets that node or device join.
    pub(crate) fn admits(&self, joiner: &Self) -> bool {
        match (self, joiner) {
            (Self::Node(invited), Self::Node(node)) => invited == node,
            (Self::Nodes(pattern), Self::Node(node)) => pattern.matches(node),
            (Self::User(user), Self::Device(device)) => *user == device.user,
            _ => false,
        }
    }

    /// Returns the node, if it is one.
    pub fn node(&self) -> Option<&NodeName> {
        if let Self::Node(node) = self { Some(node) } else { None }
    }

    /// Returns the user, unless it is about nodes.
    pub fn user(&self) -> Option<&UserName> {
        if let Self::User(user) | Self::Device(UserDevice { user, .. }) = self { Some(user) } else { None }
    }

    /// Returns the device, if it is one.
    pub fn device(&self) -> Option<&DeviceName> {
        if let Self::Device(device) = self { Some(&device.device) } else { None }
    }
}

impl FromStr for Invitee {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Ok(match text.split_once('/') {
            None => match text.parse() {
                Ok(pattern) if text.contains('*') => Self::Nodes(pattern),
                _ => Self::Node(text.parse()?),
            },
            Some((user, "")) => Self::User(user.parse()?),
            Some(_) => Self::Device(text.parse()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_subject_reads_back_as_written_and_only_a_node_has_neither_slash_nor_star(
            text in "[A-Za-z0-9@._*/-]{0,20}"
        ) {
            if let Ok(subject) = text.parse::<Invitee>() {
                prop_assert_eq!(&subject.to_string().parse::<Invitee>().unwrap(), &subject);
                prop_assert_eq!(&subject.key().parse::<Invitee>().unwrap(), &subject);
                prop_assert_eq!(subject.node().is_some(), !subject.key().contains(['/', '*']));
            }
        }
    }

    #[test]
    fn texts_that_are_no_subject_are_refused() {
        for bad in ["", "/", "/laptop", "a/b/c", "alice//", "al ice/", "alice/lap_top", "shop-*/", "shop *"] {
            assert!(bad.parse::<Invitee>().is_err(), "{bad}");
        }
    }
}
