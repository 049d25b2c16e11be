//! Compiles the messages of a link without an installed protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=../../proto");
    let files = protox::compile(["tunnel.proto", "extension.proto"], ["../../proto"])?;
    tonic_prost_build::configure().build_client(false).build_server(false).bytes(".").compile_fds(files)?;
    Ok(())
}
