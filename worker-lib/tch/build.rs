//! Builds the shim over libtorch, and adds the libtorch folder that torch-sys linked against to the
//! library search path of tests and examples.

use std::{env, path::PathBuf};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/shim.cpp");
    let Ok(libraries) = env::var("DEP_TCH_LIBTORCH_LIB") else {
        return; // torch-sys is built without libtorch, only for its documentation
    };
    println!("cargo::rustc-link-arg=-Wl,-rpath={libraries}");
    // The headers are next to the libraries, unless a variable says otherwise, as for torch-sys.
    println!("cargo::rerun-if-env-changed=LIBTORCH_INCLUDE");
    println!("cargo::rerun-if-env-changed=LIBTORCH_CXX11_ABI");
    let above = PathBuf::from(&libraries).join("..");
    let root = env::var("LIBTORCH_INCLUDE").map_or(above, PathBuf::from);
    let abi = env::var("LIBTORCH_CXX11_ABI").unwrap_or_else(|_| "1".into());
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .pic(true)
        .warnings(false)
        .include(root.join("include"))
        .include(root.join("include/torch/csrc/api/include"))
        .define("_GLIBCXX_USE_CXX11_ABI", abi.as_str())
        .file("src/shim.cpp")
        .compile("gradwire_shim");
}
