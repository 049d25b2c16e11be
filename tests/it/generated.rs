//! The generated code is what proto/ defines. `UPDATE_REFERENCE=1` rewrites it.

use std::path::Path;

use tempfile::TempDir;

#[test]
fn generated_code_matches_the_proto_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let proto = root.join("proto");
    let compile = |files: &[&str]| protox::compile(files, [&proto]).unwrap();

    let made = TempDir::new().unwrap();
    let configured = tonic_prost_build::configure().build_client(false).build_server(false);
    let messages = || configured.clone().out_dir(made.path());
    messages().bytes(".").compile_fds(compile(&["tunnel.proto", "extension.proto"])).unwrap();
    messages().compile_fds(compile(&["enrol.proto"])).unwrap();
    messages().bytes(".").compile_fds(compile(&["etcd.proto"])).unwrap();
    messages().compile_fds(compile(&["channelz.proto"])).unwrap();

    for (made_file, file) in [
        ("proto.rs", "crates/proto/src/codec/proto.rs"),
        ("enrol.rs", "crates/link/src/grpc/enrol/wire.rs"),
        ("etcdserverpb.rs", "src/etcd/wire.rs"),
        ("grpc.channelz.v1.rs", "src/admin/channelz/wire.rs"),
    ] {
        let expected = std::fs::read(made.path().join(made_file)).unwrap();
        if std::env::var_os("UPDATE_REFERENCE").is_some() {
            std::fs::write(root.join(file), &expected).unwrap();
        }
        let found = std::fs::read(root.join(file)).unwrap_or_default();
        assert!(found == expected, "{file} is old; run this test with UPDATE_REFERENCE=1");
    }
}
