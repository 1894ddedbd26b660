//! Generates the messages and services with protox, so that no protoc is needed.

use std::{env, error::Error, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    // tonic-prost-build does not say what it read: without this line every touched file would
    // generate the code again.
    println!("cargo:rerun-if-changed=gradwire");
    let files = ["types", "coordinator", "inspect", "trace", "worker"]
        .map(|name| format!("gradwire/v1/{name}.proto"));
    let descriptors = protox::compile(files, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
