//! The arithmetic of Adasum on one rank's share of all ranks' tensors. Pure functions.
//!
//! `adasum(a, b) = (1 − a·b / 2‖a‖²) a + (1 − a·b / 2‖b‖²) b`: the sum of gradients that are
//! orthogonal, the average of those that are parallel, and something in between otherwise (Maleki
//! et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021). More than two
//! tensors are combined along a binary tree, neighbours first. A tensor without a neighbour goes up
//! a level unchanged.
//!
//! The dot products are of whole tensors, but each rank has only a share of each. So each rank
//! computes the products of its share. Their sums over all ranks give the weights.

/// The number of products for a pair: a·b, a·a, b·b.
pub(crate) const PRODUCTS: usize = 3;

/// The number of levels of a tree with this many tensors.
pub(crate) fn levels(tensors: usize) -> u32 {
    tensors.max(1).next_power_of_two().ilog2()
}

/// The products of each pair of neighbours, within this share.
pub(crate) fn products(shares: &[Vec<f64>]) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let pair = |pair: &[Vec<f64>]| {
        let (a, b) = (&pair[0], &pair[1]);
        [dot(a, b), dot(a, a), dot(b, b)]
    };
    shares.chunks_exact(2).flat_map(pair).collect()
}

/// The weights of a and b, from the products of the whole tensors. The weight of a zero tensor does
/// not matter; it is 1.
fn weights([ab, aa, bb]: [f64; PRODUCTS]) -> [f64; 2] {
    [aa, bb].map(|norm| if norm == 0.0 { 1.0 } else { 1.0 - ab / (2.0 * norm) })
}

/// One level: combines each pair of neighbours.
pub(crate) fn combine(shares: Vec<Vec<f64>>, products: &[f64]) -> Vec<Vec<f64>> {
    let mut products = products.chunks_exact(PRODUCTS);
    let mut shares = shares.into_iter();
    let mut combined = Vec::with_capacity(shares.len().div_ceil(2));
    while let Some(mut a) = shares.next() {
        if let (Some(b), Some(&[ab, aa, bb])) = (shares.next(), products.next()) {
            let [of_a, of_b] = weights([ab, aa, bb]);
            a.iter_mut().zip(b).for_each(|(a, b)| *a = of_a * *a + of_b * b);
        }
        combined.push(a);
    }
    combined
}

#[cfg(test)]
mod tests {
    use rand_xoshiro::{
        SplitMix64,
        rand_core::{Rng, SeedableRng},
    };

    use super::*;

    /// The formula, on whole tensors.
    fn adasum(a: &[f64], b: &[f64]) -> Vec<f64> {
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let factor = |norm: f64| if norm == 0.0 { 1.0 } else { 1.0 - dot(a, b) / (2.0 * norm) };
        let (of_a, of_b) = (factor(dot(a, a)), factor(dot(b, b)));
        a.iter().zip(b).map(|(a, b)| of_a * a + of_b * b).collect()
    }

    fn reference(tensors: &[Vec<f64>]) -> Vec<f64> {
        match tensors {
            [one] => one.clone(),
            _ => {
                let above: Vec<_> = tensors
                    .chunks(2)
                    .map(|pair| if let [a, b] = pair { adasum(a, b) } else { pair[0].clone() })
                    .collect();
                reference(&above)
            }
        }
    }

    /// The work of the ranks, with a loop instead of the allreduce of the products.
    fn by_shares(tensors: &[Vec<f64>]) -> Vec<f64> {
        let (ranks, elements) = (tensors.len(), tensors[0].len());
        let cut = |rank: usize| rank * elements / ranks;
        let mut shares: Vec<Vec<Vec<f64>>> = (0..ranks)
            .map(|rank| tensors.iter().map(|t| t[cut(rank)..cut(rank + 1)].to_vec()).collect())
            .collect();
        for _ in 0..levels(ranks) {
            let mut sums = vec![0.0; shares[0].len() / 2 * PRODUCTS];
            for share in &shares {
                sums.iter_mut().zip(products(share)).for_each(|(sum, product)| *sum += product);
            }
            shares = shares.into_iter().map(|share| combine(share, &sums)).collect();
        }
        assert!(shares.iter().all(|share| share.len() == 1));
        shares.into_iter().flat_map(|mut share| share.remove(0)).collect()
    }

    fn tensor(seed: u64, elements: usize) -> Vec<f64> {
        let mut random = SplitMix64::seed_from_u64(seed);
        (0..elements).map(|_| random.next_u64() as f64 / u64::MAX as f64 - 0.5).collect()
    }

    #[test]
    fn combined_shares_match_the_formula() {
        for ranks in 1..=9 {
            for elements in [1, 2, 7, 64] {
                let tensors: Vec<_> =
                    (0..ranks).map(|rank| tensor((ranks * 100 + rank) as u64, elements)).collect();
                let (got, want) = (by_shares(&tensors), reference(&tensors));
                for (got, want) in got.iter().zip(&want) {
                    assert!((got - want).abs() < 1e-12, "{ranks} ranks: {got} {want}");
                }
            }
        }
    }

    #[test]
    fn orthogonal_sums_parallel_averages_zero_drops() {
        let (x, y, zero) = (vec![2.0, 0.0], vec![0.0, 3.0], vec![0.0, 0.0]);
        assert_eq!(by_shares(&[x.clone(), y.clone()]), [2.0, 3.0]);
        assert_eq!(by_shares(&[x.clone(), x.clone()]), [2.0, 0.0]);
        assert_eq!(by_shares(&[x.clone(), zero.clone()]), [2.0, 0.0]);
        assert_eq!(by_shares(&[zero.clone(), x.clone(), zero.clone()]), [2.0, 0.0]);
        assert_eq!(by_shares(&[zero.clone(), zero.clone()]), [0.0, 0.0]);
    }

    #[test]
    fn a_tensor_without_a_neighbour_is_unchanged() {
        assert_eq!([1, 2, 3, 4, 5, 8, 9].map(levels), [0, 1, 2, 2, 3, 3, 4]);
        let three = vec![vec![1.0], vec![1.0], vec![5.0]];
        let level = combine(three.clone(), &products(&three));
        assert_eq!(level, [vec![1.0], vec![5.0]]);
    }
}
