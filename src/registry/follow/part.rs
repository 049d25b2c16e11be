//! Types for parts of Kubernetes' objects.

use std::net::IpAddr;

use serde::Deserialize;

/// A Node's addresses, as its kubelet says them.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(default)]
pub(crate) struct NodeStatus {
    addresses: Vec<NodeAddress>,
}

#[derive(Debug, Clone, Deserialize)]
struct NodeAddress {
    #[serde(rename = "type")]
    kind: String,
    address: String,
}

impl NodeStatus {
    /// Those of these kinds, all of them.
    pub(crate) fn of_kinds<const N: usize>(&self, kinds: [&'static str; N]) -> impl Iterator<Item = &str> {
        let all = self.addresses.iter().filter(move |address| kinds.contains(&address.kind.as_str()));
        all.map(|address| address.address.as_str())
    }

    /// The IP addresses of a kind, the first [`MOST_NODE_ADDRESSES`].
    pub(crate) fn ips<C: FromIterator<IpAddr>>(&self, kind: &'static str) -> C {
        let all = self.of_kinds([kind]).filter_map(|address| address.parse().ok());
        all.take(MOST_NODE_ADDRESSES).collect()
    }
}

/// Of a Node's addresses only so many are kept: its own kubelet writes them, and may be anybody's. Two of each family, and
/// their names, are the most that is usual.
pub(crate) const MOST_NODE_ADDRESSES: usize = 8;

/// Takes over from the whole type what a part of its objects is called. The part has its metadata in a field of that name.
macro_rules! part_of {
    ($part:ident, $whole:ty) => {
        impl Resource for $part {
            type DynamicType = ();
            type Scope = <$whole as Resource>::Scope;

            fn kind((): &()) -> Cow<'_, str> {
                <$whole>::kind(&())
            }

            fn group((): &()) -> Cow<'_, str> {
                <$whole>::group(&())
            }

            fn version((): &()) -> Cow<'_, str> {
                <$whole>::version(&())
            }

            fn plural((): &()) -> Cow<'_, str> {
                <$whole>::plural(&())
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

pub(crate) use part_of;
