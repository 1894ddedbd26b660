//! Lets tests and examples find libtorch at run time: the folder that torch-sys linked against
//! becomes part of their library search path.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Ok(folder) = std::env::var("DEP_TCH_LIBTORCH_LIB") {
        println!("cargo::rustc-link-arg=-Wl,-rpath={folder}");
    }
}
