//! A submission as words, and back: the way back is where the daemon stops trusting (TRUST).

use gradwire_proto::{Collective, DType, Rank, ReduceOp, Request, Shape, TensorName, WireError};

use super::{Place, RingError, Submission};
use crate::ring::MAX_RECORD_WORDS;

/// Words between the record's length and its dimensions.
const FIXED: usize = 9;

// The longest name and the most dimensions fit: no submission is ever too long.
const _: () =
    assert!(1 + FIXED + Shape::MAX_DIMS + TensorName::MAX_BYTES.div_ceil(8) <= MAX_RECORD_WORDS);

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn unpair(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// A record without its length; the part that is used of `record`.
pub(super) fn encode<'r>(
    submission: &Submission,
    record: &'r mut [u64; MAX_RECORD_WORDS],
) -> &'r [u64] {
    let Submission { ticket, process_set, name, request, priority, input, output } = submission;
    let Request { collective, dtype, shape, reduce_op, root, prescale, postscale } = request;
    let (dims, name) = (shape.dims(), name.as_str().as_bytes());
    let kinds = [*collective as u8, *dtype as u8, *reduce_op as u8, dims.len() as u8];
    record[..FIXED].copy_from_slice(&[
        *ticket,
        pair(*process_set, priority.cast_unsigned()),
        pair(u32::from_le_bytes(kinds), root.0),
        prescale.to_bits(),
        postscale.to_bits(),
        input.offset,
        output.offset,
        pair(input.segment, output.segment),
        name.len() as u64,
    ]);
    let end = FIXED + dims.len() + name.len().div_ceil(8);
    record[FIXED..FIXED + dims.len()].copy_from_slice(dims);
    for (word, bytes) in record[FIXED + dims.len()..end].iter_mut().zip(name.chunks(8)) {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(padded);
    }
    &record[..end]
}

/// Checks a record that was copied out of shared memory.
pub(super) fn decode(record: &[u64]) -> Result<Submission, RingError> {
    let size = |dims: usize, name: u64| RingError::Size {
        words: record.len() as u64 + 1,
        dims: dims as u64,
        name,
    };
    let Some((&fixed, rest)) = record.split_first_chunk::<FIXED>() else {
        return Err(size(0, 0));
    };
    let [ticket, set, kinds, prescale, postscale, input, output, segments, name_bytes] = fixed;
    let (process_set, priority) = unpair(set);
    let (kinds, root) = unpair(kinds);
    let (input_segment, output_segment) = unpair(segments);
    let [collective, dtype, reduce_op, dims] = kinds.to_le_bytes();

    let dims = usize::from(dims);
    let name_words = name_bytes.div_ceil(8);
    if dims > rest.len() || name_words != (rest.len() - dims) as u64 {
        return Err(size(dims, name_bytes));
    }
    let (dims, name) = rest.split_at(dims);

    let bad = |source: WireError| RingError::Request { ticket, source };
    let unknown = |field, number: u8| bad(WireError::Unknown { field, number: i32::from(number) });
    let request = Request {
        collective: Collective::from_wire(collective.into())
            .ok_or_else(|| unknown(Collective::WHAT, collective))?,
        dtype: DType::from_wire(dtype.into()).ok_or_else(|| unknown(DType::WHAT, dtype))?,
        shape: Shape::new(dims).map_err(|e| bad(e.into()))?,
        reduce_op: ReduceOp::from_wire(reduce_op.into())
            .ok_or_else(|| unknown(ReduceOp::WHAT, reduce_op))?,
        root: Rank(root),
        prescale: f64::from_bits(prescale),
        postscale: f64::from_bits(postscale),
    };
    request.validate().map_err(bad)?;

    let mut text: Vec<u8> = name.iter().flat_map(|word| word.to_le_bytes()).collect();
    text.truncate(name_bytes as usize); // at most as many as the words hold, checked above
    let text =
        str::from_utf8(&text).map_err(|e| RingError::Name { ticket, valid: e.valid_up_to() })?;
    Ok(Submission {
        ticket,
        process_set,
        name: TensorName::new(text).map_err(|e| bad(e.into()))?,
        request,
        priority: priority.cast_signed(),
        input: Place { segment: input_segment, offset: input },
        output: Place { segment: output_segment, offset: output },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(submission: &Submission) -> usize {
        let mut words = [0; MAX_RECORD_WORDS];
        let record = encode(submission, &mut words);
        assert_eq!(decode(record).as_ref(), Ok(submission));
        // Nothing shorter or longer is taken for it.
        assert!(decode(&record[..record.len() - 1]).is_err());
        let longer: Vec<u64> = record.iter().copied().chain([0]).collect();
        assert!(decode(&longer).is_err());
        record.len()
    }

    fn submission(name: &str, request: Request) -> Submission {
        let (input, output) =
            (Place { segment: u32::MAX, offset: u64::MAX }, Place { segment: 0, offset: 64 });
        let name = TensorName::new(name).unwrap();
        Submission {
            ticket: u64::MAX,
            process_set: 7,
            name,
            request,
            priority: i32::MIN,
            input,
            output,
        }
    }

    #[test]
    fn the_largest_and_the_smallest_survive() {
        let dims = Shape::new(&[1; Shape::MAX_DIMS]).unwrap();
        let request = Request::broadcast(DType::F64, dims, Rank(u32::MAX));
        let longest = "x".repeat(TensorName::MAX_BYTES);
        assert_eq!(round_trip(&submission(&longest, request)), FIXED + 32 + 128);
        assert_eq!(round_trip(&submission("b", Request::barrier())), FIXED + 1 + 1);
    }

    #[test]
    fn every_kind_survives() {
        for &collective in Collective::ALL {
            for &dtype in DType::ALL {
                for &op in ReduceOp::ALL {
                    let shape = Shape::new(&[3, 0]).unwrap();
                    let request = Request { collective, ..Request::allreduce(dtype, shape, op) };
                    round_trip(&submission("naïve.weight", request));
                }
            }
        }
    }
}
