//! Logging, runtime; alone sets exit codes.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use futures_util::future::OptionFuture;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{error, field, info, warn};

use tunnel::cloud::Pod;
use tunnel::command::{self, Args, Command, Form, Mode, Module, is_wrong};
use tunnel::config::cloud::Cloud;
use tunnel::config::edge::EdgeSettings;
use tunnel::config::{Concern, Environment, Fault, Secret, Warning};
use tunnel::drain::Drained;
use tunnel::edge::Edge;
use tunnel::net::secret::warn_of_readers;
use tunnel::net::{files, reload};
use tunnel::startup::{FaultKind, StartFaults, Startup};
use tunnel::telemetry::{LogLevel, LogSettings, Logs};

fn main() -> ExitCode {
    let args = match Args::read(std::env::args_os()) {
        Ok(args) => args,
        Err(error) => {
            // The output is gone, and nothing else can show the error.
            let _ = error.print();
            return if is_wrong(&error) { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    match args.command {
        Some(Command::Demo { check, with }) => run_demo(check, &with),
        None => run(&args),
    }
}

fn run(args: &Args) -> ExitCode {
    let mut startup = if args.check { Startup::checking() } else { Startup::default() };
    let Some(logs) = logs(args, &mut startup) else { return ExitCode::from(code(FaultKind::System)) };
    let config = args.config();
    let mode = if args.mode == Mode::Cloud { "cloud" } else { "edge" };
    info!(version = env!("CARGO_PKG_VERSION"), mode, config = %config.display(), "starting");
    let settings = settings(args, &config, &mut startup);
    let refused = match runtime(args.mode) {
        Ok(runtime) => match runtime.block_on(serve(settings, startup, logs.level())) {
            Ok(Drained::Cut(cut_sessions)) => {
                info!(cut_sessions, "stopped");
                return ExitCode::SUCCESS;
            }
            Ok(Drained::Finished) => {
                info!(cut_sessions = 0, "stopped");
                return ExitCode::SUCCESS;
            }
            Err(faults) => faults,
        },
        Err(cause) => {
            startup.fault(FaultKind::System, "", format!("the system gives no threads: {cause}"));
            startup.into_faults()
        }
    };
    let Some(gravest) = refused.gravest() else {
        answer(&format!("{}: ok", config.display()));
        return ExitCode::SUCCESS;
    };
    report(&refused, &config);
    if logs.are_in_files_only() {
        // Who starts it looks here.
        Logs::on_stderr(args.log_format == Form::Json, || report(&refused, &config));
    }
    ExitCode::from(code(gravest))
}

/// Starts logging; on stderr if the directory cannot be used.
fn logs(args: &Args, startup: &mut Startup) -> Option<Logs> {
    // A check leaves nothing behind.
    let dir = args.log_dir.clone().filter(|_| !args.logtostderr && !args.check);
    let name = if args.mode == Mode::Cloud { "tunnel-cloud" } else { "tunnel-edge" };
    let stderr = LogSettings {
        json: args.log_format == Form::Json,
        dir: None,
        name,
        also_stderr: args.alsologtostderr,
        verbosity: args.verbosity,
    };
    startup
        .keep(FaultKind::LogFiles, &["--log-dir"], Logs::start(LogSettings { dir, ..stderr.clone() }))
        .or_else(|| Logs::start(stderr).ok())
}

/// One line for each fault.
fn report(faults: &StartFaults, config: &Path) {
    for found in faults {
        let Fault { key, line, text } = &found.fault;
        let key = Some(key).filter(|key| !key.is_empty()).map(field::display);
        error!(key, line, "{text}");
    }
    error!(config = %config.display(), faults = faults.iter().count(), "not started");
}

/// As in sysexits.h.
fn code(gravest: FaultKind) -> u8 {
    match gravest {
        FaultKind::Config => 78,
        FaultKind::Permission => 77,
        FaultKind::LogFiles => 73,
        FaultKind::System => 71,
        FaultKind::Port => 69,
    }
}

/// The settings of either side.
enum Either {
    Cloud(Box<Cloud>),
    Edge(Box<EdgeSettings>),
}

impl Either {
    /// The files that hold secrets, each with its key; `config` is where the settings stand.
    fn secrets<'a>(&'a self, config: &'a Path) -> Vec<(&'a str, &'a Path)> {
        match self {
            Self::Cloud(settings) => settings.secrets(),
            Self::Edge(settings) => settings.secrets(config),
        }
    }
}

/// Reads the config, and logs its warnings; `None` if it cannot be read, which is noted.
fn settings(args: &Args, config: &Path, startup: &mut Startup) -> Option<Either> {
    let text = std::fs::read_to_string(config).map_err(|cause| {
        format!("cannot read the config {}: {cause}; name it with --c=FILE", config.display())
    });
    let text = startup.keep(FaultKind::Config, &["--c"], text)?;
    let environment = Environment { kubeconfig: args.kubeconfig.clone(), ..environment() };
    let (settings, warnings) = match args.mode {
        Mode::Cloud => {
            let (settings, warnings) = startup.settings(Cloud::examine(&text, &environment));
            (Either::Cloud(Box::new(settings)), warnings)
        }
        Mode::Edge => {
            let (settings, warnings) = startup.settings(EdgeSettings::examine(&text, &environment));
            (Either::Edge(Box::new(settings)), warnings)
        }
    };
    for Warning { key, kind, text } in warnings {
        match kind {
            Concern::OpenDoor => error!(%key, "OPEN DOOR: {text}"),
            Concern::NotServed | Concern::Surprise => warn!(%key, "{text}"),
        }
    }
    for (key, path) in settings.secrets(config) {
        warn_of_readers(key, path);
    }
    Some(settings)
}

/// Serves until a signal ends it, or looks for all that is in the way.
async fn serve(
    settings: Option<Either>,
    mut startup: Startup,
    level: LogLevel,
) -> Result<Drained, StartFaults> {
    let signals = startup.keep(FaultKind::System, &["signals"], Signals::of_a_daemon());
    let (settings, mut signals) = match (settings, signals) {
        (Some(settings), Some(signals)) if startup.is_clear() && !startup.is_check() => (settings, signals),
        (settings, _) => {
            match settings {
                Some(Either::Cloud(settings)) => Pod::check(&settings, &mut startup),
                Some(Either::Edge(settings)) => Edge::check(&settings, &mut startup),
                None => {}
            }
            return Err(startup.into_faults());
        }
    };
    info!("{}", files::raise());
    match settings {
        Either::Cloud(settings) => {
            let pod = Pod::start(*settings, Some(level))?;
            signals.next().await;
            Ok(pod.stop(signals.next()).await)
        }
        Either::Edge(settings) => {
            let edge = Edge::start(*settings, Some(level))?;
            signals.next().await;
            Ok(edge.stop(signals.next()).await)
        }
    }
}

fn run_demo(check: bool, with: &[Module]) -> ExitCode {
    let logs = LogSettings { name: "tunnel-demo", verbosity: -1, ..LogSettings::default() };
    let result = Logs::start(logs).map_err(anyhow::Error::from).and_then(|logs| {
        let done = runtime(Mode::Cloud)?.block_on(async {
            let mut signals = Signals::new()?;
            command::demo(check, with, signals.next(), &print_stderr).await
        });
        drop(logs);
        done
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            print_stderr(&format!("tunnel: {e:#}"));
            ExitCode::FAILURE
        }
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
        proxy_authorization: read("PROXY_AUTHORIZATION"),
        cloud_proxy: read("CLOUD_PROXY"),
        edge_no_proxy: read("EDGE_NO_PROXY"),
        kubeconfig: None,
        https_proxy: read("HTTPS_PROXY").or_else(|| read("https_proxy")).map(Secret::new),
        no_proxy: read("NO_PROXY").or_else(|| read("no_proxy")),
    }
}

/// Prints an answer to stdout. If that is closed, the exit code remains.
fn answer(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Prints a line on stderr, for the person at the terminal.
#[expect(clippy::print_stderr, reason = "what people are told before and beside the logs")]
fn print_stderr(text: &str) {
    eprintln!("{text}");
}

/// Exit code of a wrong command line, as in sysexits.h.
const USAGE: u8 = 64;
/// An edge is a small machine: two threads keep one slow step from holding all sessions.
const EDGE_THREADS: usize = 2;
