//! Every configuration key of Gradwire, declared once: name, kind, default, unit and meaning.
//!
//! A value comes from the last of five layers that names its key: the embedded defaults, those of
//! Horovod's variables that say the same, a TOML file, the `GRADWIRE_<SECTION>__<KEY>` environment,
//! the flags (`--set section.key=value`). Each layer is checked by itself, so that an error names the place where the value was written, and
//! each value keeps its [`Origin`]. A key that nobody declared is an error, not a shrug.
//!
//! This crate reads the file it is told to read and nothing else: the environment is handed in.
//!
//! - [`key`]: what a key is, and the check of one value (TRUST)
//! - [`variables`]: what the launcher says, which is no setting
//! - [`table`]: all keys, and the typed [`Settings`] made of them
//! - [`layers`]: from layers to [`Loaded`]
//! - [`horovod`]: Horovod's variables, and which of them are settings
//! - [`rules`]: what no single key shows

#![forbid(unsafe_code)]

pub mod error;
pub mod horovod;
pub mod key;
pub mod layers;
pub mod rules;
pub mod table;
pub mod variables;

pub use error::SettingsError;
pub use key::{Key, Kind};
pub use layers::{Layers, Loaded, Origin, RESERVED_VARIABLES, Row};
pub use table::{HugePages, KEYS, LogFormat, Settings};
