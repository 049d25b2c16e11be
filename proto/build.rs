//! Compiles the protocol's messages without an installed protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["proto/tunnel.proto", "proto/extension.proto"], ["proto"])?;
    tonic_prost_build::configure().build_client(false).build_server(false).bytes(".").compile_fds(files)?;
    let enrol = protox::compile(["proto/enrol.proto"], ["proto"])?;
    tonic_prost_build::configure().build_transport(false).compile_fds(enrol)?;
    let etcd = protox::compile(["proto/etcd.proto"], ["proto"])?;
    tonic_prost_build::configure().build_server(false).build_transport(false).bytes(".").compile_fds(etcd)?;
    let mut debugging = protox::Compiler::new(["proto"])?;
    debugging.include_imports(true).open_files(["channelz.proto", "reflection.proto"])?;
    tonic_prost_build::configure().build_client(false).compile_fds(debugging.file_descriptor_set())?;
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo says where to")?);
    std::fs::write(out.join("channelz.bin"), debugging.encode_file_descriptor_set())?;
    Ok(())
}
