//! Values that can't be wrong: each type's constructor is the check.

use std::{fmt, sync::Arc};

use crate::pb;

/// Why a value is not one of the types here. The text says what was given and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TypeError {
    /// A tensor name is empty, too long or holds control characters.
    #[error(
        "tensor name {given:?} is not usable: it must have 1 to {max} bytes and no control characters",
        max = TensorName::MAX_BYTES
    )]
    TensorName {
        /// The name, cut to 80 characters.
        given: String,
    },
    /// A job id has characters that can't be part of a socket's or a file's name.
    #[error(
        "job id {given:?} is not usable: it must have 1 to {max} characters of a-z, A-Z, 0-9, '-' and '_'",
        max = JobId::MAX_BYTES
    )]
    JobId {
        /// The id, cut to 80 characters.
        given: String,
    },
    /// A shape has too many dimensions or more elements than can be addressed.
    #[error("shape {given:?} is not usable: at most {max} dimensions and 2^56 bytes", max = Shape::MAX_DIMS)]
    Shape {
        /// The dimensions, at most the first 16.
        given: Vec<u64>,
    },
}

fn excerpt(text: &str) -> String {
    text.chars().take(80).collect()
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// A training process, numbered over the whole job from 0.
    Rank(u32)
}
number! {
    /// A node (one daemon), numbered from 0 in the order of its ranks.
    NodeId(u32)
}
number! {
    /// One formation of the world. What belongs to another epoch is refused.
    Epoch(u64)
}
number! {
    /// The place of an operation in the job's one total order (ORD).
    Sequence(u64)
}
number! {
    /// A group of ranks with operations of its own; 0 is all ranks.
    ProcessSetId(u32)
}
number! {
    /// What the coordinator calls a tensor once it knows it: short, and valid for one epoch.
    TensorId(u32)
}
number! {
    /// Larger goes first; 0 where nobody says otherwise.
    Priority(i32)
}

impl ProcessSetId {
    /// The set of all ranks.
    pub const GLOBAL: Self = Self(0);
}

/// A tensor's name: 1 to 1024 bytes, no control characters. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorName(Arc<str>);

impl TensorName {
    /// The longest name, in bytes.
    pub const MAX_BYTES: usize = 1024;

    /// Checks and takes a name.
    ///
    /// # Errors
    /// [`TypeError::TensorName`] if it is empty, too long or holds control characters.
    pub fn new(name: &str) -> Result<Self, TypeError> {
        if name.is_empty() || name.len() > Self::MAX_BYTES || name.chars().any(char::is_control) {
            return Err(TypeError::TensorName { given: excerpt(name) });
        }
        Ok(Self(name.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What tells one job from another on the same machine; part of the names of its sockets and
/// memory (CLEAN).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(Arc<str>);

impl JobId {
    /// The longest id, in bytes: it has to fit the name of a Unix socket.
    pub const MAX_BYTES: usize = 48;

    /// Checks and takes an id.
    ///
    /// # Errors
    /// [`TypeError::JobId`] if it is empty, too long or has other characters than letters,
    /// digits, `-` and `_`.
    pub fn new(id: &str) -> Result<Self, TypeError> {
        let fits = (1..=Self::MAX_BYTES).contains(&id.len())
            && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        if !fits {
            return Err(TypeError::JobId { given: excerpt(id) });
        }
        Ok(Self(id.into()))
    }

    /// The id.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The dimensions of a tensor; empty for a single number. At most 32 dimensions, at most 2^56
/// bytes at 8 bytes an element, so that no product of sizes overflows later.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Shape(Arc<[u64]>);

impl Shape {
    /// The most dimensions.
    pub const MAX_DIMS: usize = 32;
    const MAX_ELEMENTS: u64 = 1 << 53;

    /// Checks and takes dimensions, outermost first.
    ///
    /// # Errors
    /// [`TypeError::Shape`] if there are too many dimensions or elements.
    pub fn new(dims: &[u64]) -> Result<Self, TypeError> {
        // A zero dimension makes the tensor empty, but must not hide an absurd one beside it.
        let fits = dims.len() <= Self::MAX_DIMS
            && dims
                .iter()
                .try_fold(1u64, |all, &d| all.checked_mul(d.max(1)))
                .is_some_and(|all| all <= Self::MAX_ELEMENTS);
        if !fits {
            return Err(TypeError::Shape { given: dims.iter().copied().take(16).collect() });
        }
        Ok(Self(dims.into()))
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[u64] {
        &self.0
    }

    /// How many elements there are; 1 for no dimensions.
    pub fn elements(&self) -> u64 {
        self.0.iter().product()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

macro_rules! wire_enum {
    (
        $(#[$doc:meta])* $name:ident ($what:literal) {
            $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)?
        }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$vdoc])* $variant = pb::$name::$variant as u8),+
        }

        impl $name {
            /// Every value, in the order of the wire.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The value with this number on the wire, if there is one.
            pub fn from_wire(number: i32) -> Option<Self> {
                Self::ALL.iter().copied().find(|v| *v as i32 == number)
            }

            /// The number on the wire.
            pub fn to_wire(self) -> i32 {
                self as i32
            }

            /// The name that people read.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text),+
                }
            }

            /// What the type is called in an error's text.
            pub const WHAT: &str = $what;
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

wire_enum! {
    /// The type of a tensor's elements, in the machine's byte order (little endian).
    DType ("element type") {
        /// IEEE 754 single precision.
        F32 = "f32",
        /// IEEE 754 double precision.
        F64 = "f64",
        /// IEEE 754 half precision; sums are kept in f32.
        F16 = "f16",
        /// bfloat16; sums are kept in f32.
        Bf16 = "bf16",
        /// 8-bit signed integer.
        I8 = "i8",
        /// 8-bit unsigned integer.
        U8 = "u8",
        /// 32-bit signed integer.
        I32 = "i32",
        /// 64-bit signed integer.
        I64 = "i64",
    }
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
        }
    }

    /// Whether scaling by a factor makes sense.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::Bf16)
    }
}

wire_enum! {
    /// How the contributions to one element become one value. Integers wrap around in sums and
    /// products; an integer average is the sum divided and cut towards zero; NaN wins in min and
    /// max.
    ReduceOp ("reduce operation") {
        /// The sum.
        Sum = "sum",
        /// The sum divided by the number of contributors.
        Average = "average",
        /// The smallest.
        Min = "min",
        /// The largest.
        Max = "max",
        /// The product.
        Product = "product",
    }
}

wire_enum! {
    /// What is done with a tensor.
    Collective ("collective") {
        /// Every rank gets the reduction of all ranks' tensors.
        Allreduce = "allreduce",
        /// Every rank gets the root's tensor.
        Broadcast = "broadcast",
        /// Nobody goes on before everybody has come.
        Barrier = "barrier",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_ids_say_what_is_allowed() {
        assert!(TensorName::new("layer1.weight").is_ok());
        let text = TensorName::new("").unwrap_err().to_string();
        assert!(text.contains("1 to 1024 bytes"), "{text}");
        assert!(TensorName::new("a\nb").is_err());
        assert!(TensorName::new(&"x".repeat(1025)).is_err());
        assert!(JobId::new("job-7_a").is_ok());
        assert!(JobId::new("../etc").is_err());
        assert!(JobId::new(&"x".repeat(49)).is_err());
    }

    #[test]
    fn shapes_can_not_overflow() {
        assert_eq!(Shape::new(&[]).unwrap().elements(), 1);
        assert_eq!(Shape::new(&[3, 0, 5]).unwrap().elements(), 0);
        assert_eq!(Shape::new(&[1 << 33]).unwrap().elements(), 1 << 33);
        assert!(Shape::new(&[u64::MAX, 2]).is_err());
        assert!(Shape::new(&[0, u64::MAX]).is_err());
        assert!(Shape::new(&[1; 33]).is_err());
    }

    #[test]
    fn every_wire_number_has_one_value() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_wire(dtype.to_wire()), Some(dtype));
        }
        assert_eq!(DType::from_wire(0), None);
        assert_eq!(DType::from_wire(99), None);
        assert_eq!(ReduceOp::from_wire(-1), None);
        assert_eq!(Collective::ALL.len(), 3);
    }
}
