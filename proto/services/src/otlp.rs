//! The messages of OpenTelemetry's protocol, generated from the files in `opentelemetry/`.
#![expect(
    missing_docs,
    reason = "generated; the comments of the .proto files are the documentation"
)]

/// The messages of one package.
macro_rules! package {
    ($name:literal) => {
        #[allow(clippy::all, rustdoc::all, reason = "generated from texts for other tools")]
        pub mod v1 {
            include!(concat!("../generated/opentelemetry.proto.", $name, ".v1.rs"));
        }
    };
}

pub mod common {
    package!("common");
}

pub mod resource {
    package!("resource");
}

pub mod metrics {
    package!("metrics");
}

pub mod trace {
    package!("trace");
}

pub mod collector {
    pub mod metrics {
        package!("collector.metrics");
    }

    pub mod trace {
        package!("collector.trace");
    }
}
