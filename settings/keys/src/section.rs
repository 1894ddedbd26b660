//! Sections of settings: one declaration makes the struct, its documentation, and the keys.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use crate::{
    key::{AddressRange, Checked},
    origin::Origin,
};

/// A type that a checked value becomes. `None` means that a key's declaration contradicts itself,
/// which the test of the defaults finds.
pub trait Field: Sized {
    /// The value, if it has the type that the key's kind makes.
    fn read(value: &Checked, unit: &str) -> Option<Self>;
}

impl Field for Option<u64> {
    fn read(value: &Checked, _unit: &str) -> Option<Self> {
        if let Checked::Number(number) = value { Some(*number) } else { None }
    }
}

impl Field for u64 {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        Option::<Self>::read(value, unit)?
    }
}

impl Field for u32 {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        Self::try_from(u64::read(value, unit)?).ok()
    }
}

impl Field for usize {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        Self::try_from(u64::read(value, unit)?).ok()
    }
}

impl Field for Option<Duration> {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        let number = Option::<u64>::read(value, unit)?;
        match unit {
            "ms" => Some(number.map(Duration::from_millis)),
            "us" => Some(number.map(Duration::from_micros)),
            _ => None,
        }
    }
}

impl Field for Duration {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        Option::<Self>::read(value, unit)?
    }
}

impl Field for String {
    fn read(value: &Checked, _unit: &str) -> Option<Self> {
        if let Checked::Text(text) = value { Some(text.clone()) } else { None }
    }
}

impl Field for bool {
    fn read(value: &Checked, unit: &str) -> Option<Self> {
        String::read(value, unit)?.parse().ok()
    }
}

impl Field for Vec<String> {
    fn read(value: &Checked, _unit: &str) -> Option<Self> {
        if let Checked::Words(words) = value { Some(words.clone()) } else { None }
    }
}

impl Field for Option<SocketAddr> {
    fn read(value: &Checked, _unit: &str) -> Option<Self> {
        if let Checked::Address(address) = value { Some(*address) } else { None }
    }
}

impl Field for AddressRange {
    fn read(value: &Checked, _unit: &str) -> Option<Self> {
        if let Checked::AddressRange(range) = value { Some(range.clone()) } else { None }
    }
}

/// One checked value for each key.
pub type Values = BTreeMap<&'static str, Checked>;

/// The values, without where they come from.
pub fn values(merged: BTreeMap<&'static str, (Checked, Origin)>) -> Values {
    merged.into_iter().map(|(name, (checked, _))| (name, checked)).collect()
}

/// Declares sections. Durations are written in milliseconds or microseconds (the key ends in the
/// unit) and read as [`Duration`]. An audience, `User` or `Measured`, may follow the unit.
#[macro_export]
macro_rules! sections {
    ($(
        $(#[doc = $sdoc:literal])+
        $Section:ident {
            $(
                $(#[doc = $doc:literal])+
                $field:ident: $type:ty = $key:literal, $kind:expr, $default:literal, $unit:literal
                    $(, $audience:ident)?;
            )+
        }
    )+) => {
        $(
            $(#[doc = $sdoc])+
            #[derive(Debug, Clone, PartialEq, Eq)]
            pub struct $Section {
                $(
                    $(#[doc = $doc])+
                    #[doc = ""]
                    #[doc = concat!("Key `", $key, "`, default `", $default, "`.")]
                    pub $field: $type,
                )+
            }

            impl $Section {
                /// The keys, in the order of the fields.
                pub const KEYS: &[$crate::Key] = &[$(
                    $crate::Key {
                        name: $key,
                        kind: $kind,
                        default: $default,
                        unit: $unit,
                        doc: concat!($($doc),+).trim_ascii(),
                        audience: $crate::audience!($($audience)?),
                    },
                )+];

                /// Takes the values of the keys; `None` if one is missing or of another type.
                pub fn from_values(values: &$crate::section::Values) -> Option<Self> {
                    Some(Self {$(
                        $field: $crate::section::Field::read(values.get($key)?, $unit)?,
                    )+})
                }
            }
        )+
    };
}

/// An [`Audience`](crate::Audience): internal unless it is named.
#[macro_export]
macro_rules! audience {
    () => {
        $crate::Audience::Internal
    };
    ($audience:ident) => {
        $crate::Audience::$audience
    };
}
