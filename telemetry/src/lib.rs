//! Logs, metrics and the HTTP endpoint of Gradwire's services.
//!
//! Every metric is declared here, once. Services record with the handles from the declaration; this
//! crate holds the recorder of the process and serves its metrics. It also says whether the service
//! is alive (`/healthz`), and whether work may be sent to it (`/readyz`, with the reason if not).
//!
//! Nothing here changes what a service does, and the endpoint is read-only. All but [`logging`] is
//! the feature `serve`: a command that only logs needs no HTTP.
//!
//! - [`logging`]: `tracing` to standard error, as text or JSON
//! - [`rate`]: a limit for log lines that strangers can cause
//! - [`histogram`]: durations, in fixed arrays of atomics
//! - [`metric`]: the row of a declaration
//! - `guard`: limits the number and the idle time of connections
//! - [`collect`]: values that are read when the metrics are scraped
//! - `process`: what the system knows about this process
//! - `text`: parses the text format of Prometheus
//! - [`reactor`]: a thread for work of its own
//! - `registry`: the recorder, and its text for Prometheus
//! - [`declare`]: the macro that declares metrics
//! - [`catalog`]: every metric
//! - [`mod@reference`]: the reference of all metrics
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
pub mod reactor;
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
pub use logging::{LogConfig, check_filter, init_logging, record_events};
#[cfg(feature = "serve")]
pub use metrics::{Counter, Gauge};
#[cfg(feature = "serve")]
pub use otlp::{Collector, OtlpConfig};
#[cfg(feature = "serve")]
pub use rate::Rate;
