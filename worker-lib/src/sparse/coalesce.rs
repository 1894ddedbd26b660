//! Adds up rows with the same index. Pure functions.

use half::{bf16, f16};

use crate::element::Element;

/// Elements that can be summed. Sums of 16-bit floats are kept in f32; integers wrap around.
pub trait Number: Element {
    /// The type in which sums are kept.
    #[doc(hidden)]
    type Wide: Copy;
    #[doc(hidden)]
    fn widen(self) -> Self::Wide;
    #[doc(hidden)]
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// The sum divided by the number of contributors; integers are rounded towards zero.
    #[doc(hidden)]
    fn narrow(sum: Self::Wide, divisor: u32) -> Self;
}

macro_rules! float {
    ($($t:ty as $wide:ty, $from:expr);+ $(;)?) => {
        $(impl Number for $t {
            type Wide = $wide;
            fn widen(self) -> $wide {
                <$wide>::from(self)
            }
            fn add(a: $wide, b: $wide) -> $wide {
                a + b
            }
            fn narrow(sum: $wide, divisor: u32) -> Self {
                // The bits of a single contribution don't change.
                $from(if divisor == 1 { sum } else { sum / divisor as $wide })
            }
        })+
    };
}
float!(
    f32 as f32, |v| v;
    f64 as f64, |v| v;
    f16 as f32, f16::from_f32;
    bf16 as f32, bf16::from_f32
);

macro_rules! integer {
    ($($t:ty),+) => {
        $(impl Number for $t {
            type Wide = $t;
            fn widen(self) -> $t {
                self
            }
            fn add(a: $t, b: $t) -> $t {
                a.wrapping_add(b)
            }
            fn narrow(sum: $t, divisor: u32) -> $t {
                // i128, because the divisor may not fit the type: 128 in i8.
                (i128::from(sum) / i128::from(divisor)) as $t
            }
        })+
    };
}
integer!(i8, u8, i16, u16, i32, u32, i64, u64);

/// Each index once, ascending, with the sum of its rows divided by `divisor`. Rows of one index are
/// added in their given order, so that all ranks get the same (SAME).
pub(crate) fn coalesce<T: Number>(
    indices: &[usize],
    values: &[T],
    cols: usize,
    divisor: u32,
) -> (Vec<usize>, Vec<T>) {
    let row = |at: usize| &values[at * cols..][..cols];
    let mut order: Vec<usize> = (0..indices.len()).collect();
    order.sort_by_key(|&at| indices[at]); // stable: the order within an index stays
    let mut coalesced = (Vec::new(), Vec::new());
    let mut sum: Vec<T::Wide> = Vec::with_capacity(cols);
    for same in order.chunk_by(|&a, &b| indices[a] == indices[b]) {
        sum.clear();
        sum.extend(row(same[0]).iter().map(|value| value.widen()));
        for &at in &same[1..] {
            sum.iter_mut().zip(row(at)).for_each(|(sum, value)| *sum = T::add(*sum, value.widen()));
        }
        coalesced.0.push(indices[same[0]]);
        coalesced.1.extend(sum.iter().map(|&sum| T::narrow(sum, divisor)));
    }
    coalesced
}

/// Whether moving the dense tensor takes fewer bytes than moving the rows. Each node receives all
/// rows and their indices in an allgather, but about twice the tensor in an allreduce. This also
/// limits the size of a dense result to a few times the gathered rows (BOUND). Rows without bytes
/// are never dense, because there may be any number of them.
pub(crate) fn dense_is_smaller(gathered_rows: u64, rows: u64, row_bytes: u64) -> bool {
    if row_bytes == 0 {
        return false;
    }
    let row_bytes = u128::from(row_bytes);
    let sparse = u128::from(gathered_rows).saturating_mul(8 + row_bytes);
    sparse > (2 * u128::from(rows)).saturating_mul(row_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_with_one_index_are_added_up_in_order() {
        let values = [1.0, 2.0, 10.0, 20.0, 100.0, 200.0, 0.5, 0.25f32];
        let (indices, sums) = coalesce(&[7, 2, 7, 0], &values, 2, 1);
        assert_eq!(indices, [0, 2, 7]);
        assert_eq!(sums, [0.5, 0.25, 10.0, 20.0, 101.0, 202.0]);
        let (indices, averages) = coalesce(&[7, 7], &[-3, -4], 1, 2);
        assert_eq!((indices, averages), (vec![7], vec![-3i32]), "cut towards zero");
        assert_eq!(coalesce::<f64>(&[], &[], 3, 1), (vec![], vec![]));
        assert_eq!(coalesce::<f64>(&[4, 4], &[], 0, 1), (vec![4], vec![]));
    }

    #[test]
    fn sums_are_wide_and_single_rows_keep_their_bits() {
        let ones = vec![f16::from_f32(1.0); 4096];
        let (_, sum) = coalesce(&[3; 4096], &ones, 1, 1);
        assert_eq!(sum, [f16::from_f32(4096.0)], "in f16 it would stop at 2048");
        let (_, same) = coalesce(&[1], &[f32::from_bits(0x8000_0000)], 1, 1);
        assert_eq!(same[0].to_bits(), 0x8000_0000);
        assert_eq!(coalesce(&[0, 0], &[100i8, 100], 1, 1).1, [-56]);
        assert_eq!(coalesce(&[0], &[100i8], 1, 300).1, [0]);
        assert_eq!(coalesce(&[0], &[-128i8], 1, 128).1, [-1], "as an allreduce does");
    }

    #[test]
    fn the_smaller_form_is_moved() {
        // 1000 rows of 400 bytes: 800 000 bytes if dense, 408 per gathered row.
        assert!(!dense_is_smaller(1960, 1000, 400));
        assert!(dense_is_smaller(1961, 1000, 400));
        assert!(!dense_is_smaller(0, 1000, 400));
        assert!(!dense_is_smaller(1, 1000, 0), "rows without columns: indices are all there is");
        assert!(!dense_is_smaller(u64::MAX, u64::MAX, u64::MAX));
    }
}
