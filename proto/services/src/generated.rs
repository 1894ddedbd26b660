//! The generated services of `gradwire.v1`, documented in their `.proto` files.

include!("../generated/gradwire.v1.rs");
