//! The Rust types of tensor elements.

use bytemuck::Pod;
use gradwire_proto::DType;

mod sealed {
    pub trait Sealed {}
}

/// A type whose values a tensor holds. Sealed: the element types are those of the protocol.
pub trait Element: Pod + Send + Sync + std::fmt::Debug + sealed::Sealed {
    /// What the protocol calls it.
    const DTYPE: DType;
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
}
