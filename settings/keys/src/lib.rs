//! What a setting is, and the settings of a training process.
//!
//! A training process reads a dozen of the settings, from its environment. So this crate needs
//! neither a parser of files nor the algorithms; `gradwire-settings` has both, and all other keys.
//!
//! - [`origin`]: where a value comes from
//! - [`error`]: why a value is refused
//! - [`key`]: what a key is, and the check of one value (TRUST)
//! - [`section`]: declares sections of keys
//! - [`horovod`]: Horovod's variables, and which of them are settings
//! - [`layers`]: values from defaults, environment and flags; the last layer counts
//! - [`rank`]: the settings of a training process

#![forbid(unsafe_code)]

pub mod error;
pub mod horovod;
pub mod key;
pub mod layers;
pub mod origin;
pub mod rank;
pub mod section;

pub use error::SettingsError;
pub use key::{AddressRange, Audience, Checked, Given, Key, Kind};
pub use origin::Origin;
pub use rank::{
    Adopt, CheckFinite, CheckGradients, Checks, Elastic, HugePages, MIN_IN_FLIGHT,
    MIN_SEGMENT_BYTES, RankSettings, Start, StopSignal, Worker,
};
