//! Values that are always valid: each type's constructor checks them.

use std::{fmt, sync::Arc};

use crate::pb;

/// Why a value is not valid. The text says what was given, shortened if it is long, and what is
/// allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "each field is what was given")]
pub enum TypeError {
    /// A tensor name is empty, too long or holds control characters.
    #[error(
        "invalid tensor name {given:?} of {bytes} bytes: expected 1 to {max} bytes without control \
         characters",
        max = TensorName::MAX_BYTES
    )]
    TensorName { given: String, bytes: usize },
    /// A job id can't be part of the name of a socket or file.
    #[error(
        "invalid job id {given:?}: expected 1 to {max} characters from a-z, A-Z, 0-9, '-' and '_'",
        max = JobId::MAX_BYTES
    )]
    JobId { given: String },
    /// A shape has too many dimensions or more elements than can be addressed.
    #[error(
        "invalid shape {given} of {dimensions} dimensions: expected at most {max} dimensions and \
         2^53 elements",
        max = Shape::MAX_DIMS
    )]
    Shape { given: String, dimensions: usize },
}

/// The first characters of a text, with `…` where it is cut.
fn excerpt(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default,
            serde::Serialize, serde::Deserialize,
        )]
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
    /// One formation of the world. Messages of another epoch are refused.
    Epoch(u64)
}
number! {
    /// The position of an operation in the total order of the job (ORD).
    Sequence(u64)
}
number! {
    /// A group of ranks with its own operations; 0 is all ranks.
    ProcessSetId(u32)
}
number! {
    /// The short id that the coordinator gives to a tensor, valid for one epoch.
    TensorId(u32)
}
number! {
    /// The id that the coordinator gives to a spec: an algorithm with its parameters. 0: there is
    /// nothing to choose.
    SpecId(u32)
}
number! {
    /// Larger values go first. The default is 0.
    Priority(i32)
}

impl Rank {
    /// The most ranks of one job (BOUND).
    pub const MAX: u32 = 4096;

    /// `0-2,5` for ascending ranks.
    pub fn list(ranks: impl IntoIterator<Item = Self>) -> String {
        let mut parts = Vec::new();
        let mut ranks = ranks.into_iter().map(|rank| rank.0).peekable();
        while let Some(first) = ranks.next() {
            let mut last = first;
            while let Some(next) = ranks.next_if(|&next| next == last.wrapping_add(1)) {
                last = next;
            }
            let alone = last == first;
            parts.push(if alone { first.to_string() } else { format!("{first}-{last}") });
        }
        parts.join(",")
    }
}

impl NodeId {
    /// The node's index in lists and bit sets of all nodes.
    pub fn index(self) -> usize {
        self.0 as usize
    }
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

    /// Checks a name.
    pub fn new(name: &str) -> Result<Self, TypeError> {
        if name.is_empty() || name.len() > Self::MAX_BYTES || name.chars().any(char::is_control) {
            return Err(TypeError::TensorName { given: excerpt(name), bytes: name.len() });
        }
        Ok(Self(name.into()))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether a worker made it by counting: for an operation without a name (`allreduce.#3`) or a
    /// part of a slice (`weights/#2`). Such a name may be used again for other data.
    pub fn is_counted(&self) -> bool {
        self.0.contains(".#") || self.0.contains("/#")
    }
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Distinguishes jobs on the same machine; part of the names of their sockets and memory (CLEAN).
/// Letters, digits, `-` and `_`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(Arc<str>);

impl JobId {
    /// The longest id, in bytes: it must fit into the name of a Unix socket.
    pub const MAX_BYTES: usize = 48;

    /// Checks an id.
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

/// The dimensions of a tensor; empty for a single number. At most 32 dimensions and 2^53
/// elements, so that no product of sizes overflows later.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Shape(Arc<[u64]>);

impl Shape {
    /// The most dimensions.
    pub const MAX_DIMS: usize = 32;
    const MAX_ELEMENTS: u64 = 1 << 53;

    /// Checks dimensions, outermost first.
    pub fn new(dims: &[u64]) -> Result<Self, TypeError> {
        // A zero dimension makes the tensor empty, but must not hide an impossible one beside it.
        let fits = dims.len() <= Self::MAX_DIMS
            && dims
                .iter()
                .try_fold(1u64, |all, &d| all.checked_mul(d.max(1)))
                .is_some_and(|all| all <= Self::MAX_ELEMENTS);
        if !fits {
            let given = excerpt(&format!("{:?}", dims.iter().take(80).collect::<Vec<_>>()));
            return Err(TypeError::Shape { given, dimensions: dims.len() });
        }
        Ok(Self(dims.into()))
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[u64] {
        &self.0
    }

    /// The number of elements; 1 without dimensions.
    pub fn elements(&self) -> u64 {
        self.0.iter().product()
    }

    /// The first dimension; 1 without dimensions.
    pub fn rows(&self) -> u64 {
        self.0.first().copied().unwrap_or(1)
    }

    /// The elements of one row: the product of all dimensions but the first.
    pub fn row_elements(&self) -> u64 {
        self.0.iter().skip(1).product()
    }

    /// The same shape with another first dimension. A shape without dimensions gets one.
    pub fn with_rows(&self, rows: u64) -> Result<Self, TypeError> {
        let rest = self.0.iter().skip(1).copied();
        Self::new(&std::iter::once(rows).chain(rest).collect::<Vec<_>>())
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
        #[derive(
            Debug,
            Clone,
            Copy,
            PartialEq,
            Eq,
            PartialOrd,
            Ord,
            Hash,
            strum::Display,
            strum::EnumString,
            strum::FromRepr,
            strum::IntoStaticStr,
            strum::VariantArray,
            strum::VariantNames,
        )]
        #[repr(u8)]
        pub enum $name {
            $($(#[$vdoc])* #[strum(serialize = $text)] $variant = pb::$name::$variant as u8),+
        }

        impl $name {
            /// All values, in the order of their wire numbers.
            pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

            /// Their names, in the same order.
            pub const NAMES: &[&str] = <Self as strum::VariantNames>::VARIANTS;

            /// The value with this wire number, if there is one.
            pub fn from_wire(number: i32) -> Option<Self> {
                u8::try_from(number).ok().and_then(Self::from_repr)
            }

            /// The wire number.
            pub fn to_wire(self) -> i32 {
                self as i32
            }

            /// The name for people.
            pub fn name(self) -> &'static str {
                self.into()
            }

            /// The name of the type in error texts.
            pub const WHAT: &str = $what;
        }

    };
}

wire_enum! {
    /// The element type of a tensor. Elements are little endian.
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
        /// 16-bit signed integer.
        I16 = "i16",
        /// 16-bit unsigned integer.
        U16 = "u16",
        /// 32-bit unsigned integer.
        U32 = "u32",
        /// 64-bit unsigned integer.
        U64 = "u64",
        /// A byte; 0 is false, and results are 0 or 1.
        Bool = "bool",
        /// 8-bit float with 4 bits of exponent and no infinity (OCP E4M3); sums are kept in f32.
        F8E4m3 = "f8e4m3",
        /// 8-bit float with 5 bits of exponent (OCP E5M2); sums are kept in f32.
        F8E5m2 = "f8e5m2",
        /// Complex number with f32 components.
        C64 = "c64",
        /// Complex number with f64 components.
        C128 = "c128",
    }
}

impl DType {
    /// The bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::Bool | Self::F8E4m3 | Self::F8E5m2 => 1,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 | Self::C64 => 8,
            Self::C128 => 16,
        }
    }

    /// Whether it is a float or a complex number.
    pub fn is_float(self) -> bool {
        use DType::{Bf16, F8E4m3, F8E5m2, F16, F32, F64};
        self.is_complex() || matches!(self, F32 | F64 | F16 | Bf16 | F8E4m3 | F8E5m2)
    }

    /// Whether it is a complex number, which has no order.
    pub fn is_complex(self) -> bool {
        matches!(self, Self::C64 | Self::C128)
    }
}

wire_enum! {
    /// How the contributions to an element are reduced to one value. Integers wrap around in sums
    /// and products; an integer average is rounded towards zero. The min or max of values with a
    /// NaN is NaN. For booleans, sum, max and bit-or are "any"; product, min and bit-and are "all".
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
        /// Bitwise and, of integers and booleans.
        BitAnd = "bit-and",
        /// Bitwise or, of integers and booleans.
        BitOr = "bit-or",
        /// Bitwise exclusive or, of integers and booleans.
        BitXor = "bit-xor",
    }
}

impl ReduceOp {
    /// What can't be multiplied by a factor in this operation; `None` if a factor is allowed.
    pub fn refuses_factors(self, dtype: DType) -> Option<&'static str> {
        match self {
            Self::BitAnd | Self::BitOr | Self::BitXor => Some("bits"),
            _ if dtype == DType::Bool => Some("booleans"),
            _ => None,
        }
    }

    /// Why elements of a type can't be reduced by this operation; `None` if they can.
    pub fn refuses(self, dtype: DType) -> Option<&'static str> {
        let bitwise = matches!(self, Self::BitAnd | Self::BitOr | Self::BitXor);
        let sums = matches!(self, Self::Sum | Self::Average);
        match dtype {
            _ if bitwise && dtype.is_float() => Some("only integers and bool have bits to combine"),
            _ if dtype.is_complex() && !sums => Some("complex numbers can only be summed"),
            DType::Bool if self == Self::Average => Some("booleans have no average"),
            _ => None,
        }
    }
}

wire_enum! {
    /// The wire format of floats of at most 32 bits in reductions between nodes; see
    /// [`Compression::between_nodes`] and [`Compression::quantizes`].
    Compression ("compression") {
        /// f32: nothing is rounded on the way.
        None = "none",
        /// bfloat16: half the bytes, 8 bits of precision.
        Bf16 = "bf16",
        /// Groups of 8-bit integers that share a scale, for large sums of f32.
        Int8 = "int8",
        /// The same with 8-bit floats (f8e4m3).
        Fp8 = "fp8",
    }
}

wire_enum! {
    /// What to do with a tensor.
    Collective ("collective") {
        /// Every rank gets the reduction of all ranks' tensors.
        Allreduce = "allreduce",
        /// Every rank gets the root's tensor.
        Broadcast = "broadcast",
        /// No rank continues before all ranks have called it.
        Barrier = "barrier",
        /// The root gets the reduction of all ranks' tensors.
        Reduce = "reduce",
        /// Every rank gets all ranks' tensors, concatenated along the first dimension.
        Allgather = "allgather",
        /// The root gets all ranks' tensors, concatenated along the first dimension.
        Gather = "gather",
        /// Every rank gets its rows of the root's tensor.
        Scatter = "scatter",
        /// Every rank gets its rows of the reduction of all ranks' tensors.
        ReduceScatter = "reducescatter",
        /// Every rank gets its rows of every rank's tensor.
        Alltoall = "alltoall",
        /// One rank gets the tensor of another.
        SendReceive = "send-receive",
        /// A rank has no more data, and waits until the others have none either.
        Join = "join",
        /// Adds a process set.
        AddProcessSet = "add-process-set",
        /// Removes a process set.
        RemoveProcessSet = "remove-process-set",
    }
}

impl Collective {
    /// Whether it reduces tensors.
    pub fn reduces(self) -> bool {
        matches!(self, Self::Allreduce | Self::Reduce | Self::ReduceScatter)
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
        let text = TensorName::new(&"x".repeat(1025)).unwrap_err().to_string();
        assert!(text.contains("xxx…\" of 1025 bytes: expected 1 to 1024"), "{text}");
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
        let text = Shape::new(&[1; 33]).unwrap_err().to_string();
        assert!(text.contains("… of 33 dimensions: expected at most 32"), "{text}");
    }

    #[test]
    fn every_wire_number_has_one_value() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_wire(dtype.to_wire()), Some(dtype));
        }
        assert_eq!(DType::from_wire(0), None);
        assert_eq!(DType::from_wire(99), None);
        assert_eq!(ReduceOp::from_wire(-1), None);
        assert_eq!(Collective::ALL.len(), 13);
        assert_eq!(DType::ALL.len(), 17);
    }
}
