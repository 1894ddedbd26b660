//! Generates `proto/generated/`, the code of the messages and services, from the `.proto` files
//! with protox, so that no protoc is needed. `make protos` runs it.
//!
//! The result is in git, because the generators and what they depend on take longer to build than
//! most of Gradwire. A test compares it with what is generated now.

#![forbid(unsafe_code)]

use std::{error::Error, fs, path::Path};

use tonic_build::manual::{Builder, Method, Service};

const PROTO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn generate(out: &Path) -> Result<(), Box<dyn Error>> {
    let files = ["types", "coordinator", "inspect", "trace", "worker"]
        .map(|name| format!("gradwire/v1/{name}.proto"));
    let descriptors = protox::compile(files, [PROTO])?;
    fs::write(out.join("descriptors.bin"), prost::Message::encode_to_vec(&descriptors))?;
    tonic_prost_build::configure()
        .client_mod_attribute(".", "#[cfg(feature = \"client\")]")
        .server_mod_attribute(".", "#[cfg(feature = \"server\")]")
        .out_dir(out)
        .compile_fds(descriptors)?;

    // The same service once more, for messages that many nodes share.
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
    Builder::new().build_client(false).out_dir(out).compile(&[service.build()]);

    let files = ["metrics", "trace"]
        .map(|name| format!("opentelemetry/proto/collector/{name}/v1/{name}_service.proto"));
    let descriptors = protox::compile(files, [PROTO])?;
    tonic_prost_build::configure().build_server(false).out_dir(out).compile_fds(descriptors)?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    generate(Path::new(&format!("{PROTO}/generated")))
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
        generate(now.path()).unwrap();
        let (now, kept) =
            (contents(now.path()), contents(Path::new(&format!("{PROTO}/generated"))));
        assert!(now.keys().eq(kept.keys()), "run make protos: {:?}", now.keys());
        for (name, content) in &now {
            assert!(content == &kept[name], "run make protos: {name} differs");
        }
    }
}
