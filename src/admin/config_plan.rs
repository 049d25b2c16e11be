//! Tells the owner of this process what a changed config would do.

use std::sync::{Arc, OnceLock};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::{Request, StatusCode};
use hyper::body::Incoming;

use crate::admin::responses::{AdminAnswer, plain_text, read_body, text};

/// Returns what a config with this text would do, as JSON, or why it cannot be used.
type PlanFn = dyn Fn(String) -> BoxFuture<'static, Result<String, String>> + Send + Sync;

/// Answers `POST /config/plan` once the process follows its config. Cheap to clone.
#[derive(derive_more::Debug, Clone, Default)]
#[debug("ConfigPlanner({})", _0.get().is_some())]
pub struct ConfigPlanner(Arc<OnceLock<Box<PlanFn>>>);

impl ConfigPlanner {
    /// Sets how plans are made.
    pub fn set<F: Future<Output = Result<String, String>> + Send + 'static>(
        &self,
        plan: impl Fn(String) -> F + Send + Sync + 'static,
    ) {
        // A process follows one config.
        let _ = self.0.set(Box::new(move |text| plan(text).boxed()));
    }

    pub(crate) async fn answer(&self, request: Request<Incoming>) -> AdminAnswer {
        let Some(body) = read_body(request, CONFIG_BYTES).await else {
            return Err(plain_text(StatusCode::BAD_REQUEST, "the config is missing or too long\n"));
        };
        let Some(plan) = self.0.get() else {
            return Err(plain_text(StatusCode::SERVICE_UNAVAILABLE, "the program is starting\n"));
        };
        let planned = plan(String::from_utf8_lossy(&body).into_owned()).await;
        let why = |why| plain_text(StatusCode::BAD_REQUEST, format!("{why}\n"));
        planned.map(|plan| text(StatusCode::OK, plan, "application/json")).map_err(why)
    }
}

/// Maximum length of a config file in bytes.
const CONFIG_BYTES: usize = 1 << 20;
