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
//! What a key is, and the keys of a training process, are in `gradwire-keys`.
//!
//! - [`table`]: all keys, and the typed [`Settings`] made from them
//! - [`network`]: the cost model that the settings describe
//! - [`rules`]: checks of several keys together
//! - [`layers`]: combines the layers into [`Loaded`]
//! - [`variables`]: the launcher's variables, which are not settings

#![forbid(unsafe_code)]

pub mod layers;
pub mod network;
pub mod rules;
pub mod table;
pub mod variables;

pub use gradwire_keys::{
    AddressRange, Adopt, Audience, HugePages, Key, Kind, Origin, RankSettings, SettingsError,
    StopSignal, horovod,
};
pub use layers::{Layers, Loaded, RESERVED_VARIABLES, Row};
pub use table::{
    Algorithms, KEYS, LogFormat, OnDeadlock, ProbeEnabled, Settings, Starter, Watchdog,
};
