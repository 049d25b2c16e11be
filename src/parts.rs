//! The parts of the program that a build may lack: cargo's features.

/// `Ok` if the part is compiled in, otherwise the reason why it cannot be used, with a hint.
pub(crate) type FeatureSupport = Result<(), &'static str>;

/// The server, its doctor, and the commands that make and keep its files.
pub(crate) const SERVER: FeatureSupport = if cfg!(feature = "server") {
    Ok(())
} else {
    Err("this program was built without the server; build it with cargo's feature \"server\"")
};
/// The edge, its doctor, and how a machine joins as a node.
pub(crate) const EDGE: FeatureSupport = if cfg!(feature = "edge") {
    Ok(())
} else {
    Err("this program was built without the edge; build it with cargo's feature \"edge\"")
};
/// All that talks to kube-apiserver.
pub(crate) const KUBERNETES: FeatureSupport = if cfg!(feature = "kubernetes") {
    Ok(())
} else {
    Err("this program was built without Kubernetes; build it with cargo's feature \"kubernetes\"")
};
/// SuperEdge's config files, and links to its programs.
pub(crate) const SUPEREDGE: FeatureSupport = tunnel_link::SUPEREDGE;

/// The parts by the names of their features.
const ALL: [(&str, FeatureSupport); 4] =
    [("server", SERVER), ("edge", EDGE), ("kubernetes", KUBERNETES), ("superedge", SUPEREDGE)];

/// Returns the names of the features that are compiled in.
pub(crate) fn compiled_in() -> impl Iterator<Item = &'static str> {
    ALL.into_iter().filter(|(_, part)| part.is_ok()).map(|(name, _)| name)
}

/// Returns whether the part of a feature is compiled in.
pub(crate) fn named(feature: &str) -> FeatureSupport {
    ALL.iter().find(|(name, _)| *name == feature).map_or(Ok(()), |(_, part)| *part)
}

/// Evaluates a call into `kubernetes::api`, which it imports as `api`. A build without that module takes the value
/// after `else`: it refuses each config that needs a cluster, so it does not get here with one.
#[cfg(any(feature = "server", feature = "edge"))]
macro_rules! with_kubernetes {
    ($call:expr, else $otherwise:expr) => {{
        #[cfg(feature = "kubernetes")]
        {
            use $crate::kubernetes::api;
            $call
        }
        #[cfg(not(feature = "kubernetes"))]
        {
            $otherwise
        }
    }};
}
#[cfg(any(feature = "server", feature = "edge"))]
pub(crate) use with_kubernetes;
