use proptest::prelude::*;

use super::*;
use crate::types::{DType, ReduceOp};

fn shape(dims: &[u64]) -> Shape {
    Shape::new(dims).unwrap()
}

fn plain(collective: Collective, dims: &[u64]) -> Request {
    Request::plain(collective, DType::F32, shape(dims))
}

fn ranks(ranks: &[u32]) -> Vec<Rank> {
    ranks.iter().copied().map(Rank).collect()
}

fn agree(members: &[Rank], requests: &[Request]) -> Result<Agreed, Impossible> {
    Agreed::of(members, &requests.iter().collect::<Vec<_>>())
}

/// Checks from the flows alone that each output is filled once and without gaps.
fn check_tiling(agreed: &Agreed, members: &[Rank]) {
    for &rank in members {
        for (part, output) in agreed.outputs(members, rank).iter().enumerate() {
            let mut filled: Vec<(u64, u64)> = agreed
                .flows(members)
                .iter()
                .filter(|f| f.part as usize == part && f.target.is_none_or(|t| t == rank))
                .map(|f| (f.target_offset, f.count))
                .collect();
            filled.sort_unstable();
            let mut at = 0;
            for (offset, count) in filled {
                assert_eq!(offset, at, "ONE: rank {rank} of {agreed:?}");
                at += count;
            }
            assert_eq!(at, output.as_ref().map_or(0, Shape::elements), "{rank} of {agreed:?}");
        }
    }
}

#[test]
fn every_output_is_filled_once() {
    let members = ranks(&[1, 3, 4]);
    let own = |collective, rows: &[u64]| -> Vec<Request> {
        rows.iter().map(|&rows| plain(collective, &[rows, 2])).collect()
    };
    let rooted = |collective, rows: &[u64]| -> Vec<Request> {
        own(collective, rows).into_iter().map(|r| Request { root: Rank(3), ..r }).collect()
    };
    let cases = [
        own(Collective::Allreduce, &[5, 5, 5]),
        own(Collective::Allgather, &[5, 0, 2]),
        own(Collective::ReduceScatter, &[5, 5, 5]),
        own(Collective::Alltoall, &[6, 3, 0]),
        rooted(Collective::Broadcast, &[4, 4, 4]),
        rooted(Collective::Reduce, &[4, 4, 4]),
        rooted(Collective::Gather, &[0, 1, 9]),
        rooted(Collective::Scatter, &[0, 9, 0]),
        own(Collective::Barrier, &[0, 0, 0]),
    ];
    for requests in cases {
        let agreed = agree(&members, &requests).unwrap();
        check_tiling(&agreed, &members);
        for (rank, request) in members.iter().zip(&requests) {
            assert!(agreed.fits(&members, *rank, request), "{request:?}");
            assert!(agreed.fits(&members, *rank, &agreed.asked(&members, *rank)));
            assert!(agreed.is_of(&members) && !agreed.fits(&members, Rank(0), request));
        }
    }
}

#[test]
fn rows_decide_who_gets_what() {
    let members = ranks(&[0, 1]);
    let split = |list: &[u64]| Request { list: list.to_vec(), ..plain(Collective::Alltoall, &[4]) };
    let agreed = agree(&members, &[split(&[1, 3]), split(&[0, 2])]).unwrap();
    assert_eq!(agreed.rows(), [1, 3, 0, 2]);
    assert_eq!(agreed.received(&members, Rank(1), 0), [3, 2]);
    assert_eq!(agreed.outputs(&members, Rank(1)), [Some(shape(&[5]))]);
    let flow = agreed.flows(&members)[3];
    assert_eq!((flow.source_offset, flow.target_offset, flow.count), (0, 3, 2));
    assert!(!agreed.fits(&members, Rank(0), &split(&[3, 1])));
    assert!(!agreed.is_expected(&members, 2, Rank(1), &split(&[0, 2])));
    // With equal requests, a rank gets what it expects.
    let even = plain(Collective::Alltoall, &[4]);
    let agreed = agree(&members, &[even.clone(), even.clone()]).unwrap();
    assert!(agreed.is_expected(&members, 2, Rank(1), &even));
    let alone = ranks(&[1]);
    let agreed = agree(&alone, std::slice::from_ref(&even)).unwrap();
    assert!(!agreed.is_expected(&alone, 2, Rank(1), &even), "the other one has joined");
}

#[test]
fn a_large_guess_is_not_made() {
    // BOUND: 16 MiB from each of five ranks are expected, one row more is not.
    let members = ranks(&[0, 1, 2, 3, 4]);
    let rows = |rows: u64| plain(Collective::Allgather, &[rows, 1 << 20]);
    let expected = |asked: &Request| asked.expected(Rank(0), 5, 0).remove(0);
    assert_eq!(expected(&rows(4)).shape, Some(shape(&[20, 1 << 20])));
    let large = rows(5);
    assert_eq!(expected(&large), Expected::default());
    let gather = plain(Collective::Gather, &[5, 1 << 20]);
    assert_eq!(expected(&gather), Expected::default());
    assert_eq!(large.expected(Rank(0), 1, 0)[0].shape, Some(large.shape.clone()), "no guess");
    // An unexpected result is reported to all ranks, even if all requests are equal.
    let agreed = agree(&members, &vec![large.clone(); 5]).unwrap();
    assert!(members.iter().all(|rank| !agreed.is_expected(&members, 5, *rank, &large)));
    // A group counts as a whole.
    let more = vec![crate::Part { dtype: DType::F32, shape: shape(&[3, 1 << 20]) }];
    assert_eq!(expected(&Request { more, ..rows(2) }), Expected::default());
}

#[test]
fn a_receiver_learns_the_shape() {
    let members = ranks(&[2, 5]);
    let ask = |dims: &[u64]| Request {
        root: Rank(5),
        list: vec![2],
        ..plain(Collective::SendReceive, dims)
    };
    let agreed = agree(&members, &[ask(&[0]), ask(&[3, 4])]).unwrap();
    check_tiling(&agreed, &members);
    assert!(agreed.fits(&members, Rank(2), &ask(&[7])) && agreed.is_of(&members));
    assert!(!agreed.is_expected(&members, 9, Rank(2), &ask(&[0])));
    assert!(agreed.is_expected(&members, 9, Rank(2), &ask(&[3, 4])));
    assert!(agreed.is_expected(&members, 9, Rank(5), &ask(&[3, 4])));
}

#[test]
fn groups_have_the_flows_of_each_tensor() {
    let members = ranks(&[0, 1]);
    let group = |rows: u64| Request {
        more: vec![crate::Part { dtype: DType::I64, shape: shape(&[rows + 1, 2]) }],
        ..plain(Collective::Allgather, &[rows])
    };
    let agreed = agree(&members, &[group(1), group(3)]).unwrap();
    assert_eq!(agreed.rows(), [1, 3, 2, 4]);
    check_tiling(&agreed, &members);
    let outputs = agreed.outputs(&members, Rank(0));
    assert_eq!(outputs, [Some(shape(&[4])), Some(shape(&[6, 2]))]);
}

#[test]
fn the_impossible_is_named() {
    let members = ranks(&[0, 1, 2]);
    let all = |request: Request| agree(&members, &[request.clone(), request.clone(), request]);
    let text = |request| all(request).unwrap_err().to_string();
    let root = |collective| Request { root: Rank(7), ..plain(collective, &[3]) };
    for collective in [Collective::Broadcast, Collective::Reduce, Collective::Scatter] {
        assert!(text(root(collective)).contains("root 7 is not a member"), "{collective}");
    }
    let list = |list: &[u64]| Request { list: list.to_vec(), ..plain(Collective::Alltoall, &[4]) };
    assert!(text(list(&[])).contains("the 4 rows of rank 0 can't be split evenly between 3"));
    assert!(text(list(&[1, 1])).contains("rank 0 gave 2 splits for 3 members"));
    assert!(text(list(&[1, 1, 3])).contains("add up to 5 rows, but its tensor has 4"));
    let sum = Request::allreduce(DType::F32, shape(&[1]), ReduceOp::Sum);
    let forged = Agreed::from_parts(plain(Collective::Allgather, &[0]), vec![1; 2]);
    assert!(!forged.is_of(&members), "TRUST");
    let forged = Agreed::from_parts(plain(Collective::Allgather, &[0]), vec![u64::MAX; 3]);
    assert!(!forged.is_of(&members), "TRUST");
    assert!(all(sum).is_ok());
}

/// The limit holds for each tensor of a group and for each rank of an alltoall.
#[test]
fn the_limit_is_per_tensor_and_rank() {
    let members = ranks(&[0, 1]);
    let large = crate::Part { dtype: DType::U8, shape: shape(&[1 << 26]) };
    let group = Request { more: vec![large], ..plain(Collective::Allgather, &[1, 1 << 27]) };
    let agreed = agree(&members, &[group.clone(), group]).unwrap();
    assert!(agreed.is_of(&members), "a few wide rows beside many narrow ones");
    let wide = plain(Collective::Alltoall, &[2, 1 << 51]);
    let agreed = agree(&members, &[wide.clone(), wide]).unwrap();
    assert!(agreed.is_of(&members), "all rows together would be too many for one rank");
    // TRUST: a column with too many rows for its receiver, and a row with too many for its sender.
    let too_much = plain(Collective::Alltoall, &[0, 1 << 51]);
    let forged = |rows| Agreed::from_parts(too_much.clone(), rows);
    assert!(forged(vec![2, 2, 2, 2]).is_of(&members));
    assert!(!forged(vec![3, 0, 2, 0]).is_of(&members));
    assert!(!forged(vec![3, 2, 0, 0]).is_of(&members));
    let rows = Agreed::from_parts(plain(Collective::Barrier, &[0]), vec![1]);
    assert!(!rows.is_of(&members));
}

/// Requests of all kinds that mostly agree, some with absurdly many rows.
fn requests() -> impl Strategy<Value = Vec<Request>> {
    let collective = prop::sample::select(Collective::ALL.to_vec());
    let rows = prop_oneof![0..9u64, Just(1 << 26), Just(1 << 51), Just(1 << 53)];
    let width = prop_oneof![Just(1u64), Just(3), Just(1 << 27)];
    let own = (rows.clone(), rows, prop::collection::vec(0..3u64, 0..5), 0..20u8);
    let all = prop::collection::vec(own, 1..5);
    (collective, width, any::<bool>(), 0..4u32, all).prop_map(
        |(collective, width, group, root, all)| {
            let first = (all[0].0, all[0].1);
            let of = |(rows, more, list, odd): (u64, u64, Vec<u64>, u8)| {
                let mut request = plain(collective, &[0, width]);
                let (rows, more) = if request.has_free_rows() { (rows, more) } else { first };
                request.shape = request.shape.with_rows(rows).unwrap_or_default();
                request.root = Rank(root);
                if group {
                    let shape = shape(&[more]);
                    request.more = vec![crate::Part { dtype: DType::U8, shape }];
                }
                match collective {
                    Collective::Alltoall | Collective::Scatter => request.list = list,
                    Collective::SendReceive => request.list = vec![1],
                    _ => {}
                }
                match odd {
                    0 => request.shape = Shape::default(),
                    1 => request.dtype = DType::F16,
                    2 => request.list.push(1),
                    3 => request.more.clear(),
                    4 => request.postscale = 0.5,
                    5 => request.root = Rank(9),
                    6 => request.shape = shape(&[3, width, 2]),
                    _ => {}
                }
                request
            };
            all.into_iter().map(of).collect()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Daemons and ranks accept everything that a coordinator can agree to.
    #[test]
    fn an_agreement_fits_its_members(requests in requests()) {
        let mut agreeing: Vec<Request> =
            requests.into_iter().filter(|request| request.validate().is_ok()).collect();
        prop_assume!(!agreeing.is_empty());
        let first = agreeing[0].clone();
        agreeing.retain(|request| request.agrees_with(&first));
        let members: Vec<Rank> = (0..agreeing.len() as u32).map(Rank).collect();
        if let Ok(agreed) = agree(&members, &agreeing) {
            prop_assert!(agreed.is_of(&members), "{agreed:?}");
            check_tiling(&agreed, &members);
            for (rank, request) in members.iter().zip(&agreeing) {
                prop_assert!(agreed.fits(&members, *rank, request), "{rank}: {agreed:?}");
            }
        }
    }

    /// Comparing without copies gives the same as comparing copies.
    #[test]
    fn requests_agree_if_common_parts_are_equal(requests in requests()) {
        for one in &requests {
            for two in &requests {
                prop_assert_eq!(one.agrees_with(two), one.common() == two.common());
            }
        }
    }

    #[test]
    fn only_what_was_asked_for_fits(requests in requests()) {
        let members = ranks(&[0, 1]);
        for (one, two) in requests.iter().zip(requests.iter().skip(1)) {
            let both = [one.clone(), two.clone()];
            if !one.agrees_with(two) || one.validate().is_err() || two.validate().is_err() {
                continue;
            }
            let Ok(agreed) = agree(&members, &both) else { continue };
            let swapped = [two.clone(), one.clone()];
            let Ok(other) = agree(&members, &swapped) else { continue };
            let fits = agreed.fits(&members, Rank(0), two) && agreed.fits(&members, Rank(1), one);
            prop_assert_eq!(fits, agreed == other);
        }
    }
}
