//! Command line, logging, runtime; alone sets exit codes.

use std::ffi::OsString;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgAction, Parser, Subcommand, ValueEnum};
use futures_util::future::OptionFuture;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{error, info, warn};

use tunnel::cloud::Pod;
use tunnel::command::demo;
use tunnel::config::cloud::Cloud;
use tunnel::config::edge::Edge as EdgeSettings;
use tunnel::config::{Concern, Environment, Secret, Warning};
use tunnel::drain::Drained;
use tunnel::edge::Edge;
use tunnel::net::secret::warn_of_readers;
use tunnel::net::{files, reload};
use tunnel::telemetry::log::{Level, Logs, Settings};

/// Reach edge nodes behind NAT by name: `tunnel --m=cloud` where they are reached from, `tunnel --m=edge` on each.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// What this process is.
    #[arg(long = "m", value_name = "MODE", default_value = "cloud")]
    mode: Mode,
    /// Config file; conf/cloud.toml and conf/edge.toml describe every key. [default: conf/MODE.toml]
    #[arg(long = "c", value_name = "FILE")]
    config: Option<PathBuf>,
    /// kubeconfig file, for a cloud outside its cluster. Needs a program built with Kubernetes.
    #[arg(long = "k", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Requests a second to kube-apiserver. Read by nothing in this version.
    #[arg(long, value_name = "N", default_value_t = 1000.0)]
    kube_qps: f64,
    /// Burst of requests to kube-apiserver. Read by nothing in this version.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    kube_burst: u32,
    /// Log to daily files in this directory: 7 are kept, 100 MiB in all.
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// With --log-dir: log to stderr as well.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    alsologtostderr: bool,
    /// Log to stderr only, whatever --log-dir says.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", action = ArgAction::Set)]
    logtostderr: bool,
    /// Form of log lines.
    #[arg(long, value_name = "FORM", default_value = "text")]
    log_format: Form,
    /// How much to log: 0 what operators need, 2 debug, 4 libraries too, 6 everything.
    #[arg(long = "v", value_name = "N", default_value_t = 0)]
    verbosity: i32,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// A pod and an edge on loopback with fresh certificates, to try things out; stays until Ctrl-C.
    Demo {
        /// Make one request through the tunnel, say what happened, and end.
        #[arg(long)]
        check: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    Cloud,
    Edge,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    Text,
    Json,
}

impl Args {
    /// Which config file is read.
    fn config(&self) -> PathBuf {
        let default = if self.mode == Mode::Cloud { "conf/cloud.toml" } else { "conf/edge.toml" };
        self.config.clone().unwrap_or_else(|| default.into())
    }
}

fn main() -> ExitCode {
    let args = Args::parse_from(std::env::args_os().map(spelled_our_way));
    match args.command {
        Some(Command::Demo { check }) => run_demo(check),
        None => run(&args),
    }
}

fn run(args: &Args) -> ExitCode {
    let settings = match read(args) {
        Ok(settings) => settings,
        Err(code) => return code,
    };
    let dir = args.log_dir.clone().filter(|_| !args.logtostderr);
    let name = if args.mode == Mode::Cloud { "tunnel-cloud" } else { "tunnel-edge" };
    let logs = Settings {
        json: args.log_format == Form::Json,
        dir,
        name,
        also_stderr: args.alsologtostderr,
        verbosity: args.verbosity,
    };
    let logs = match Logs::start(logs) {
        Ok(logs) => logs,
        Err(e) => return failed(&e),
    };
    for Warning { key, kind, text } in settings.warnings() {
        match kind {
            Concern::OpenDoor => error!(%key, "OPEN DOOR: {text}"),
            Concern::NotServed | Concern::Surprise => warn!(%key, "{text}"),
        }
    }
    info!("{}", files::raise());
    for (key, path) in settings.secrets(&args.config()) {
        warn_of_readers(key, path);
    }
    let level = logs.level();
    let runtime = match runtime(args.mode) {
        Ok(runtime) => runtime,
        Err(e) => return failed(&e),
    };
    match runtime.block_on(serve(settings, level)) {
        Ok(drained) => {
            let cut_sessions = if let Drained::Cut(sessions) = drained { sessions } else { 0 };
            info!(cut_sessions, "stopped");
            ExitCode::SUCCESS
        }
        Err(e) => {
            error!("{e:#}");
            drop(logs);
            failed(&format!("{e:#}"))
        }
    }
}

/// The settings of either side, with what there is to say about them.
enum Either {
    Cloud(Box<Cloud>, Vec<Warning>),
    Edge(Box<EdgeSettings>, Vec<Warning>),
}

impl Either {
    /// The files that hold secrets, each with its key; `config` is where the settings stand.
    fn secrets<'a>(&'a self, config: &'a Path) -> Vec<(&'static str, &'a Path)> {
        match self {
            Self::Cloud(settings, _) => settings.secrets(),
            Self::Edge(settings, _) => vec![settings.secret(config)],
        }
    }

    fn warnings(&self) -> &[Warning] {
        match self {
            Self::Cloud(_, warnings) | Self::Edge(_, warnings) => warnings,
        }
    }
}

fn read(args: &Args) -> Result<Either, ExitCode> {
    let path = args.config();
    let bad = |what: &dyn Display| {
        say(&format!("tunnel: {}: {what}", path.display()));
        ExitCode::from(BAD_CONFIG)
    };
    let text = std::fs::read_to_string(&path)
        .map_err(|e| bad(&format!("{e}; name the config file with --c=FILE")))?;
    let environment = Environment { kubeconfig: args.kubeconfig.clone(), ..environment() };
    let settings = match args.mode {
        Mode::Cloud => Cloud::read(&text, &environment).map(|(s, w)| Either::Cloud(Box::new(s), w)),
        Mode::Edge => EdgeSettings::read(&text, &environment).map(|(s, w)| Either::Edge(Box::new(s), w)),
    };
    settings.map_err(|faults| bad(&format!("bad config\n{faults}")))
}

async fn serve(settings: Either, level: Level) -> anyhow::Result<Drained> {
    let mut signals = Signals::of_a_daemon()?;
    match settings {
        Either::Cloud(settings, _) => {
            let pod = Pod::start(*settings, Some(level))?;
            signals.next().await;
            Ok(pod.stop(signals.next()).await)
        }
        Either::Edge(settings, _) => {
            let edge = Edge::start(*settings, Some(level))?;
            signals.next().await;
            Ok(edge.stop(signals.next()).await)
        }
    }
}

fn run_demo(check: bool) -> ExitCode {
    let logs = Settings { name: "tunnel-demo", verbosity: -1, ..Settings::default() };
    let result = Logs::start(logs).map_err(anyhow::Error::from).and_then(|logs| {
        let done = runtime(Mode::Cloud)?.block_on(async {
            let mut signals = Signals::new()?;
            demo::run(check, signals.next(), &say).await
        });
        drop(logs);
        done
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => failed(&format!("{e:#}")),
    }
}

/// SIGTERM and SIGINT, each as often as it comes; and SIGHUP, which ends nothing.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// None where a terminal that goes away is to end the program.
    hangup: Option<Signal>,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt, hangup: None })
    }

    /// As [`Self::new`]; SIGHUP means to read the files again.
    fn of_a_daemon() -> std::io::Result<Self> {
        Ok(Self { hangup: Some(signal(SignalKind::hangup())?), ..Self::new()? })
    }

    async fn next(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = OptionFuture::from(self.hangup.as_mut().map(Signal::recv)), if self.hangup.is_some() => {
                    info!("SIGHUP: certificates, tokens and users are read again; the config itself only at a start");
                    reload::look_now();
                }
            }
        }
    }
}

fn runtime(mode: Mode) -> std::io::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if mode == Mode::Edge {
        builder.worker_threads(EDGE_THREADS);
    }
    builder.enable_all().build()
}

fn environment() -> Environment {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
    let read = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    Environment {
        node_name: read("NODE_NAME"),
        node_ip: read("NODE_IP"),
        pod_ip: read("POD_IP"),
        pod_name: read("POD_NAME"),
        pod_namespace: read("POD_NAMESPACE"),
        kubernetes_service_host: read("KUBERNETES_SERVICE_HOST"),
        kubeconfig: None,
        https_proxy: read("HTTPS_PROXY").or_else(|| read("https_proxy")).map(Secret::new),
        no_proxy: read("NO_PROXY").or_else(|| read("no_proxy")),
    }
}

/// Go's flags in clap's spelling: one dash becomes two, `_` in a name becomes `-`.
fn spelled_our_way(arg: OsString) -> OsString {
    let Some(text) = arg.to_str() else { return arg };
    let name = text.trim_start_matches('-');
    if name.len() == text.len() || name.is_empty() || matches!(text, "-h" | "-V") {
        return arg;
    }
    let (name, value) = name.split_once('=').map_or((name, None), |(name, value)| (name, Some(value)));
    let name = name.replace('_', "-");
    value.map_or_else(|| format!("--{name}"), |value| format!("--{name}={value}")).into()
}

fn failed(why: &dyn Display) -> ExitCode {
    say(&format!("tunnel: {why}"));
    ExitCode::FAILURE
}

/// Says something to the person at the terminal.
#[expect(clippy::print_stderr, reason = "what people are told before and beside the logs")]
fn say(text: &str) {
    eprintln!("{text}");
}

/// Exit code of a bad configuration, as in sysexits.h.
const BAD_CONFIG: u8 = 64;
/// An edge is a small machine: two threads keep one slow step from holding all sessions.
const EDGE_THREADS: usize = 2;
