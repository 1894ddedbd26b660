//! The right results of each rank, computed from the contributions of all ranks by simple cutting
//! and joining of rows.

use std::ops::Range;

use gradwire_proto::{Collective, Compression, Request, Shape};

use super::call::{Call, Got, Piece};
use gradwire_reference::{Between, Reduction, Values};

/// The right result of one of a rank's tensors.
enum Right {
    /// No result.
    Nothing,
    /// These bytes.
    Moved(Piece),
    /// The reduction of these rows over all contributions.
    Reduced(Shape, Range<usize>),
}

/// The rows of each of `ranks` members, split evenly: the first members get the remainder.
fn even(rows: u64, ranks: usize) -> Vec<u64> {
    let ranks = ranks as u64;
    (0..ranks).map(|at| rows / ranks + u64::from(at < rows % ranks)).collect()
}

/// The number of rows that each member gets of this request's tensor.
fn splits(request: &Request, ranks: usize) -> Vec<u64> {
    if request.list.is_empty() { even(request.shape.rows(), ranks) } else { request.list.clone() }
}

/// The bytes of one row.
fn row_bytes(request: &Request, part: usize) -> usize {
    request.shape_of(part).row_elements() as usize * request.dtype_of(part).size()
}

/// The range of rows of the member at position `at`.
fn rows_at(splits: &[u64], at: usize) -> Range<usize> {
    let begin: u64 = splits[..at].iter().sum();
    begin as usize..(begin + splits[at]) as usize
}

fn scaled(rows: &Range<usize>, bytes: usize) -> Range<usize> {
    rows.start * bytes..rows.end * bytes
}

fn right(call: &Call, rank: u32, part: usize) -> Right {
    let request = call.request(rank);
    let (n, root) = (call.ranks.len(), request.root.0);
    let me = call.ranks.iter().position(|member| *member == rank).expect("a member");
    let (shape, row) = (request.shape_of(part), row_bytes(request, part));
    let with_rows = |rows: u64| shape.with_rows(rows).expect("a shape");
    let all = || 0..request.bytes_of(part) as usize;
    let own = || Piece { shape: shape.clone(), bytes: call.input(rank, part), rows: Vec::new() };
    let gathered = || {
        let rows: Vec<u64> = call.requests.iter().map(|r| r.shape_of(part).rows()).collect();
        let bytes = call.ranks.iter().flat_map(|member| call.input(*member, part)).collect();
        Right::Moved(Piece { shape: with_rows(rows.iter().sum()), bytes, rows })
    };
    match request.collective {
        Collective::Allreduce => Right::Reduced(shape.clone(), all()),
        Collective::Reduce if rank == root => Right::Reduced(shape.clone(), all()),
        // In place: a rank without a result keeps its input.
        Collective::Reduce => Right::Moved(own()),
        Collective::Broadcast => Right::Moved(Piece { bytes: call.input(root, part), ..own() }),
        Collective::Allgather => gathered(),
        Collective::Gather if rank == root => gathered(),
        Collective::Scatter => {
            let rows = rows_at(&splits(call.request(root), n), me);
            let whole = call.request(root);
            let shape = whole.shape.with_rows(rows.len() as u64).expect("a shape");
            let bytes = call.input(root, part)[scaled(&rows, row_bytes(whole, part))].to_vec();
            Right::Moved(Piece { shape, bytes, rows: Vec::new() })
        }
        Collective::ReduceScatter => {
            let rows = rows_at(&even(shape.rows(), n), me);
            Right::Reduced(with_rows(rows.len() as u64), scaled(&rows, row))
        }
        Collective::Alltoall => {
            let (mut rows, mut bytes) = (Vec::new(), Vec::new());
            for (from, request) in call.ranks.iter().zip(&call.requests) {
                let theirs = rows_at(&splits(request, n), me);
                bytes.extend_from_slice(&call.input(*from, part)[scaled(&theirs, row)]);
                rows.push(theirs.len() as u64);
            }
            Right::Moved(Piece { shape: with_rows(rows.iter().sum()), bytes, rows })
        }
        Collective::SendReceive if rank == root => Right::Moved(own()),
        Collective::SendReceive => {
            let shape = call.request(root).shape.clone();
            Right::Moved(Piece { shape, bytes: call.input(root, part), rows: Vec::new() })
        }
        _ => Right::Nothing,
    }
}

pub(super) fn check(call: &Call, rank: u32, got: &Got, between: Between) -> Result<(), String> {
    let request = call.request(rank);
    if got.len() != request.parts() {
        return Err(format!("{} results for {} tensors", got.len(), request.parts()));
    }
    for (part, got) in got.iter().enumerate() {
        let right = right(call, rank, part);
        check_part(call, &right, part, got.as_ref(), between)
            .map_err(|why| format!("tensor {part}: {why}"))?;
    }
    Ok(())
}

fn check_part(
    call: &Call,
    right: &Right,
    part: usize,
    got: Option<&Piece>,
    between: Between,
) -> Result<(), String> {
    let (got, shape) = match (right, got) {
        (Right::Nothing, None) => return Ok(()),
        (Right::Nothing, Some(_)) => return Err("unexpected result".into()),
        (_, None) => return Err("missing result".into()),
        (Right::Moved(Piece { shape, .. }) | Right::Reduced(shape, _), Some(got)) => (got, shape),
    };
    if got.shape != *shape {
        return Err(format!("its shape is {} instead of {shape}", got.shape));
    }
    match right {
        Right::Nothing => Ok(()),
        Right::Moved(right) if right.rows != got.rows => {
            Err(format!("the numbers of rows are {:?} instead of {:?}", got.rows, right.rows))
        }
        Right::Moved(right) => match right.bytes.iter().zip(&got.bytes).position(|(a, b)| a != b) {
            _ if right.bytes.len() != got.bytes.len() => {
                Err(format!("{} bytes instead of {}", got.bytes.len(), right.bytes.len()))
            }
            Some(at) => Err(format!("byte {at} differs from the moved one")),
            None => Ok(()),
        },
        Right::Reduced(_, range) => {
            let inputs: Vec<Vec<u8>> =
                call.ranks.iter().map(|member| call.input(*member, part)).collect();
            let inputs: Vec<&[u8]> = inputs.iter().map(|input| &input[range.clone()]).collect();
            let request = call.common();
            let reduction = Reduction {
                dtype: request.dtype_of(part),
                op: request.reduce_op,
                prescale: request.prescale,
                postscale: request.postscale,
                exact: call.values == Values::Exact,
                between: quantizes(request.collective, between),
            };
            reduction.check(&inputs, &got.bytes)
        }
    }
}

/// Only allreduces are quantized between nodes.
fn quantizes(collective: Collective, between: Between) -> Between {
    let is_plain = between.compression.is_quantized() && collective != Collective::Allreduce;
    Between {
        compression: if is_plain { Compression::None } else { between.compression },
        ..between
    }
}
