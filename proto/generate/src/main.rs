//! Generates the code of the messages (`proto/generated/`) and of the services
//! (`proto/services/generated/`) from the `.proto` files with protox, so that no protoc is needed.
//! `make protos` runs it.
//!
//! The result is in git, because the generators and what they depend on take longer to build than
//! most of Gradwire. A test compares it with what is generated now.

#![forbid(unsafe_code)]

use std::{error::Error, fs, path::Path};

use tonic_build::manual::{Builder, Method, Service};

const PROTO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Where the code is, from `proto/`.
const MESSAGES: &str = "generated";
const SERVICES: &str = "services/generated";

/// Generates both folders below `root`.
fn generate(root: &Path) -> Result<(), Box<dyn Error>> {
    let (messages, services) = (&root.join(MESSAGES), &root.join(SERVICES));
    let files = ["types", "coordinator", "inspect", "trace", "waits", "worker"]
        .map(|name| format!("gradwire/v1/{name}.proto"));
    let descriptors = protox::compile(files, [PROTO])?;
    let encoded = prost::Message::encode_to_vec(&descriptors);
    fs::write(services.join("descriptors.bin"), encoded)?;
    tonic_prost_build::configure()
        .build_client(false)
        .build_server(false)
        .out_dir(messages)
        .compile_fds(descriptors.clone())?;
    tonic_prost_build::configure()
        .extern_path(".gradwire.v1", "::gradwire_proto::pb")
        .client_mod_attribute(".", "#[cfg(feature = \"client\")]")
        .server_mod_attribute(".", "#[cfg(feature = \"server\")]")
        .out_dir(services)
        .compile_fds(descriptors)?;

    // The same service once more, for messages that many nodes share.
    let session = Method::builder()
        .name("session")
        .route_name("Session")
        .input_type("::gradwire_proto::pb::NodeMessage")
        .output_type("std::sync::Arc<crate::broadcast::Broadcast>")
        .codec_path("crate::broadcast::BroadcastCodec")
        .client_streaming()
        .server_streaming()
        .build();
    let service = Service::builder().name("Coordinator").package("gradwire.v1").method(session);
    Builder::new().build_client(false).out_dir(services).compile(&[service.build()]);

    let files = ["metrics", "trace"]
        .map(|name| format!("opentelemetry/proto/collector/{name}/v1/{name}_service.proto"));
    let descriptors = protox::compile(files, [format!("{PROTO}/services")])?;
    // Their comments contain JSON, which `cargo test` would take for examples in Rust.
    let mut config = tonic_prost_build::Config::new();
    config.disable_comments(["."]);
    tonic_prost_build::configure()
        .build_server(false)
        .out_dir(services)
        .compile_fds_with_config(descriptors, config)?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    generate(Path::new(PROTO))
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, path::PathBuf};

    use super::*;

    fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
        let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let content = |path: PathBuf| {
            (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap())
        };
        paths.map(content).collect()
    }

    #[test]
    fn the_code_in_git_is_up_to_date() {
        let now = tempfile::tempdir().unwrap();
        for folder in [MESSAGES, SERVICES] {
            fs::create_dir_all(now.path().join(folder)).unwrap();
        }
        generate(now.path()).unwrap();
        for folder in [MESSAGES, SERVICES] {
            let now = contents(&now.path().join(folder));
            let kept = contents(&Path::new(PROTO).join(folder));
            assert!(now.keys().eq(kept.keys()), "run make protos: {:?}", now.keys());
            for (name, content) in &now {
                assert!(content == &kept[name], "run make protos: {folder}/{name} differs");
            }
        }
    }
}
