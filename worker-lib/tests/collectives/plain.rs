//! The result of each collective.

use gradwire_worker::{
    AllgatherOptions, AllreduceOptions, AlltoallOptions, Bool, Buffer, Complex, DType, Element,
    F8E4m3, F8E5m2, GatherOptions, Gathered, ReduceOp, ReduceOptions, ReduceScatterOptions,
    ScatterOptions, Session, Tensor,
    half::{bf16, f16},
};

use crate::ranks;

fn sum(name: &str) -> AllreduceOptions {
    AllreduceOptions::named(name).op(ReduceOp::Sum)
}

/// `rows` rows of two elements, all `value`.
fn rows(session: &Session, rows: usize, value: f32) -> Tensor<f32> {
    session.tensor(&vec![value; rows * 2], &[rows, 2]).unwrap()
}

#[test]
fn an_allreduce_out_of_place_keeps_its_input() {
    ranks(3, |session| {
        let own = session.tensor(&[session.rank() as f32, 1.0], &[2]).unwrap();
        let result = session.allreduce_to(&own, AllreduceOptions::default()).unwrap();
        assert_eq!(
            (own.as_slice()[0], result.as_slice()),
            (session.rank() as f32, &[1.0, 1.0][..])
        );
        let handle = session.allreduce_to_async(own, sum("async")).unwrap();
        let (own, result) = handle.wait().unwrap();
        assert_eq!((own.as_slice()[1], result.as_slice()), (1.0, &[3.0, 3.0][..]));
    });
}

#[test]
fn a_group_is_one_operation_of_any_element_types() {
    ranks(2, |session| {
        let group = || -> Vec<Buffer> {
            vec![
                session.tensor(&[1.5f32; 3], &[3]).unwrap().into_buffer(),
                session.tensor(&[7i64], &[]).unwrap().into_buffer(),
                session.zeros::<f64>(&[0, 4]).unwrap().into_buffer(),
            ]
        };
        let before = session.stats().operations;
        let mut own = group();
        session.grouped_allreduce(&mut own, sum("in place")).unwrap();
        let check = |group: Vec<Buffer>| {
            let [a, b, c] = <[Buffer; 3]>::try_from(group).unwrap();
            assert_eq!(a.into_tensor::<f32>().unwrap().as_slice(), [3.0; 3]);
            let b = b.into_tensor::<f32>().unwrap_err();
            assert_eq!(b.into_tensor::<i64>().unwrap().as_slice(), [14]);
            assert_eq!(c.shape(), [0, 4]);
        };
        check(own);
        check(session.grouped_allreduce_to(&group(), sum("new")).unwrap());
        check(session.grouped_allreduce_async(group(), sum("async")).unwrap().wait().unwrap());
        let handle = session.grouped_allreduce_to_async(group(), sum("both")).unwrap();
        let (own, results) = handle.wait().unwrap();
        assert_eq!(own[1].bytes(), 7i64.to_le_bytes());
        check(results);
        assert_eq!(session.stats().operations - before, 4);
    });
}

#[test]
fn only_the_root_gets_a_reduction() {
    ranks(3, |session| {
        let options = || ReduceOptions::to_rank(1).op(ReduceOp::Sum);
        let expected = |session: &Session| if session.rank() == 1 { 6.0 } else { 2.0f32 };
        let mut tensor = session.tensor(&[2.0f32; 5], &[5]).unwrap();
        session.reduce(&mut tensor, options()).unwrap();
        assert_eq!(tensor.as_slice(), [expected(&session); 5]);
        let tensor = session.tensor(&[2.0f32], &[]).unwrap();
        let tensor = session.reduce_async(tensor, options().name("r")).unwrap().wait().unwrap();
        assert_eq!(tensor.as_slice(), [expected(&session)]);
    });
}

#[test]
fn ranks_may_gather_different_numbers_of_rows() {
    ranks(3, |session| {
        let rank = session.rank();
        let check = |gathered: Gathered<Tensor<f32>>| {
            assert_eq!(gathered.rows, [0, 1, 2]);
            assert_eq!(gathered.tensor.shape(), [3, 2]);
            assert_eq!(gathered.tensor.as_slice(), [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]);
        };
        let own = rows(&session, rank as usize, rank as f32);
        check(session.allgather(&own, AllgatherOptions::default()).unwrap());
        let handle = session.allgather_async(own, AllgatherOptions::named("async")).unwrap();
        let (own, gathered) = handle.wait().unwrap();
        check(gathered);

        let gathered = session.gather(&own, GatherOptions::to_rank(2)).unwrap();
        assert_eq!(gathered.is_some(), rank == 2);
        gathered.into_iter().for_each(check);
        let handle = session.gather_async(own, GatherOptions::to_rank(0).name("g")).unwrap();
        let (own, gathered) = handle.wait().unwrap();
        assert_eq!((own.shape()[0], gathered.is_some()), (rank as usize, rank == 0));
        gathered.into_iter().for_each(check);
    });
}

#[test]
fn a_single_number_is_a_row() {
    ranks(3, |session| {
        let own = session.tensor(&[i64::from(session.rank()) * 10], &[]).unwrap();
        let gathered = session.allgather(&own, AllgatherOptions::default()).unwrap();
        assert_eq!(gathered.tensor.shape(), [3]);
        assert_eq!((gathered.tensor.as_slice(), gathered.rows), (&[0, 10, 20][..], vec![1; 3]));
        if let Some(gathered) = session.gather(&own, GatherOptions::to_rank(1)).unwrap() {
            assert_eq!(gathered.tensor.as_slice(), [0, 10, 20]);
        }
    });
}

#[test]
fn a_group_is_gathered_and_scattered_as_one() {
    ranks(2, |session| {
        let rank = session.rank() as usize;
        let group = || -> Vec<Buffer> {
            let first = session.tensor(&vec![rank as u16; rank], &[rank]).unwrap();
            vec![first.into_buffer(), rows(&session, 2, rank as f32).into_buffer()]
        };
        let check = |gathered: Vec<Gathered<Buffer>>| {
            assert_eq!((&gathered[0].rows[..], &gathered[1].rows[..]), (&[0, 1][..], &[2, 2][..]));
            assert_eq!(gathered[0].tensor.bytes(), 1u16.to_le_bytes());
            assert_eq!(gathered[1].tensor.shape(), [4, 2]);
        };
        check(session.grouped_allgather(&group(), AllgatherOptions::default()).unwrap());
        let options = AllgatherOptions::named("async");
        let (own, gathered) =
            session.grouped_allgather_async(group(), options).unwrap().wait().unwrap();
        assert_eq!(own.len(), 2);
        check(gathered);

        let group = || vec![rows(&session, 3, 1.0), rows(&session, 1, 2.0)];
        let options = |name| ReduceScatterOptions::named(name).op(ReduceOp::Sum);
        let shares = session.grouped_reducescatter(&group(), options("s")).unwrap();
        let (_, again) =
            session.grouped_reducescatter_async(group(), options("t")).unwrap().wait().unwrap();
        for shares in [shares, again] {
            assert_eq!(shares[0].as_slice(), vec![2.0; [4, 2][rank]]);
            assert_eq!(shares[1].as_slice(), vec![4.0; [2, 0][rank]]);
        }
    });
}

#[test]
fn the_first_ranks_get_the_remaining_rows() {
    ranks(3, |session| {
        let values: Vec<f32> = (0..10).map(|i| i as f32).collect();
        let own = session.tensor(&values, &[5, 2]).unwrap();
        let share = session.reducescatter(&own, ReduceScatterOptions::default()).unwrap();
        let expected: &[f32] = [&[0.0, 1.0, 2.0, 3.0], &[4.0, 5.0, 6.0, 7.0], &[8.0, 9.0][..]]
            [session.rank() as usize];
        assert_eq!(share.as_slice(), expected);
        let options = ReduceScatterOptions::named("async").op(ReduceOp::Sum);
        let (own, share) = session.reducescatter_async(own, options).unwrap().wait().unwrap();
        assert_eq!((own.as_slice()[9], share.as_slice()[0]), (9.0, expected[0] * 3.0));
    });
}

#[test]
fn the_root_scatters_its_rows() {
    ranks(3, |session| {
        let rank = session.rank() as usize;
        let values: Vec<i64> = (0..12).collect();
        let own = (rank == 1).then(|| session.tensor(&values, &[6, 2]).unwrap());
        // Whether the others know their shape in advance makes no difference.
        let known = [
            ScatterOptions::from_rank(1),
            ScatterOptions::from_rank(1).expecting(&[2, 2]),
            ScatterOptions::from_rank(1).expecting(&[7]),
        ];
        for options in known {
            let share = session.scatter(own.as_ref(), options).unwrap();
            assert_eq!(share.shape(), [2, 2]);
            assert_eq!(share.as_slice(), &values[rank * 4..][..4]);
        }
        let splits = [0, 4, 1];
        let options = ScatterOptions::from_rank(1).splits(&splits).name("uneven");
        let (own, share) = session.scatter_async(own, options).unwrap().wait().unwrap();
        assert_eq!(own.is_some(), rank == 1);
        assert_eq!(share.shape(), [splits[rank], 2]);
        assert_eq!(share.as_slice(), &values[[0, 0, 8][rank]..][..splits[rank] * 2]);

        // A buffer needs an element type.
        let own: Option<Buffer> = own.map(Tensor::into_buffer);
        let options = ScatterOptions::from_rank(1).dtype(DType::I64).name("buffer");
        let share = session.scatter(own.as_ref(), options).unwrap();
        assert_eq!((share.dtype(), share.shape()), (DType::I64, &[2, 2][..]));
    });
}

#[test]
fn every_rank_gets_rows_of_every_rank() {
    ranks(3, |session| {
        let rank = session.rank();
        let values: Vec<u32> = (0..6).map(|i| rank * 10 + i).collect();
        let own = session.tensor(&values, &[6]).unwrap();
        let gathered = session.alltoall(&own, AlltoallOptions::default()).unwrap();
        let expected: Vec<u32> =
            (0..3).flat_map(|r| [r * 10 + rank * 2, r * 10 + rank * 2 + 1]).collect();
        assert_eq!((gathered.tensor.as_slice(), &gathered.rows[..]), (&expected[..], &[2; 3][..]));

        // Rank r gives r rows to rank 0, none to rank 1 and the next one to rank 2.
        let options = AlltoallOptions::named("uneven").splits(&[rank as usize, 0, 1]);
        let options = options.leave_rest();
        let (_, gathered) = session.alltoall_async(own, options).unwrap().wait().unwrap();
        let expected: (&[u32], &[usize]) = match rank {
            0 => (&[10, 20, 21], &[0, 1, 2]),
            1 => (&[], &[0, 0, 0]),
            _ => (&[0, 11, 22], &[1, 1, 1]),
        };
        assert_eq!((gathered.tensor.as_slice(), &gathered.rows[..]), expected);
    });
}

fn moves<T: Element>(session: &Session) {
    let bytes: Vec<u8> = (0..3 * size_of::<T>()).map(|i| i as u8 ^ session.rank() as u8).collect();
    let mut own = session.zeros::<T>(&[3]).unwrap();
    bytemuck::cast_slice_mut(own.as_mut_slice()).copy_from_slice(&bytes);
    let gathered = session.allgather(&own, AllgatherOptions::default()).unwrap().tensor;
    let got: &[u8] = bytemuck::cast_slice(gathered.as_slice());
    assert_eq!(got[session.rank() as usize * bytes.len()..][..bytes.len()], bytes, "{}", T::DTYPE);
}

#[test]
fn every_element_type_is_moved() {
    ranks(2, |session| {
        moves::<f64>(&session);
        moves::<f32>(&session);
        moves::<f16>(&session);
        moves::<bf16>(&session);
        moves::<F8E4m3>(&session);
        moves::<F8E5m2>(&session);
        moves::<i8>(&session);
        moves::<u8>(&session);
        moves::<i16>(&session);
        moves::<u16>(&session);
        moves::<i32>(&session);
        moves::<u32>(&session);
        moves::<i64>(&session);
        moves::<u64>(&session);
        moves::<Bool>(&session);
        moves::<Complex<f32>>(&session);
        moves::<Complex<f64>>(&session);
    });
    assert_eq!(DType::ALL.len(), 17, "add the new element type to this test");
}

#[test]
fn views_of_shared_memory_take_part() {
    ranks(2, |session| {
        let whole = session.buffer(DType::F32, &[8]).unwrap().into_shared();
        let part = whole.view(3, DType::F32, &[2]).unwrap();
        let mut filled = session.tensor(&[session.rank() as f32 + 1.0; 2], &[2]).unwrap();
        session.allreduce(&mut filled, sum("filled")).unwrap();
        // Through the address, as a framework does.
        let gathered = session.gather(&filled, GatherOptions::to_rank(0)).unwrap();
        assert_eq!(
            gathered.map(|g| g.tensor.as_slice().to_vec()),
            (session.rank() == 0).then(|| vec![3.0; 4])
        );
        let handle = session.allreduce_async(part.clone(), sum("part")).unwrap();
        let back = handle.wait().unwrap();
        assert_eq!((back.as_ptr(), back.byte_len()), (part.as_ptr(), 8));
        assert_eq!(part.as_ptr().addr() - whole.as_ptr().addr(), 12);
        for (first, dtype, dims, wrong) in [
            (7, DType::F32, &[2][..], "exceeds a buffer of 32 bytes"),
            (usize::MAX, DType::F64, &[1], "exceeds"),
        ] {
            let error = whole.view(first, dtype, dims).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
        let odd = part.view(0, DType::F64, &[1]).unwrap_err().to_string();
        assert!(odd.contains("can't begin at byte 12"), "{odd}");
        let used = session.stats().arena.used;
        drop((whole, back));
        assert_eq!(session.stats().arena.used, used, "a view holds it");
        drop(part);
        assert!(session.stats().arena.used < used);
    });
}
