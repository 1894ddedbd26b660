//! The element types: how a tile of each becomes accumulators, and back.

use gradwire_proto::{F8E4m3, F8E5m2};

use super::{
    level::{Instructions, TILE},
    op::Number,
};

/// A tile of accumulators, or of elements, aligned so that no vector crosses a line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Tile<T>(pub(super) [T; TILE]);

/// An element as it lies in memory. Every bit pattern is a value.
pub(super) trait Element: Copy {
    /// The type in which elements are combined.
    type Number: Number;
    /// The items of [`Element::stage`], which a plain loop turns into numbers.
    type Lane: Copy;
    /// The element of all zero bits.
    const ZERO: Self;

    /// One lane as a number.
    fn number(lane: Self::Lane) -> Self::Number;
    /// One element as a number, for the scalar reference.
    fn widen(self) -> Self::Number;
    /// One number as an element, for the scalar reference.
    fn narrow(number: Self::Number) -> Self;

    /// Makes a tile at `src` readable lane by lane, through `room` where it has to be converted.
    ///
    /// # Safety
    /// `src` is valid for reading a tile and `room` for writing one; the level's instructions are
    /// there.
    unsafe fn stage<I: Instructions>(
        src: *const Self,
        room: *mut Self::Number,
    ) -> *const Self::Lane;

    /// Rounds a tile.
    ///
    /// # Safety
    /// The level's instructions are there.
    unsafe fn store<I: Instructions>(numbers: &Tile<Self::Number>, out: &mut Tile<Self>);
}

macro_rules! plain {
    ($($type:ty),+) => {$(
        impl Element for $type {
            type Number = Self;
            type Lane = Self;
            const ZERO: Self = Number::ZERO;

            #[inline(always)]
            fn number(lane: Self) -> Self {
                lane
            }

            #[inline(always)]
            fn widen(self) -> Self {
                self
            }

            #[inline(always)]
            fn narrow(number: Self) -> Self {
                number
            }

            #[inline(always)]
            unsafe fn stage<I: Instructions>(src: *const Self, _: *mut Self) -> *const Self {
                src
            }

            #[inline(always)]
            unsafe fn store<I: Instructions>(numbers: &Tile<Self>, out: &mut Tile<Self>) {
                *out = *numbers;
            }
        }
    )+};
}

plain!(f32, f64, i8, u8, i16, u16, i32, u32, i64, u64);

/// IEEE half precision, as bits.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct F16(pub(super) u16);

impl Element for F16 {
    type Number = f32;
    type Lane = f32;
    const ZERO: Self = Self(0);

    #[inline(always)]
    fn number(lane: f32) -> f32 {
        lane
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        half::f16::from_bits(self.0).to_f32()
    }

    #[inline(always)]
    fn narrow(number: f32) -> Self {
        Self(half::f16::from_f32(number).to_bits())
    }

    #[inline(always)]
    unsafe fn stage<I: Instructions>(src: *const Self, room: *mut f32) -> *const f32 {
        // SAFETY: the caller's promise; F16 is transparent.
        unsafe { I::widen_f16(src.cast::<u16>(), room) };
        room
    }

    #[inline(always)]
    unsafe fn store<I: Instructions>(numbers: &Tile<f32>, out: &mut Tile<Self>) {
        let mut bits = Tile([0u16; TILE]);
        // SAFETY: the caller's promise.
        unsafe { I::narrow_f16(&numbers.0, &mut bits.0) };
        for (to, from) in out.0.iter_mut().zip(bits.0) {
            *to = Self(from);
        }
    }
}

/// bfloat16, as bits: the upper half of an f32.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Bf16(pub(super) u16);

impl Element for Bf16 {
    type Number = f32;
    type Lane = u16;
    const ZERO: Self = Self(0);

    #[inline(always)]
    fn number(lane: u16) -> f32 {
        f32::from_bits(u32::from(lane) << 16)
    }

    #[inline(always)]
    fn widen(self) -> f32 {
        half::bf16::from_bits(self.0).to_f32()
    }

    #[inline(always)]
    fn narrow(number: f32) -> Self {
        Self(half::bf16::from_f32(number).to_bits())
    }

    #[inline(always)]
    unsafe fn stage<I: Instructions>(src: *const Self, _: *mut f32) -> *const u16 {
        src.cast::<u16>()
    }

    #[inline(always)]
    unsafe fn store<I: Instructions>(numbers: &Tile<f32>, out: &mut Tile<Self>) {
        // To nearest even in integers: AVX-512's own conversion flushes denormals to zero, so it
        // would differ from the other levels. NaNs are canonical already and survive the addition.
        for (to, from) in out.0.iter_mut().zip(&numbers.0) {
            let bits = from.to_bits();
            *to = Self((bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16);
        }
    }
}

macro_rules! float8 {
    ($($type:ident),+) => {$(
        impl Element for $type {
            type Number = f32;
            type Lane = f32;
            const ZERO: Self = Self::from_bits(0);

            #[inline(always)]
            fn number(lane: f32) -> f32 {
                lane
            }

            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }

            #[inline(always)]
            fn narrow(number: f32) -> Self {
                Self::from_f32(number)
            }

            #[inline(always)]
            unsafe fn stage<I: Instructions>(src: *const Self, room: *mut f32) -> *const f32 {
                for i in 0..TILE {
                    // SAFETY: both tiles have an element i; the type is a transparent byte.
                    unsafe { room.add(i).write(src.add(i).read().to_f32()) }
                }
                room
            }

            #[inline(always)]
            unsafe fn store<I: Instructions>(numbers: &Tile<f32>, out: &mut Tile<Self>) {
                for (to, from) in out.0.iter_mut().zip(&numbers.0) {
                    *to = Self::from_f32(*from);
                }
            }
        }
    )+};
}

float8!(F8E4m3, F8E5m2);

/// A truth value: any byte but 0 is true, computed values are 0 or 1.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Truth(u8);

impl Element for Truth {
    type Number = u8;
    type Lane = u8;
    const ZERO: Self = Self(0);

    #[inline(always)]
    fn number(lane: u8) -> u8 {
        u8::from(lane != 0)
    }

    #[inline(always)]
    fn widen(self) -> u8 {
        u8::from(self.0 != 0)
    }

    #[inline(always)]
    fn narrow(number: u8) -> Self {
        Self(number)
    }

    #[inline(always)]
    unsafe fn stage<I: Instructions>(src: *const Self, _: *mut u8) -> *const u8 {
        src.cast::<u8>()
    }

    #[inline(always)]
    unsafe fn store<I: Instructions>(numbers: &Tile<u8>, out: &mut Tile<Self>) {
        for (to, from) in out.0.iter_mut().zip(numbers.0) {
            *to = Self(from);
        }
    }
}
