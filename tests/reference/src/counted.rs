//! Contributions of small whole numbers, which differ by rank, step and index.
//!
//! Sums of them are exact in `f32`, in any order.

/// The contribution of a rank to element `index` in a step.
fn value(rank: u32, step: u64, index: usize) -> f32 {
    (index % 7 + 1) as f32 * (rank + 1) as f32 + (step % 5) as f32
}

/// Fills the contribution of a rank.
pub fn fill(elements: &mut [f32], rank: u32, step: u64) {
    for (index, element) in elements.iter_mut().enumerate() {
        *element = value(rank, step, index);
    }
}

/// Checks the sum of the contributions of all ranks.
///
/// # Errors
/// The first element that is wrong.
pub fn check(elements: &[f32], ranks: u32, step: u64) -> Result<(), String> {
    for (index, got) in elements.iter().enumerate() {
        let right: f32 = (0..ranks).map(|rank| value(rank, step, index)).sum();
        if *got != right {
            return Err(format!("step {step}, element {index}: {got} instead of {right}"));
        }
    }
    Ok(())
}
