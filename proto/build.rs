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
    if env::var_os("CARGO_FEATURE_OTLP").is_some() {
        println!("cargo:rerun-if-changed=opentelemetry");
        let files = ["metrics", "trace"]
            .map(|name| format!("opentelemetry/proto/collector/{name}/v1/{name}_service.proto"));
        let builder = tonic_prost_build::configure().build_server(false);
        builder.compile_fds(protox::compile(files, ["."])?)?;
    }
    let [client, server] =
        ["CLIENT", "SERVER"].map(|name| env::var_os(format!("CARGO_FEATURE_{name}")).is_some());
    let builder = tonic_prost_build::configure().build_client(client).build_server(server);
    builder.compile_fds(descriptors)?;
    if !server {
        return Ok(());
    }

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
