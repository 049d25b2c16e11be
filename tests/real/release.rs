//! The files of a release: made by `scripts/release.sh`, installed, and run.
//!
//! They contain the debug build, or the program named by `TUNNEL_RELEASE_BINARY`, which must be static.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;
use tempfile::TempDir;

use crate::parts::{all, are_installed, env_var, free_port, is_root, loopback};
use crate::process::{ProcessOutput, Running, TIMEOUT, run, run_command};
use crate::tunnel::{PROGRAM, TestDir, clear_environment};

/// Returns the files of one release, which all tests of this process use; `None` if they are not
/// chosen or a program for it is missing.
fn release() -> Option<&'static Path> {
    static MADE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        if !all()
            || !are_installed(&["bash", "cargo", "dpkg-deb", "gzip", "python3", "readelf", "strip", "tar"])
        {
            return None;
        }
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("release");
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        let program = env_var("TUNNEL_RELEASE_BINARY").unwrap_or_else(|| {
            // A debug build is larger by a multiple.
            let stripped = dir.join("program").to_str().unwrap().to_owned();
            ok(&run("strip", &["-o", &stripped, PROGRAM], None, TIMEOUT));
            stripped
        });
        let files = dir.join("files");
        make(&program, &files);
        Some(files)
    });
    made.as_deref()
}

/// Runs `scripts/release.sh`.
fn make(program: &str, files: &Path) {
    let args = [env!("CARGO_PKG_VERSION"), "--binary", program, "--out", files.to_str().unwrap()];
    ok(&run_command("release.sh", script("scripts/release.sh").args(args), None, 6 * TIMEOUT));
}

fn script(path: &str) -> Command {
    Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join(path))
}

fn ok(output: &ProcessOutput) {
    assert!(output.status.success(), "{output:?}");
}

/// Returns the only file of a release with this end.
fn file(release: &Path, end: &str) -> PathBuf {
    let files = std::fs::read_dir(release).unwrap().map(|entry| entry.unwrap().path());
    let found: Vec<_> = files.filter(|path| path.to_str().unwrap().ends_with(end)).collect();
    assert_eq!(found.len(), 1, "{end}: {found:?}");
    found[0].clone()
}

/// Unpacks an archive into a new directory.
fn unpack(archive: &Path) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (archive, to) = (archive.to_str().unwrap(), dir.path().to_str().unwrap());
    ok(&run("tar", &["-xf", archive, "-C", to], None, TIMEOUT));
    dir
}

fn json(file: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

fn sha256(file: &Path) -> String {
    let output = run("sha256sum", &[file], None, TIMEOUT);
    format!("sha256:{}", output.stdout.split(' ').next().unwrap())
}

/// Fails the test unless this program has the right version, and is static if it is from a release build.
fn runs(program: &Path) {
    let output = run(program.to_str().unwrap(), &["--version"], None, TIMEOUT);
    assert!(output.stdout.starts_with(VERSION), "{output:?}");
    if env_var("TUNNEL_RELEASE_BINARY").is_some() {
        let output = run("readelf", &["-lW", program.to_str().unwrap()], None, TIMEOUT);
        assert!(output.stdout.contains("LOAD") && !output.stdout.contains("INTERP"), "{output:?}");
    }
}

const VERSION: &str = concat!("tunnel ", env!("CARGO_PKG_VERSION"), " ");

#[test]
fn the_tarball_contains_a_program_that_runs() {
    let Some(release) = release() else { return };
    let unpacked = unpack(&file(release, "-linux.tar.gz"));
    let dir = file(unpacked.path(), "-linux");
    runs(&dir.join("tunnel"));
    for name in ["LICENSE", "README.md", "CHANGELOG.md", "tunnel-edge.service", "tunnel-proxy.service"] {
        assert!(dir.join(name).is_file(), "{name}");
    }
    // One line for each crate, then the texts, also of the C code in crates.
    let licences = std::fs::read_to_string(dir.join("THIRD-PARTY-LICENSES.txt")).unwrap();
    let linked = tree("normal,no-proc-macro");
    let others = linked.iter().filter(|name| !name.starts_with("tunnel"));
    for name in others {
        let row = format!("\n{}: ", name.replace(" v", " "));
        assert_eq!(licences.matches(&row).count(), 1, "{name}");
    }
    for text in ["Permission is hereby granted", "Apache License", "Jason Evans", "The OpenSSL Project"] {
        assert!(licences.contains(text), "{text}");
    }
}

/// Returns the crates of the program for the target of the release.
fn tree(edges: &str) -> BTreeSet<String> {
    let host = run("rustc", &["-vV"], None, TIMEOUT).stdout;
    let host = host.lines().find_map(|line| line.strip_prefix("host: ")).unwrap().to_owned();
    let target = env_var("TARGET").unwrap_or(host);
    let mut cargo = Command::new("cargo");
    cargo.args(["tree", "--locked", "--package", "tunnel", "--target", &target, "--edges", edges]);
    cargo.args(["--prefix", "none", "--format", "{p}"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    let tree = run_command("cargo", &mut cargo, None, 2 * TIMEOUT);
    ok(&tree);
    let lines = tree.stdout.lines().filter(|line| !line.is_empty());
    lines.map(|line| line.splitn(3, ' ').take(2).collect::<Vec<_>>().join(" ")).collect()
}

/// Installs the package in a copy of this machine's files, where `systemctl` only writes down how it is called.
#[test]
fn the_package_installs_upgrades_and_removes_the_program_and_restarts_only_running_services() {
    if !is_root() || !are_installed(&["unshare", "chroot", "dpkg", "adduser"]) {
        return;
    }
    let Some(release) = release() else { return };
    let package = file(release, ".deb");
    let script = format!(
        "set -e; mount -t tmpfs none /mnt; cd /mnt; mkdir upper work new
        mount -t overlay none -o lowerdir=/,upperdir=upper,workdir=work new
        mount -t tmpfs none new/run; mkdir -p new/run/systemd/system; mount -t tmpfs none new/tmp
        cp {} new/tmp/tunnel.deb
        rm -f new/usr/bin/systemctl new/bin/systemctl
        printf '#!/bin/sh\\necho \"$*\" >>/tmp/systemctl.log\\n' >new/usr/bin/systemctl; chmod 755 new/usr/bin/systemctl
        exec chroot new sh -ec '
            called() {{ cat /tmp/systemctl.log; echo .; rm /tmp/systemctl.log; }}
            dpkg --add-architecture $(dpkg --field /tmp/tunnel.deb Architecture)
            dpkg --install /tmp/tunnel.deb >&2; called
            id -un tunnel; tunnel --version
            dpkg --install /tmp/tunnel.deb >&2; called
            dpkg --listfiles tunnel | grep -c \"^/usr/share/man/man1/tunnel.*[.]1[.]gz\"
            zcat /usr/share/man/man1/tunnel-server.1.gz | grep -c tunnel-server
            zcat /usr/share/man/man5/tunnel.toml.5.gz | grep -x \".SS server.links.listen\"
            cd /usr/share/doc/tunnel
            ls README.md CHANGELOG.md copyright THIRD-PARTY-LICENSES.txt.gz server.toml channelz.proto docs/how-to/on-a-machine.md
            grep -l ^User=tunnel /lib/systemd/system/tunnel-server.service /lib/systemd/system/tunnel-edge.service
            ls /usr/lib/systemd/user/tunnel-proxy.service
            ls /usr/share/bash-completion/completions/tunnel
            cd /; mkdir -p /var/lib/tunnel; echo kept | tee /etc/tunnel/edge.toml >/var/lib/tunnel/enrolled
            dpkg --remove tunnel >&2; cat /etc/tunnel/edge.toml /var/lib/tunnel/enrolled; called
            dpkg --purge tunnel >&2
            ! ls /usr/bin/tunnel /usr/share/doc/tunnel /etc/tunnel /var/lib/tunnel 2>&-'",
        package.display()
    );
    let output = run("unshare", &["-m", "--propagation", "private", "sh", "-c", &script], None, 4 * TIMEOUT);
    ok(&output);
    let mut lines = output.stdout.lines();
    let mut until_dot = || lines.by_ref().take_while(|line| *line != ".").collect::<Vec<_>>();
    assert_eq!(until_dot(), ["daemon-reload"], "{output:?}");
    let second = until_dot();
    assert!(second[0] == "tunnel" && second[1].starts_with(VERSION), "{output:?}");
    let restart = "--no-block try-restart tunnel-server.service tunnel-edge.service";
    assert_eq!(second[2..], ["daemon-reload", restart], "{output:?}");
    let listed = until_dot();
    let pages: usize = listed[0].parse().unwrap();
    assert!(pages > 20, "{output:?}");
    assert_eq!(listed.last(), Some(&"daemon-reload"), "{output:?}");
    assert!(listed.contains(&"stop tunnel-server.service tunnel-edge.service"), "{output:?}");
    assert_eq!(listed.iter().filter(|line| **line == "kept").count(), 2, "{output:?}");
}

#[test]
fn lintian_finds_no_error_and_no_warning_in_the_package() {
    if !all() || !are_installed(&["lintian"]) {
        return;
    }
    let Some(release) = release() else { return };
    let package = file(release, ".deb");
    let args = ["--fail-on", "error,warning", "--allow-root", package.to_str().unwrap()];
    let output = run("lintian", &args, None, 4 * TIMEOUT);
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_static_program_needs_no_libc_and_another_names_its_version() {
    let Some(release) = release() else { return };
    let package = file(release, ".deb");
    let depends = run("dpkg-deb", &["--field", package.to_str().unwrap(), "Depends"], None, TIMEOUT).stdout;
    if env_var("TUNNEL_RELEASE_BINARY").is_some() {
        assert_eq!(depends, "adduser\n");
    } else {
        assert!(depends.starts_with("libc6 (>= 2.") && depends.ends_with(", adduser\n"), "{depends}");
    }
}

/// Follows the layout from its index to the program, and runs a server in the image's files as the image's user.
#[test]
fn the_image_is_an_oci_layout_and_serves() {
    if !is_root() || !are_installed(&["unshare", "chroot", "ldd"]) {
        return;
    }
    let Some(release) = release() else { return };
    let layout = unpack(&file(release, "-image.tar"));
    let path = |name: &str| layout.path().join(name);
    assert_eq!(json(&path("oci-layout"))["imageLayoutVersion"], "1.0.0");
    let blob = |descriptor: &Value, kind: &str| {
        assert_eq!(descriptor["mediaType"], format!("application/vnd.oci.image.{kind}"));
        let digest = descriptor["digest"].as_str().unwrap();
        let file = path("blobs").join(digest.replace(':', "/"));
        assert_eq!(sha256(&file), digest);
        assert_eq!(file.metadata().unwrap().len(), descriptor["size"]);
        file
    };
    let index = json(&path("index.json"));
    let manifest = json(&blob(&index["manifests"][0], "manifest.v1+json"));
    let config = json(&blob(&manifest["config"], "config.v1+json"));
    let layer = blob(&manifest["layers"][0], "layer.v1.tar+gzip");
    let image = unpack(&layer);
    let tar = image.path().join("tar");
    ok(&run("sh", &["-c", &format!("zcat {} >{}", layer.display(), tar.display())], None, TIMEOUT));
    assert_eq!(config["rootfs"]["diff_ids"], serde_json::json!([sha256(&tar)]));
    std::fs::remove_file(&tar).unwrap();
    // The image that docker builds is the same.
    let dockerfile = std::fs::read_to_string(script("deploy/docker/Dockerfile").get_program()).unwrap();
    let last = dockerfile.rsplit_once("FROM scratch").unwrap().1;
    let user = config["config"]["User"].as_str().unwrap();
    assert!(last.contains(&format!("USER {user}\n")), "{last}");
    let entrypoint = &config["config"]["Entrypoint"];
    assert!(last.contains(&format!("ENTRYPOINT {entrypoint}\n")), "{last}");
    let labels = config["config"]["Labels"].as_object().unwrap();
    assert_eq!(labels["org.opencontainers.image.version"], env!("CARGO_PKG_VERSION"));
    for name in ["title", "licenses", "description"].map(|name| format!("org.opencontainers.image.{name}")) {
        assert!(last.contains(&format!("{name}={}", labels[&name])), "{name}: {last}");
    }
    assert!(labels.contains_key("org.opencontainers.image.revision"), "{labels:?}");

    assert!(image.path().join("usr/local/share/doc/tunnel/THIRD-PARTY-LICENSES.txt").is_file());
    let program = image.path().join(entrypoint[0].as_str().unwrap().trim_start_matches('/'));
    runs(&program);
    let place = TestDir::new();
    let (log_port, etc) = (free_port(), image.path().join("etc/tunnel"));
    let text =
        place.cloud_config(loopback(free_port()), log_port) + "[server.connect]\nlisten = \"127.0.0.1:0\"\n";
    place.config("server", &text.replace(place.path().to_str().unwrap(), "/etc/tunnel"));
    // Every runtime of containers provides devices. A debug build needs libraries of this machine.
    let libraries = run("ldd", &[&program], None, TIMEOUT).stdout.contains("=>");
    let script = format!(
        "set -e; cd {}; mkdir -p {} dev; mount --rbind /dev dev; cp -r {}/. {1}; chown -R {user} {1}
        if {libraries}; then for dir in lib lib64 usr/lib; do mkdir -p $dir; mount --rbind /$dir $dir; done; fi
        exec chroot --userspec={user} . {} server -c /etc/tunnel/server.toml --log-dir=/var/log/tunnel --alsologtostderr",
        image.path().display(),
        etc.display(),
        place.path().display(),
        entrypoint[0].as_str().unwrap(),
    );
    let mut command = clear_environment(Command::new("unshare"));
    command.args(["-m", "--propagation", "private", "sh", "-c", &script]);
    let mut server = Running::start("server", place.path(), &mut command);
    server.wait_for_exact_answer(log_port, "/readyz", "ok\n");
}

/// Compares with cargo's tree for this target, without crates that only tests use. The list's own graph reaches all.
#[test]
fn the_list_of_dependencies_is_that_of_cargo() {
    let Some(release) = release() else { return };
    let list = json(&file(release, ".cdx.json"));
    assert_eq!(list["bomFormat"], "CycloneDX");
    let program = &list["metadata"]["component"];
    let all = || list["components"].as_array().unwrap().iter().chain([program]);
    let field = |value: &Value, key: &str| value[key].as_str().unwrap().to_owned();
    let listed: BTreeSet<_> = all().map(|one| field(one, "name") + " v" + &field(one, "version")).collect();
    let expected = tree("normal,build");
    assert!(expected.contains("tunnel-proto v0.1.0") && expected.len() > 200, "{expected:?}");
    assert_eq!(listed, expected);

    let (mut reached, mut open) = (BTreeSet::new(), vec![field(program, "bom-ref")]);
    while let Some(one) = open.pop() {
        let node = list["dependencies"].as_array().unwrap().iter().find(|node| node["ref"] == *one).unwrap();
        let next = node["dependsOn"].as_array().unwrap().iter();
        if reached.insert(one) {
            open.extend(next.map(|next| next.as_str().unwrap().to_owned()));
        }
    }
    assert_eq!(reached, all().map(|one| field(one, "bom-ref")).collect());
}

/// Makes a small release, of a script that runs the program, where new files have this mask.
fn small_with(umask: &str, dir: &Path) -> PathBuf {
    let program = dir.join("program");
    if !program.exists() {
        std::fs::write(&program, format!("#!/bin/sh\nexec {PROGRAM} \"$@\"\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let files = tempfile::tempdir_in(dir).unwrap().keep();
    let mut command = Command::new("sh");
    command
        .env_remove("TARGET")
        .args(["-c", &format!("umask {umask} && exec \"$@\""), "sh"])
        .arg(script("scripts/release.sh").get_program());
    command.args([env!("CARGO_PKG_VERSION"), "--binary"]).arg(program).arg("--out").arg(&files);
    ok(&run_command("release.sh", &mut command, None, 6 * TIMEOUT));
    files
}

fn small(dir: &Path) -> PathBuf {
    small_with("022", dir)
}

#[test]
fn releases_of_the_same_program_are_identical() {
    if release().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [one, two] = ["022", "077"].map(|umask| {
        let files = small_with(umask, dir.path());
        std::fs::read_to_string(files.join("SHA256SUMS")).unwrap()
    });
    assert_eq!(one.lines().count(), 5, "{one}");
    assert_eq!(one, two);
}

#[test]
fn install_sh_installs_over_https_and_refuses_a_changed_byte() {
    if release().is_none() || !are_installed(&["curl", "openssl", "sha256sum"]) {
        return;
    }
    let place = TestDir::new();
    let files = small(place.path());
    let port = free_port();
    let mut command = Command::new("openssl");
    command.args(["s_server", "-quiet", "-WWW", "-accept", &loopback(port).to_string()]).current_dir(&files);
    command.arg("-cert").arg(&place.files.cert).arg("-key").arg(&place.files.key);
    let mut server = Running::start("openssl", place.path(), &mut command);
    crate::wait::wait_until("openssl listens", TIMEOUT, || {
        server.assert_running();
        std::net::TcpStream::connect(loopback(port)).is_ok()
    });
    let url = format!("https://localhost:{port}");
    let to = place.path().join("bin");
    let local = files.to_str().unwrap();
    let install = |args: &[&str]| {
        let mut command = Command::new(files.join("install.sh"));
        command.args(args).args(["--dir", to.to_str().unwrap()]).env("CURL_CA_BUNDLE", &place.files.ca);
        run_command("install.sh", &mut command, None, TIMEOUT)
    };
    let refuses = |args: &[&str], why: &str| {
        let output = install(args);
        assert!(!output.status.success() && output.stderr.contains(why), "{output:?}");
    };
    let nothing = || !to.exists() || std::fs::read_dir(&to).unwrap().next().is_none();

    refuses(&["--from", &url, "--version", "9.9.9"], "has no release 9.9.9");
    refuses(&["--from", "http://localhost"], "is not safe");
    assert!(nothing());
    for from in [&["--from", &url, "--version", env!("CARGO_PKG_VERSION")][..], &["--from", local], &[]] {
        ok(&install(from));
        runs_small(&to.join("tunnel"));
        let unit = place.path().join("lib/systemd/system/tunnel-edge.service");
        let started = format!("ExecStart={}/tunnel edge -c /etc/tunnel/edge.toml\n", to.display());
        assert!(std::fs::read_to_string(&unit).unwrap().contains(&started));
        assert!(place.path().join("lib/systemd/user/tunnel-proxy.service").exists());
        ok(&install(&["--uninstall"]));
        assert!(nothing() && !unit.exists());
    }
    refuses(&["--uninstall"], "there is no");
    let sums = files.join("SHA256SUMS");
    let text = std::fs::read_to_string(&sums).unwrap();
    std::fs::write(&sums, text.replace("tunnel-", "tunnel-9.") + &text).unwrap();
    refuses(&[], "has several releases");
    ok(&install(&["--version", env!("CARGO_PKG_VERSION")]));
    ok(&install(&["--uninstall"]));
    std::fs::write(&sums, text).unwrap();

    let tarball = file(&files, ".tar.gz");
    let mut bytes = std::fs::read(&tarball).unwrap();
    // In the file's header, where it changes nothing that tar reads.
    bytes[4] ^= 1;
    std::fs::write(&tarball, bytes).unwrap();
    for from in [&url, local] {
        refuses(&["--from", from], "checksum of");
        assert!(nothing());
    }
}

fn runs_small(program: &Path) {
    let output = run(program.to_str().unwrap(), &["--version"], None, TIMEOUT);
    assert!(output.stdout.starts_with(VERSION), "{output:?}");
}

#[test]
fn install_sh_installs_a_signed_release_and_refuses_another_signature() {
    if release().is_none() || !are_installed(&["minisign", "openssl", "sha256sum"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (files, to) = (small(dir.path()), dir.path().join("bin"));
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let [key, other] = ["key", "other"].map(|name| {
        ok(&run("minisign", &["-G", "-W", "-s", &path(name), "-p", &path("public")], None, TIMEOUT));
        let public = std::fs::read_to_string(path("public")).unwrap();
        std::fs::remove_file(path("public")).unwrap();
        public.lines().last().unwrap().to_owned()
    });
    let sign = |key: &str| {
        let mut command = script("scripts/sign.sh");
        run_command("sign.sh", command.arg(&files).arg(path(key)), None, TIMEOUT)
    };
    let install = |key: &str| {
        let mut command = Command::new(files.join("install.sh"));
        run_command("install.sh", command.arg("--dir").arg(&to).args(["--key", key]), None, TIMEOUT)
    };
    let refuses = |key: &str, why: &str| {
        let output = install(key);
        assert!(!output.status.success() && output.stderr.contains(why), "{output:?}");
        assert!(!to.exists());
    };

    refuses(&key, "cannot fetch SHA256SUMS.minisig");
    ok(&sign("key"));
    refuses(&other, "signature of SHA256SUMS is wrong");
    refuses("nonsense", "signature of SHA256SUMS is wrong");
    let sums = files.join("SHA256SUMS");
    let text = std::fs::read_to_string(&sums).unwrap();
    std::fs::write(&sums, text.clone() + "\n").unwrap();
    refuses(&key, "signature of SHA256SUMS is wrong");
    std::fs::write(&sums, text).unwrap();
    ok(&install(&key));
    runs_small(&to.join("tunnel"));

    // A key in install.sh is used without the flag, and no release is signed with another one.
    let installer = files.join("install.sh");
    let text = std::fs::read_to_string(&installer).unwrap();
    std::fs::write(&installer, text.replace("\nkey=''\n", &format!("\nkey='{other}'\n"))).unwrap();
    let output = sign("key");
    assert!(!output.status.success() && output.stderr.contains(&other), "{output:?}");
    ok(&sign("other"));
    ok(&run(installer.to_str().unwrap(), &["--dir", to.to_str().unwrap()], None, TIMEOUT));
}

#[test]
fn install_sh_needs_only_the_tools_of_busybox() {
    if release().is_none() || !are_installed(&["busybox"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (files, tools, to) = (small(dir.path()), dir.path().join("tools"), dir.path().join("bin"));
    std::fs::create_dir(&tools).unwrap();
    ok(&run("busybox", &["--install", "-s", tools.to_str().unwrap()], None, TIMEOUT));
    let mut command = Command::new(tools.join("sh"));
    command.arg(files.join("install.sh")).arg("--dir").arg(&to).env("PATH", &tools);
    ok(&run_command("install.sh", &mut command, None, TIMEOUT));
    runs_small(&to.join("tunnel"));
}

#[test]
fn install_sh_leaves_nothing_if_a_directory_is_in_the_way_or_a_signal_ends_it() {
    if !are_installed(&["sha256sum", "tar", "gzip"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let names = |name: &str| -> Vec<_> {
        std::fs::read_dir(path(name)).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    };
    // A release of a program that waits. The shell may lose a signal that arrives while it starts the program.
    let runs = path("runs");
    let wait = format!("#!/bin/sh\n: >{}\nexec sleep {}\n", runs.display(), 10 * TIMEOUT.as_secs());
    let machine = run("uname", &["-m"], None, TIMEOUT).stdout;
    let name = format!("tunnel-9-{}-linux", machine.trim());
    for made in [&name, "tmp", "taken", "taken/tunnel", "bin"] {
        std::fs::create_dir(path(made)).unwrap();
    }
    let program = path(&name).join("tunnel");
    std::fs::write(&program, wait).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let pack = format!(
        "cd {} && tar -czf {name}.tar.gz {name} && sha256sum {name}.tar.gz >SHA256SUMS",
        dir.path().display()
    );
    ok(&run("sh", &["-c", &pack], None, TIMEOUT));
    let install = |to: &str| {
        let mut command = script("deploy/install.sh");
        command.arg("--from").arg(dir.path()).arg("--dir").arg(path(to)).env("TMPDIR", path("tmp"));
        command
    };

    let output = run_command("install.sh", &mut install("taken"), None, TIMEOUT);
    assert!(!output.status.success() && output.stderr.contains("is a directory"), "{output:?}");
    assert_eq!(
        (names("taken"), names("taken/tunnel"), names("tmp")),
        (vec!["tunnel".into()], vec![], vec![])
    );

    for signal in ["HUP", "INT", "TERM"] {
        // To its process group, as a terminal sends it.
        let mut installer = Running::start("install.sh", dir.path(), install("bin").process_group(0));
        crate::wait::wait_until("the program runs", TIMEOUT, || {
            installer.assert_running();
            runs.exists()
        });
        std::fs::remove_file(&runs).unwrap();
        ok(&run("kill", &["-s", signal, "--", &format!("-{}", installer.id())], None, TIMEOUT));
        assert!(!installer.wait_for_exit(TIMEOUT).success());
        assert_eq!((names("bin"), names("tmp")), (Vec::new(), Vec::new()), "{signal}");
    }
}
