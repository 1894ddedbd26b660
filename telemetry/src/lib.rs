//! Logs, metrics and the HTTP endpoint of Gradwire's services.
//!
//! Every metric is declared here, once. Services record with the handles from the declaration; this
//! crate holds the recorder of the process and serves its metrics. It also says whether the service
//! is alive (`/healthz`), and whether work may be sent to it (`/readyz`, with the reason if not).
//!
//! Nothing here changes what a service does, and the endpoint is read-only.
//!
//! - [`logging`]: `tracing` to standard error, as text or JSON
//! - [`rate`]: a limit for log lines that strangers can cause
//! - [`histogram`]: durations, in fixed arrays of atomics
//! - [`metric`]: the row of a declaration
//! - `guard`: limits the number and the idle time of connections
//! - [`collect`]: values that are read when the metrics are scraped
//! - `process`: what the system knows about this process
//! - `text`: parses the text format of Prometheus
//! - `registry`: the recorder, and its text for Prometheus
//! - [`declare`]: the macro that declares metrics
//! - [`catalog`]: every metric
//! - [`mod@reference`]: the reference of all metrics
//! - [`otlp`]: sends the metrics to a collector
//! - [`endpoint`]: the HTTP server, on its own thread

#![forbid(unsafe_code)]

pub mod catalog;
pub mod collect;
pub mod declare;
pub mod endpoint;
pub mod error;
mod guard;
pub mod histogram;
pub mod logging;
pub mod metric;
pub mod otlp;
mod process;
pub mod rate;
pub mod reference;
mod registry;
mod text;

pub use axum::Router;
pub use collect::{Collect, on_scrape};
pub use endpoint::{Endpoint, EndpointConfig, Readiness, Target};
pub use error::TelemetryError;
pub use histogram::{Histogram, TimeCounter};
pub use logging::{LogConfig, init_logging};
pub use metrics::{Counter, Gauge};
pub use otlp::{Collector, OtlpConfig};
pub use rate::Rate;
