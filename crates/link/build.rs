//! Compiles the calls by which a machine joins, without an installed protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=../../proto/enrol.proto");
    if std::env::var_os("CARGO_FEATURE_INVITATIONS").is_none() {
        return Ok(());
    }
    let enrol = protox::compile(["enrol.proto"], ["../../proto"])?;
    tonic_prost_build::configure().build_transport(false).compile_fds(enrol)?;
    Ok(())
}
