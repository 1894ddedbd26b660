//! Every configuration key of Gradwire, declared once: name, kind, default, unit and meaning.
//!
//! There are five layers: the embedded defaults, the corresponding variables of Horovod, a TOML
//! file, the environment (`GRADWIRE_<SECTION>__<KEY>`), and the flags (`--set section.key=value`).
//! The last layer that sets a key wins. Each layer is checked by itself, so an error names the
//! place where the value was written, and each value keeps its [`Origin`]. An undeclared key is an
//! error.
//!
//! This crate reads only the given file; the environment is an argument.
//!
//! - [`origin`]: where a value comes from
//! - [`key`]: the declaration of a key, and the check of one value (TRUST)
//! - [`table`]: all keys, and the typed [`Settings`] made from them
//! - [`network`]: the cost model that the settings describe
//! - [`rules`]: checks of several keys together
//! - [`horovod`]: Horovod's variables, and which settings they change
//! - [`layers`]: combines the layers into [`Loaded`]
//! - [`variables`]: the launcher's variables, which are not settings

#![forbid(unsafe_code)]

pub mod error;
pub mod horovod;
pub mod key;
pub mod layers;
pub mod network;
pub mod origin;
pub mod rules;
pub mod table;
pub mod variables;

pub use error::SettingsError;
pub use key::{AddressRange, Key, Kind};
pub use layers::{Layers, Loaded, RESERVED_VARIABLES, Row};
pub use origin::Origin;
pub use table::{Adopt, HugePages, KEYS, LogFormat, ProbeEnabled, Settings};
