//! Logs, metrics and the HTTP endpoint of Gradwire's services.
//!
//! A service declares its metrics where it measures them, with the `metrics` macros; this crate
//! holds the one recorder of the process, runs its upkeep (without which histograms grow), and
//! serves it. It also answers the two questions that an operator asks: is the service alive
//! (`/healthz`), and may work be sent to it (`/readyz`, which gives the reason if not).
//!
//! Nothing here changes what a service does, and nothing is served that could.
//!
//! - [`logging`]: `tracing` to standard error, as text or JSON
//! - [`rate`]: a limit for lines that strangers cause
//! - [`endpoint`]: the recorder, its upkeep, and the HTTP server

#![forbid(unsafe_code)]

pub mod endpoint;
pub mod error;
pub mod logging;
pub mod rate;

pub use endpoint::{Endpoint, EndpointConfig, Readiness};
pub use error::TelemetryError;
pub use logging::{LogConfig, init_logging};
pub use rate::Rate;
