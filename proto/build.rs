//! Generates the messages and services with protox, so that no protoc is needed.

use std::{env, error::Error, fs, path::PathBuf};

use tonic_build::manual::{Builder, Method, Service};

fn main() -> Result<(), Box<dyn Error>> {
    // tonic-prost-build does not report which files it read. Without this line, touching any file
    // would generate the code again.
    println!("cargo:rerun-if-changed=gradwire");
    let files = ["types", "coordinator", "inspect", "trace", "worker"]
        .map(|name| format!("gradwire/v1/{name}.proto"));
    let descriptors = protox::compile(files, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;
    tonic_prost_build::configure().compile_fds(descriptors)?;

    // The same service again, for messages that many nodes share.
    let session = Method::builder()
        .name("session")
        .route_name("Session")
        .input_type("crate::pb::NodeMessage")
        .output_type("std::sync::Arc<crate::broadcast::Broadcast>")
        .codec_path("crate::broadcast::BroadcastCodec")
        .client_streaming()
        .server_streaming()
        .build();
    let service = Service::builder().name("Coordinator").package("gradwire.v1").method(session);
    Builder::new().build_client(false).compile(&[service.build()]);
    Ok(())
}
