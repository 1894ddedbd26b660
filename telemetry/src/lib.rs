//! Logs, metrics and the HTTP endpoint of Gradwire's services.
//!
//! Every metric is declared here, once. A service records with the handles that the declaration
//! makes; this crate holds the one recorder of the process and serves it. It also answers the two
//! questions that an operator asks: is the service alive (`/healthz`), and may work be sent to it
//! (`/readyz`, which gives the reason if not).
//!
//! Nothing here changes what a service does, and nothing is served that could. All but [`logging`]
//! is the feature `serve`: a command that only logs needs no HTTP.
//!
//! - [`logging`]: `tracing` to standard error, as text or JSON
//! - [`rate`]: a limit for lines that strangers cause
//! - [`histogram`]: durations, in fixed arrays of atomics
//! - [`metric`]: what a metric is
//! - `guard`: connections that are neither many nor long
//! - [`collect`]: values that are read when somebody asks for them
//! - `process`: what the system knows of this process
//! - `text`: reads the text for Prometheus back
//! - `registry`: the recorder, and the text for Prometheus
//! - [`declare`]: how one is declared
//! - [`catalog`]: every metric
//! - [`mod@reference`]: the page about them
//! - [`otlp`]: sends the metrics to a collector
//! - [`endpoint`]: the HTTP server, on its own thread

#![forbid(unsafe_code)]

#[cfg(feature = "serve")]
pub mod catalog;
#[cfg(feature = "serve")]
pub mod collect;
#[cfg(feature = "serve")]
pub mod declare;
#[cfg(feature = "serve")]
pub mod endpoint;
pub mod error;
#[cfg(feature = "serve")]
mod guard;
#[cfg(feature = "serve")]
pub mod histogram;
pub mod logging;
#[cfg(feature = "serve")]
pub mod metric;
#[cfg(feature = "serve")]
pub mod otlp;
#[cfg(feature = "serve")]
mod process;
#[cfg(feature = "serve")]
pub mod rate;
#[cfg(feature = "serve")]
pub mod reference;
#[cfg(feature = "serve")]
mod registry;
#[cfg(feature = "serve")]
mod text;

#[cfg(feature = "serve")]
pub use axum::Router;
#[cfg(feature = "serve")]
pub use collect::{Collect, on_scrape};
#[cfg(feature = "serve")]
pub use endpoint::{Endpoint, EndpointConfig, Readiness, Target};
pub use error::TelemetryError;
#[cfg(feature = "serve")]
pub use histogram::{Histogram, TimeCounter};
pub use logging::{LogConfig, init_logging};
#[cfg(feature = "serve")]
pub use metrics::{Counter, Gauge};
#[cfg(feature = "serve")]
pub use otlp::{Collector, OtlpConfig};
#[cfg(feature = "serve")]
pub use rate::Rate;
