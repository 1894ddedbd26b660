//! The last minutes of a job as JSON, for charts: lists of the same length, one value per point.
//! Pure.
//!
//! A chart with hundreds of lines shows nothing, so only the ranks that the others waited for most,
//! and the links with the most bytes, have a list.

use std::{collections::BTreeMap, sync::Arc};

use gradwire_coordinator::timeline::{POINT, POINTS, Point};
use serde_json::{Value, json};

/// The most ranks and the most links with a list (BOUND).
const MOST: usize = 8;

/// The points as JSON, the oldest first.
pub fn of(points: &[Arc<Point>]) -> Value {
    fn list<T: Into<Value>>(points: &[Arc<Point>], of: impl Fn(&Point) -> T) -> Vec<Value> {
        points.iter().map(|point| of(point).into()).collect()
    }
    let waits = |point: &Point| point.waits.iter().map(|(rank, share)| (*rank, *share)).collect();
    let ranks = largest(points, waits).into_iter().map(|(rank, shares)| {
        let shares: Vec<Value> = shares.into_iter().map(|it| rounded(it, 1e4)).collect();
        json!({"rank": rank, "waited": shares})
    });
    let rates = |point: &Point| point.links.iter().map(|it| ((it.from, it.to), it.rate)).collect();
    let links = largest(points, rates).into_iter().map(|((from, to), rates)| {
        let rates: Vec<Value> = rates.into_iter().map(|it| rounded(it, 1.0)).collect();
        json!({"from": from, "to": to, "bytes_per_second": rates})
    });
    json!({
        "point_seconds": POINT.as_secs_f64(),
        "most_points": POINTS,
        "seconds": list(points, |point| point.at.as_secs_f64()),
        "step_seconds": list(points, |point| point.step_seconds),
        "blocked": list(points, |point| point.blocked),
        "operations_per_second": list(points, |point| point.operations_per_second),
        "resident_bytes": list(points, |point| point.resident_bytes),
        "shared_bytes": list(points, |point| point.shared_bytes),
        "ranks": ranks.collect::<Vec<_>>(),
        "links": links.collect::<Vec<_>>(),
    })
}

/// Fewer digits: the numbers are only drawn.
fn rounded(value: f32, steps: f64) -> Value {
    json!((f64::from(value) * steps).round() / steps)
}

/// The keys with the largest sums over all points, the largest first, each with its values: 0 where
/// a point does not have the key.
fn largest<K: Copy + Ord>(
    points: &[Arc<Point>],
    of: impl Fn(&Point) -> BTreeMap<K, f32>,
) -> Vec<(K, Vec<f32>)> {
    let values: Vec<BTreeMap<K, f32>> = points.iter().map(|point| of(point)).collect();
    let mut sums = BTreeMap::<K, f32>::new();
    for (key, value) in values.iter().flatten() {
        *sums.entry(*key).or_default() += value;
    }
    let mut sums: Vec<(K, f32)> = sums.into_iter().collect();
    sums.sort_by(|one, other| other.1.total_cmp(&one.1));
    sums.truncate(MOST);
    let list = |key: K| values.iter().map(|at| at.get(&key).copied().unwrap_or_default()).collect();
    sums.into_iter().map(|(key, _)| (key, list(key))).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gradwire_coordinator::timeline::Link;

    use super::*;

    fn point(second: u64, waits: &[(u32, f32)], links: &[(u32, u32, f32)]) -> Arc<Point> {
        Arc::new(Point {
            at: Duration::from_secs(second),
            step_seconds: (second > 5).then_some(0.25),
            blocked: Some(0.5),
            operations_per_second: 10.0,
            resident_bytes: 7,
            shared_bytes: 3,
            waits: waits.to_vec(),
            links: links.iter().map(|&(from, to, rate)| Link { from, to, rate }).collect(),
        })
    }

    #[test]
    fn each_list_has_one_value_per_point() {
        let points = [
            point(5, &[(1, 0.1)], &[(0, 1, 100.4), (1, 0, 9.0)]),
            point(10, &[(1, 0.1), (3, 0.5)], &[(1, 0, 300.0)]),
        ];
        assert_eq!(
            of(&points),
            json!({
                "point_seconds": 5.0,
                "most_points": 180,
                "seconds": [5.0, 10.0],
                "step_seconds": [null, 0.25],
                "blocked": [0.5, 0.5],
                "operations_per_second": [10.0, 10.0],
                "resident_bytes": [7, 7],
                "shared_bytes": [3, 3],
                "ranks": [{"rank": 3, "waited": [0.0, 0.5]}, {"rank": 1, "waited": [0.1, 0.1]}],
                "links": [
                    {"from": 1, "to": 0, "bytes_per_second": [9.0, 300.0]},
                    {"from": 0, "to": 1, "bytes_per_second": [100.0, 0.0]},
                ],
            })
        );
    }

    #[test]
    fn a_large_job_has_a_short_history() {
        let waits: Vec<(u32, f32)> =
            (0..1024).map(|rank| (rank, 0.5 + rank as f32 / 4096.0)).collect();
        let links: Vec<_> = (0..64).map(|to| (0, to + 1, 1e9 + to as f32)).collect();
        let points: Vec<_> = (0..180).map(|at| point(5 * at, &waits, &links)).collect();
        let json = of(&points);
        assert_eq!(json["ranks"].as_array().unwrap().len(), MOST, "BOUND");
        assert_eq!(json["links"].as_array().unwrap().len(), MOST, "BOUND");
        assert_eq!(json["ranks"][0]["rank"], 1023);
        let bytes = json.to_string().len();
        assert!(bytes < 64 << 10, "{bytes} bytes, BOUND");
    }
}
