//! The generated messages of `gradwire.v1`, documented in their `.proto` files.
#![expect(
    missing_docs,
    reason = "generated; the comments of the .proto files are the documentation"
)]

include!("../generated/gradwire.v1.rs");
