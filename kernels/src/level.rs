//! The instruction sets, and the few functions that use their instructions explicitly.

use std::sync::OnceLock;

/// An instruction set that the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Level {
    /// The reference, which computes one element after the other.
    Scalar,
    /// The vectors that every processor of the architecture has (SSE2, NEON).
    Baseline,
    /// AVX2 and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Level {
    /// All of them, from slow to fast.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Baseline, Self::Avx2, Self::Avx512];

    /// Its name in texts.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Whether this machine has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar | Self::Baseline => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }
}

/// The best level of this machine, detected once.
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        Level::ALL.into_iter().rev().find(|l| l.is_available()).unwrap_or(Level::Scalar)
    })
}

/// How many elements a tile has.
pub(super) const TILE: usize = 128;

/// What the sweep needs from a level beyond plain loops.
///
/// # Safety
/// All functions may only be called where the level's instructions are available. Pointers are
/// valid for what is read and written.
pub(super) trait Instructions {
    /// Converts a tile of f16 to f32.
    unsafe fn widen_f16(src: *const u16, dst: *mut f32);
    /// Converts a tile of f32 to f16, to nearest even.
    unsafe fn narrow_f16(src: &[f32; TILE], dst: &mut [u16; TILE]);
    /// Stores `bytes`, a multiple of 64, to `dst`, aligned to 64, past the caches.
    unsafe fn stream(dst: *mut u8, src: *const u8, bytes: usize);
    /// Makes streamed stores visible before anything that is stored later.
    unsafe fn fence();
}

/// [`Level::Baseline`].
pub(super) struct Baseline;

impl Instructions for Baseline {
    #[inline(always)]
    unsafe fn widen_f16(src: *const u16, dst: *mut f32) {
        for i in 0..TILE {
            // SAFETY: both tiles have an element i.
            unsafe { dst.add(i).write(half::f16::from_bits(src.add(i).read_unaligned()).to_f32()) }
        }
    }

    #[inline(always)]
    unsafe fn narrow_f16(src: &[f32; TILE], dst: &mut [u16; TILE]) {
        for (to, from) in dst.iter_mut().zip(src) {
            *to = half::f16::from_f32(*from).to_bits();
        }
    }

    #[inline(always)]
    unsafe fn stream(dst: *mut u8, src: *const u8, bytes: usize) {
        // SAFETY: the caller's promise; they may overlap.
        unsafe { dst.copy_from(src, bytes) }
    }

    #[inline(always)]
    unsafe fn fence() {}
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, __m512i, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128,
        _mm_sfence, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps,
        _mm256_loadu_si256, _mm256_storeu_ps, _mm256_storeu_si256, _mm256_stream_si256,
        _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_storeu_ps,
        _mm512_stream_si512,
    };

    use super::{Instructions, TILE};

    // The 256-bit conversion has no flag for exceptions, which are masked anyway.
    const NEAREST_256: i32 = _MM_FROUND_TO_NEAREST_INT;
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

    /// [`super::Level::Avx2`].
    pub(in super::super) struct Avx2;

    impl Instructions for Avx2 {
        #[inline(always)]
        unsafe fn widen_f16(src: *const u16, dst: *mut f32) {
            for i in (0..TILE).step_by(8) {
                // SAFETY: both tiles hold 8 elements from i on; the level has F16C.
                unsafe {
                    let half = _mm_loadu_si128(src.add(i).cast::<__m128i>());
                    _mm256_storeu_ps(dst.add(i), _mm256_cvtph_ps(half));
                }
            }
        }

        #[inline(always)]
        unsafe fn narrow_f16(src: &[f32; TILE], dst: &mut [u16; TILE]) {
            for i in (0..TILE).step_by(8) {
                // SAFETY: both tiles hold 8 elements from i on; the level has F16C.
                unsafe {
                    let half = _mm256_cvtps_ph::<NEAREST_256>(_mm256_loadu_ps(src.as_ptr().add(i)));
                    _mm_storeu_si128(dst.as_mut_ptr().add(i).cast::<__m128i>(), half);
                }
            }
        }

        #[inline(always)]
        unsafe fn stream(dst: *mut u8, src: *const u8, bytes: usize) {
            for i in (0..bytes).step_by(32) {
                // SAFETY: `dst` is aligned to 64 and both are valid for `bytes`; the level has AVX.
                unsafe {
                    let line = _mm256_loadu_si256(src.add(i).cast::<__m256i>());
                    _mm256_stream_si256(dst.add(i).cast::<__m256i>(), line);
                }
            }
        }

        #[inline(always)]
        unsafe fn fence() {
            // SAFETY: every x86-64 processor has SSE.
            unsafe { _mm_sfence() }
        }
    }

    /// [`super::Level::Avx512`].
    pub(in super::super) struct Avx512;

    impl Instructions for Avx512 {
        #[inline(always)]
        unsafe fn widen_f16(src: *const u16, dst: *mut f32) {
            for i in (0..TILE).step_by(16) {
                // SAFETY: both tiles hold 16 elements from i on; the level has AVX-512F.
                unsafe {
                    let half = _mm256_loadu_si256(src.add(i).cast::<__m256i>());
                    _mm512_storeu_ps(dst.add(i), _mm512_cvtph_ps(half));
                }
            }
        }

        #[inline(always)]
        unsafe fn narrow_f16(src: &[f32; TILE], dst: &mut [u16; TILE]) {
            for i in (0..TILE).step_by(16) {
                // SAFETY: both tiles hold 16 elements from i on; the level has AVX-512F.
                unsafe {
                    let half = _mm512_cvtps_ph::<NEAREST>(_mm512_loadu_ps(src.as_ptr().add(i)));
                    _mm256_storeu_si256(dst.as_mut_ptr().add(i).cast::<__m256i>(), half);
                }
            }
        }

        #[inline(always)]
        unsafe fn stream(dst: *mut u8, src: *const u8, bytes: usize) {
            for i in (0..bytes).step_by(64) {
                // SAFETY: `dst` is aligned to 64 and both are valid for `bytes`; the level has
                // AVX-512F.
                unsafe {
                    let line = _mm512_loadu_si512(src.add(i).cast::<__m512i>());
                    _mm512_stream_si512(dst.add(i).cast::<__m512i>(), line);
                }
            }
        }

        #[inline(always)]
        unsafe fn fence() {
            // SAFETY: every x86-64 processor has SSE.
            unsafe { _mm_sfence() }
        }
    }
}
