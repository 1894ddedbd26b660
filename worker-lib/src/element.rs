//! The Rust types of tensor elements.

use std::fmt;

use bytemuck::{Pod, Zeroable};
use gradwire_proto::DType;
use num_complex::Complex;

mod sealed {
    pub trait Sealed {}
}

/// An element type of tensors. Sealed: the protocol determines the element types.
pub trait Element: Pod + Send + Sync + std::fmt::Debug + sealed::Sealed {
    /// The element type in the protocol.
    const DTYPE: DType;
}

/// A boolean in a tensor: false if the byte is 0. (Not Rust's `bool`, which has only two valid
/// bytes: another process may write any byte.)
#[derive(Clone, Copy, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct Bool(u8);

impl Bool {
    /// The value.
    pub fn get(self) -> bool {
        self.0 != 0
    }
}

impl From<bool> for Bool {
    fn from(value: bool) -> Self {
        Self(u8::from(value))
    }
}

impl From<Bool> for bool {
    fn from(value: Bool) -> Self {
        value.get()
    }
}

impl PartialEq for Bool {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl Eq for Bool {}

impl fmt::Debug for Bool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

macro_rules! elements {
    ($($rust:ty = $dtype:ident),+ $(,)?) => {
        $(
            impl sealed::Sealed for $rust {}
            impl Element for $rust {
                const DTYPE: DType = DType::$dtype;
            }
        )+

        #[cfg(test)]
        #[test]
        fn sizes_agree_with_the_protocol() {
            $(assert_eq!(size_of::<$rust>(), DType::$dtype.size());)+
            assert_eq!([$(DType::$dtype),+].len(), DType::ALL.len());
        }
    };
}

elements! {
    f32 = F32,
    f64 = F64,
    half::f16 = F16,
    half::bf16 = Bf16,
    i8 = I8,
    u8 = U8,
    i32 = I32,
    i64 = I64,
    i16 = I16,
    u16 = U16,
    u32 = U32,
    u64 = U64,
    Bool = Bool,
    gradwire_proto::F8E4m3 = F8E4m3,
    gradwire_proto::F8E5m2 = F8E5m2,
    Complex<f32> = C64,
    Complex<f64> = C128,
}
