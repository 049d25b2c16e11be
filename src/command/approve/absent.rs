//! Stands in for `tunnel approve` in a build without certificates by Kubernetes.

use std::future::Future;

use crate::command::{AnyArgs, CommandError};
use crate::config::Environment;
use crate::parts;

/// Arguments of `tunnel approve`.
pub type ApproveArgs = AnyArgs;

/// Returns the reason why this build approves nothing.
///
/// # Errors
///
/// Always.
pub async fn approve(
    _: &ApproveArgs,
    _: &Environment,
    _: impl Future<Output = ()>,
) -> Result<String, CommandError> {
    parts::CSR.map(|()| String::new()).map_err(CommandError::usage)
}
