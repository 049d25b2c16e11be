//! The parts of the program that a build may lack: cargo's features.

/// `Ok` if the part is compiled in, otherwise the reason why it cannot be used, with a hint.
pub(crate) type FeatureSupport = Result<(), &'static str>;

/// All that talks to kube-apiserver.
pub(crate) const KUBERNETES: FeatureSupport = if cfg!(feature = "kubernetes") {
    Ok(())
} else {
    Err("this program was built without Kubernetes; build it with cargo's feature \"kubernetes\"")
};
/// SuperEdge's config files, and links to its programs.
pub(crate) const SUPEREDGE: FeatureSupport = tunnel_link::SUPEREDGE;

/// Returns the names of the features that are compiled in.
pub(crate) fn compiled_in() -> impl Iterator<Item = &'static str> {
    let all = [("kubernetes", KUBERNETES), ("superedge", SUPEREDGE)];
    all.into_iter().filter(|(_, part)| part.is_ok()).map(|(name, _)| name)
}

/// Evaluates a call into `kubernetes::api`, which it imports as `api`. A build without that module takes the value
/// after `else`: it refuses each config that needs a cluster, so it does not get here with one.
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
pub(crate) use with_kubernetes;
