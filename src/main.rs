//! Parses the command line, starts logging and the runtime, and sets exit codes. Nothing else sets exit codes.

use tunnel::command::config::{self, ConfigCommand, ConfigFileArgs};
use tunnel::command::doctor::{self, DoctorArgs, DoctorFindings};
use tunnel::command::proxy::{self, ProxyArgs};
use tunnel::command::serve::{self, DaemonArgs, ReadConfig};
use tunnel::command::{
    self, Args, Command, CommandError, CommandResult, Format, Role, completions, connect, device, exit_code,
    grants, invitations, is_wrong, join, migrate, sessions, ssh, status,
};
use tunnel::config::{ConfigError, Environment};
use tunnel::startup::signals::Signals;
use tunnel::startup::{StartupErrorCollector, StartupErrorKind, StartupErrors};
use tunnel_base::drain::Drained;
use tunnel_base::logging::{LogLevelHandle, LogSettings, LoggingGuard};
use tunnel_net::{fd_limit, os};

use std::io::{IsTerminal as _, Write as _};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
#[cfg(target_os = "linux")]
use tikv_jemallocator::Jemalloc;
use tracing::{error, field, info, warn};

/// Returns freed memory to the system after some seconds, on a thread of its own: docs/decisions.md#the-allocator.
#[cfg(target_os = "linux")]
#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    os::use_small_pages();
    let mut args: Vec<_> = std::env::args_os().collect();
    if args.get(1).is_some_and(|first| first == "--end-with-parent") {
        // Only the demo's processes have it. Without it they outlive a demo that is killed.
        args.remove(1);
        os::end_with_parent();
    }
    let args = match Args::read(args.into_iter()) {
        Ok(args) => args,
        Err(error) => {
            // If the output is closed, nothing else can show the error.
            let _ = error.print();
            return if is_wrong(&error) { ExitCode::from(exit_code::USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let env = Environment::read(variable);
    print_result(match args.command {
        Command::Server(command_args) => return run(Role::Server, &command_args),
        Command::Edge(command_args) => return run(Role::Edge, &command_args),
        Command::Config(ConfigCommand::Check { config, output, diff }) => {
            return check(&config, output, diff, &env);
        }
        #[cfg(all(feature = "server", feature = "edge"))]
        Command::Demo { check, listeners } => return run_demo(check, &listeners),
        Command::Doctor(command_args) => return diagnose(&command_args, env),
        Command::Config(ConfigCommand::Show { config, output }) => config::show(&config, output, &env),
        #[cfg(feature = "server")]
        Command::Approve(command_args) => approve(&command_args, &env),
        Command::Connect(command_args) => {
            in_runtime(async { connect::connect(&command_args, variable, signals(), print_stderr).await })
        }
        Command::Proxy(command_args) => run_proxy(&command_args, &env),
        Command::Ssh(command_args) => ssh::run(&command_args),
        Command::SshConfig(command_args) => ssh::config(&command_args, &env),
        Command::Whoami(command_args) => in_runtime(device::whoami(command_args, &env)),
        Command::Leave(command_args) => in_runtime(device::leave(command_args, &env)),
        Command::Nodes(command_args) => in_runtime(status::nodes(command_args, &env)),
        Command::Sessions(command_args) => in_runtime(sessions::run(command_args, &env)),
        Command::Status { socket, watch: true, .. } => {
            in_runtime(status::watch(socket, &env, interrupted(), print_stdout))
        }
        Command::Status { socket, output, watch: false } => in_runtime(status::status(socket, output, &env)),
        #[cfg(feature = "server")]
        Command::Init(command_args) => command::init::run(&command_args),
        Command::Invite(command_args) => in_runtime(invitations::invite(command_args, &env)),
        Command::Join(command_args) => in_runtime(join::run(&command_args, &env, std::io::stdin())),
        Command::Grant(command_args) => in_runtime(grants::grant(command_args, &env, print_stderr)),
        Command::Grants(command_args) => in_runtime(grants::manage(command_args, &env)),
        Command::Invitations(command_args) => in_runtime(invitations::manage(command_args, &env)),
        #[cfg(feature = "server")]
        Command::Cert(command_args) => command::cert::run(&command_args),
        #[cfg(feature = "server")]
        Command::Token(command_args) => command::token::run(&command_args),
        Command::Migrate(command_args) => migrate::run(&command_args, std::io::stdin()),
        Command::Completions { shell } => Ok(completions::completions(shell)),
        Command::Man { dir } => command::man(&dir),
        #[cfg(not(all(feature = "server", feature = "edge")))]
        Command::Missing { .. } => Err(command::missing()),
    })
}

/// Runs a server or an edge.
fn run(role: Role, args: &DaemonArgs) -> ExitCode {
    let mut startup = StartupErrorCollector::default();
    let logs = logs(role, args, &mut startup);
    let config = args.config(role);
    info!(version = env!("CARGO_PKG_VERSION"), role = role.name(), config = %config.display(), "starting");
    args.warn_of_ignored();
    let env = Environment { kubeconfig: args.kubeconfig.clone(), ..Environment::read(variable) };
    let settings = serve::read(role, &config, &env, &mut startup);
    let refused = match runtime(role) {
        Ok(runtime) => {
            let mut served = runtime.block_on(serve(settings, startup, logs.level.clone()));
            let mut startup = StartupErrorCollector::default();
            // A log directory or a port that cannot be used is no error of the file. Its rights must not give way to
            // older ones for that.
            if let Err(errors) = &served
                && role == Role::Edge
                && errors
                    .iter()
                    .all(|found| !matches!(found.kind, StartupErrorKind::LogFiles | StartupErrorKind::Port))
                && let Some(copy) = serve::read_copy(&config, &env, &mut startup)
            {
                report(errors, &config, "starting from the last good copy of this config");
                served = runtime.block_on(serve(copy, startup, logs.level.clone()));
            }
            match served {
                Ok(drained) => {
                    let cut_sessions = if let Drained::Aborted(cut) = drained { cut } else { 0 };
                    info!(sessions_aborted = cut_sessions, "stopped");
                    return ExitCode::SUCCESS;
                }
                Err(faults) => faults,
            }
        }
        Err(cause) => {
            startup.error(StartupErrorKind::System, "", format!("cannot start threads: {cause}"));
            startup.into_errors()
        }
    };
    report(&refused, &config, "not started");
    if logs.in_files_only {
        // The person who started it reads stderr.
        LoggingGuard::on_stderr(args.log_format == Format::Json, || report(&refused, &config, "not started"));
    }
    refused.most_severe().map_or(ExitCode::FAILURE, |kind| code(kind).into())
}

/// Starts logging. A log directory that cannot be used is only a warning with SuperEdge's command line, whose manifests
/// mount a directory of root.
fn logs(role: Role, args: &DaemonArgs, startup: &mut StartupErrorCollector) -> LoggingGuard {
    let settings = LogSettings {
        json: args.log_format == Format::Json,
        dir: args.log_dir.clone().filter(|_| !args.logtostderr),
        name: if role == Role::Server { "tunnel-cloud" } else { "tunnel-edge" },
        also_stderr: args.alsologtostderr,
        audit_file: args.audit_file.clone(),
        verbosity: args.verbosity,
    };
    let (logs, unusable) = LoggingGuard::start(settings);
    for cause in unusable {
        let key = cause.key;
        if args.is_superedge && key == "--log-dir" {
            warn!(key, error = %cause, hint = "make it writable for this user", "logging to stderr only");
        } else {
            startup.error(StartupErrorKind::LogFiles, key, cause.to_string());
        }
    }
    logs
}

/// Checks a config file, and logs what a start would log.
fn check(
    command_args: &ConfigFileArgs,
    output: Format,
    diff: Option<Option<PathBuf>>,
    env: &Environment,
) -> ExitCode {
    let file = match command_args.read() {
        Ok(file) => file,
        Err(error) => return print_result(Err(error)),
    };
    let logs = LoggingGuard::start(LogSettings { json: output == Format::Json, ..LogSettings::default() });
    let mut startup = StartupErrorCollector::checking();
    let own = Environment { kubeconfig: command_args.kubeconfig.clone(), ..env.clone() };
    let checked = in_runtime(async {
        for role in &file.roles {
            let read = serve::read(*role, &file.path, &own, &mut startup);
            if let Ok((settings, _)) = read {
                settings.check(&mut startup);
            }
        }
        Ok(())
    });
    if let Err(error) = checked {
        return print_result(Err(error));
    }
    let errors = startup.into_errors();
    let Some(most_severe_kind) = errors.most_severe() else {
        match output {
            Format::Text => print_stdout(&format!("{}: ok", file.path.display())),
            Format::Json => info!(config = %file.path.display(), errors = 0, "config has no errors"),
        }
        let Some(old) = diff else { return ExitCode::SUCCESS };
        return print_result(in_runtime(config::diff(&file, old, &own, output)));
    };
    report(&errors, &file.path, "config has errors");
    drop(logs);
    code(most_severe_kind).into()
}

/// Logs one line for each error, and one for all.
fn report(faults: &StartupErrors, config: &Path, outcome: &str) {
    for found in faults.iter() {
        let ConfigError { key, line, text } = &found.error;
        let key = Some(key).filter(|key| !key.is_empty()).map(field::display);
        // A line without a key is not TOML, and may be the only one that is read.
        let file = (key.is_none() && line.is_some()).then(|| field::display(config.display()));
        error!(key, config = file, line, "{text}");
    }
    error!(config = %config.display(), errors = faults.iter().count(), "{outcome}");
}

/// Returns the exit code for an error kind.
fn code(most_severe_kind: StartupErrorKind) -> u8 {
    match most_severe_kind {
        StartupErrorKind::Config => exit_code::CONFIG,
        StartupErrorKind::Permission => exit_code::NO_PERMISSION,
        StartupErrorKind::LogFiles => exit_code::CANNOT_CREATE,
        StartupErrorKind::System => exit_code::OS_ERROR,
        StartupErrorKind::Port => exit_code::UNAVAILABLE,
    }
}

/// Serves until a signal arrives. Collects every startup error instead if there are any.
async fn serve(
    settings: ReadConfig,
    mut startup: StartupErrorCollector,
    level: LogLevelHandle,
) -> Result<Drained, StartupErrors> {
    // Before anything is started, so that no signal is lost meanwhile.
    let signals = startup.collect(StartupErrorKind::System, &["signals"], Signals::of_daemon());
    let ((settings, config), signals) = match (settings, signals) {
        (Ok(settings), Ok(signals)) if startup.is_clear() => (settings, signals),
        (settings, _) => {
            // The config can be read, so its files and ports are checked as well: one start reports all errors.
            if let Ok((settings, _)) = settings {
                settings.check(&mut startup);
            }
            return Err(startup.into_errors());
        }
    };
    info!("{}", fd_limit::raise());
    settings.serve(config, level, signals).await
}

#[cfg(all(feature = "server", feature = "edge"))]
fn run_demo(check: bool, with: &[String]) -> ExitCode {
    let _logs = LoggingGuard::start(LogSettings { verbosity: -1, ..LogSettings::default() });
    let done = runtime(Role::Server).map_err(anyhow::Error::from).and_then(|runtime| {
        runtime.block_on(async {
            let mut signals = Signals::new()?;
            let stop = async {
                tokio::select! {
                    () = signals.next() => {}
                    () = tunnel::startup::signals::hangup() => {}
                }
            };
            command::demo::run(check, with, stop).await
        })
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_stderr(&format!("tunnel: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Approves certificates.
#[cfg(feature = "server")]
fn approve(command_args: &command::approve::ApproveArgs, env: &Environment) -> CommandResult {
    let _logs = LoggingGuard::start(LogSettings::default());
    in_runtime(command::approve::approve(command_args, env, interrupted()))
}

/// Runs the proxy of a user.
fn run_proxy(args: &ProxyArgs, env: &Environment) -> CommandResult {
    let json = args.log_format == Format::Json;
    // A person at the terminal gets its own lines, unless she asks for the log.
    let is_watched = std::io::stderr().is_terminal() && !json && args.verbosity == 0;
    let verbosity = if is_watched { -1 } else { args.verbosity };
    let logs = LogSettings { json, verbosity, ..LogSettings::default() };
    let _logs = LoggingGuard::start(logs);
    info!(version = env!("CARGO_PKG_VERSION"), role = "proxy", "starting");
    info!("{}", fd_limit::raise());
    let runtime = runtime(Role::Edge).map_err(|cause| no_threads(&cause))?;
    runtime.block_on(async { proxy::run(args, env, signals(), is_watched.then_some(print_stderr)).await })
}

/// Runs `tunnel doctor` and prints its findings.
fn diagnose(command_args: &DoctorArgs, env: Environment) -> ExitCode {
    let found = in_runtime(async { Ok(doctor::run(command_args, env).await) });
    let is_well = found.as_ref().is_ok_and(DoctorFindings::is_well);
    // https://no-color.org
    let has_colours = std::io::stdout().is_terminal() && variable("NO_COLOR").is_none();
    let print_result = print_result(found.map(|found| match command_args.output {
        Format::Json => found.json(),
        Format::Text if has_colours => {
            let text = format!("\n{}", found.text()).replace("\nFAIL ", "\n\x1b[31mFAIL\x1b[0m ");
            text.trim_start().to_owned()
        }
        Format::Text => found.text(),
    }));
    if is_well || print_result != ExitCode::SUCCESS { print_result } else { ExitCode::FAILURE }
}

/// Prints a command's output or its error, and returns the exit code.
fn print_result(done: CommandResult) -> ExitCode {
    match done {
        Ok(text) => {
            if !text.is_empty() {
                print_stdout(text.trim_end());
            }
            ExitCode::SUCCESS
        }
        Err(CommandError { code, text }) => {
            print_stderr(&format!("tunnel: {text}"));
            ExitCode::from(code)
        }
    }
}

/// Runs an asynchronous command on a current-thread runtime.
fn in_runtime<T>(work: impl Future<Output = CommandResult<T>>) -> CommandResult<T> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().event_interval(EVENT_INTERVAL).enable_all().build();
    let runtime = runtime.map_err(|cause| no_threads(&cause))?;
    let done = runtime.block_on(work);
    // A blocking read of stdin may be in progress, and nothing can end it.
    runtime.shutdown_background();
    done
}

fn no_threads(cause: &std::io::Error) -> CommandError {
    CommandError { code: exit_code::OS_ERROR, text: format!("cannot start threads: {cause}") }
}

/// Waits for a signal that ends a long-running command.
async fn interrupted() {
    signals().next().await;
}

/// Handles signals that end a command from now on, also as process 1, which has no default handlers. Call it in a
/// runtime.
fn signals() -> BoxStream<'static, ()> {
    let next = async |mut signals: Option<Signals>| {
        signals.as_mut()?.next().await;
        Some(((), signals))
    };
    // Without handlers no signal arrives: the default ones end the process.
    stream::unfold(Signals::new().ok(), next).chain(stream::pending()).boxed()
}

/// Starts the threads of a long-lived program. A session's bytes pass two or three tasks: on several workers these wake
/// each other across cores for each piece, so an edge has one, and so has a server with few cores.
fn runtime(role: Role) -> std::io::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if role == Role::Edge {
        builder.thread_keep_alive(THREAD_KEEP_ALIVE);
    }
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    if role == Role::Edge || cores <= CORES_FOR_ONE_WORKER {
        builder.worker_threads(1);
    }
    builder.event_interval(EVENT_INTERVAL).enable_all().build()
}

/// Returns an environment variable, or `None` if it is unset or empty.
#[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Prints a command's output to stdout. If stdout is closed, only the exit code is left.
fn print_stdout(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Prints a line to stderr for the person at the terminal.
#[expect(clippy::print_stderr, reason = "messages for people, before logging starts and next to it")]
fn print_stderr(text: &str) {
    // ssh has set the terminal of its ProxyCommand to raw mode.
    let end = if std::io::stderr().is_terminal() { "\r\n" } else { "\n" };
    eprint!("{text}{end}");
}

/// Number of task polls after which a busy thread polls its sockets. With tokio's default of 61 and the long polls of
/// bulk transfers, a keystroke would wait for milliseconds before it is read.
const EVENT_INTERVAL: u32 = 6;
/// Most cores, counted as the process may use them, with which a server has one worker. More sessions than one core
/// carries need the others.
const CORES_FOR_ONE_WORKER: usize = 2;
/// Idle time after which an edge's blocking thread (used to read files) ends.
const THREAD_KEEP_ALIVE: std::time::Duration = std::time::Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_sorted_by_severity() {
        use StartupErrorKind::{Config, LogFiles, Permission, Port, System};
        let place = |kind| exit_code::ALL.iter().position(|(known, _)| *known == code(kind)).unwrap();
        let places = [Config, Permission, LogFiles, System, Port].map(place);
        assert!(places.is_sorted(), "{places:?}");
    }

    #[test]
    fn main_uses_only_named_exit_codes() {
        let source = include_str!("main.rs");
        let source = source.split("#[cfg(test)]").next().unwrap();
        let digits = |text: &str| text.starts_with(|c: char| c.is_ascii_digit());
        assert!(!source.split("ExitCode::from(").skip(1).any(digits), "an exit code without a name");
    }
}
