//! Compiles the messages of etcd and of gRPC's debugging port without an installed protoc. The messages of links and
//! invitations are compiled by the crates that use them.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let etcd = protox::compile(["proto/etcd.proto"], ["proto"])?;
    tonic_prost_build::configure().build_server(false).build_transport(false).bytes(".").compile_fds(etcd)?;
    if std::env::var_os("CARGO_FEATURE_CHANNELZ").is_none() {
        return Ok(());
    }
    let mut debugging = protox::Compiler::new(["proto"])?;
    debugging.include_imports(true).open_file("channelz.proto")?;
    tonic_prost_build::configure().build_client(false).compile_fds(debugging.file_descriptor_set())?;
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    std::fs::write(out.join("channelz.bin"), debugging.encode_file_descriptor_set())?;
    Ok(())
}
