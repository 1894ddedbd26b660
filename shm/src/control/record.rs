//! Encodes a submission as words, and decodes it. Decoding checks everything that the worker wrote
//! (TRUST).

use std::sync::Arc;

use gradwire_proto::{
    Collective, DType, Part, Rank, ReduceOp, Request, Shape, TensorName, WireError,
};

use super::{
    error::RingError,
    submission::{CallSite, MAX_CALL_SITE_BYTES, MAX_CALL_SITES, Origin, Place, Submission},
};
use crate::ring::MAX_RECORD_WORDS;

/// Words between the record's length and its list.
const FIXED: usize = 7;

/// Words of a tensor besides its dimensions.
const TENSOR: usize = 4;

const NAME_WORDS: usize = TensorName::MAX_BYTES.div_ceil(8);

const SITE_WORDS: usize = MAX_CALL_SITE_BYTES.div_ceil(8);

// `Request::validate` counts 5 words for each further tensor besides its dimensions. So every
// request that it accepts fits, even with the longest name and the longest
// call site.
const _: () = assert!(
    1 + FIXED + TENSOR + Shape::MAX_DIMS + Request::MAX_EXTRA_WORDS + NAME_WORDS + SITE_WORDS
        <= MAX_RECORD_WORDS
        && TensorName::MAX_BYTES <= u16::MAX as usize
        && MAX_CALL_SITE_BYTES <= u16::MAX as usize
        && TENSOR <= 5
);

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn unpair(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

fn halves(low: usize, high: usize) -> u32 {
    low as u32 & 0xffff | (high as u32) << 16
}

fn text(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks(8).map(|bytes| {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(padded)
    })
}

/// The record of a submission, without its length. There must be a place for each tensor.
pub(super) fn encode(submission: &Submission) -> Vec<u64> {
    let Submission {
        ticket,
        process_set,
        name,
        request,
        priority,
        inputs,
        outputs,
        origin,
        copied,
        site,
    } = submission;
    let (name, site_text) = (name.as_str().as_bytes(), site.text.as_bytes());
    let kinds =
        [request.collective as u8, request.reduce_op as u8, *origin as u8, u8::from(*copied)];
    let mut record = Vec::with_capacity(64);
    record.extend([
        *ticket,
        pair(*process_set, priority.cast_unsigned()),
        pair(u32::from_le_bytes(kinds), request.root.0),
        request.prescale.to_bits(),
        request.postscale.to_bits(),
        pair(halves(name.len(), site_text.len()), request.list.len() as u32),
        pair(request.parts() as u32, site.number),
    ]);
    record.extend(&request.list);
    for (part, (input, output)) in inputs.iter().zip(outputs).enumerate() {
        let dims = request.shape_of(part).dims();
        record.extend([
            u64::from(u16::from_le_bytes([request.dtype_of(part) as u8, dims.len() as u8])),
            pair(input.segment, output.segment),
            input.offset,
            output.offset,
        ]);
        record.extend(dims);
    }
    record.extend(text(name).chain(text(site_text)));
    record
}

/// Takes words from the front of the rest of a record.
fn take<'r>(rest: &mut &'r [u64], words: usize) -> Option<&'r [u64]> {
    let (taken, left) = rest.split_at_checked(words)?;
    *rest = left;
    Some(taken)
}

/// Checks a record that was copied out of shared memory.
pub(super) fn decode(record: &[u64]) -> Result<Submission, RingError> {
    let words = record.len() as u64 + 1;
    let Some((&fixed, mut rest)) = record.split_first_chunk::<FIXED>() else {
        return Err(RingError::Size { words, tensors: 0, list: 0, name: 0 });
    };
    let [ticket, set, kinds, prescale, postscale, sizes, tensors] = fixed;
    let (process_set, priority) = unpair(set);
    let (kinds, root) = unpair(kinds);
    let [collective, reduce_op, origin, copied] = kinds.to_le_bytes();
    let (texts, list) = unpair(sizes);
    let (name, site_bytes) = (texts & 0xffff, (texts >> 16) as usize);
    let (tensors, site) = unpair(tensors);
    let size = || RingError::Size { words, tensors, list, name };
    let bad = |source: WireError| RingError::Request { ticket, source };
    let unknown = |field, number: u8| bad(WireError::Unknown { field, number: i32::from(number) });

    let list = take(&mut rest, list as usize).ok_or_else(size)?.to_vec();
    // Each tensor takes words of the record, so the reserved room is bounded by it (BOUND).
    let room = (tensors as usize).min(rest.len() / TENSOR);
    let mut parts = Vec::with_capacity(room);
    let (mut inputs, mut outputs) = (Vec::with_capacity(room), Vec::with_capacity(room));
    for _ in 0..tensors {
        let &[kind, segments, input, output] = take(&mut rest, TENSOR).ok_or_else(size)? else {
            return Err(size());
        };
        let [dtype, dims, ..] = kind.to_le_bytes();
        let dims = take(&mut rest, usize::from(dims)).ok_or_else(size)?;
        parts.push(Part {
            dtype: DType::from_wire(dtype.into()).ok_or_else(|| unknown(DType::WHAT, dtype))?,
            shape: Shape::new(dims).map_err(|e| bad(e.into()))?,
        });
        let (input_segment, output_segment) = unpair(segments);
        inputs.push(Place { segment: input_segment, offset: input });
        outputs.push(Place { segment: output_segment, offset: output });
    }
    let name_words = take(&mut rest, name.div_ceil(8) as usize).ok_or_else(size)?;
    if parts.is_empty() || rest.len() != site_bytes.div_ceil(8) {
        return Err(size());
    }
    if site >= MAX_CALL_SITES || site_bytes > MAX_CALL_SITE_BYTES {
        return Err(RingError::CallSite { ticket, number: site, bytes: site_bytes });
    }
    let Part { dtype, shape } = parts.remove(0);
    let request = Request {
        collective: Collective::from_wire(collective.into())
            .ok_or_else(|| unknown(Collective::WHAT, collective))?,
        dtype,
        shape,
        reduce_op: ReduceOp::from_wire(reduce_op.into())
            .ok_or_else(|| unknown(ReduceOp::WHAT, reduce_op))?,
        root: Rank(root),
        prescale: f64::from_bits(prescale),
        postscale: f64::from_bits(postscale),
        list,
        more: parts,
    };
    request.validate().map_err(bad)?;

    let name_bytes = bytes(name_words, name as usize);
    let text = str::from_utf8(&name_bytes)
        .map_err(|e| RingError::Name { ticket, valid: e.valid_up_to() })?;
    // People read it, so what is not text is replaced.
    let site_text = match site_bytes {
        0 => Arc::default(),
        count => String::from_utf8_lossy(&bytes(rest, count)).into(),
    };
    Ok(Submission {
        ticket,
        process_set,
        name: TensorName::new(text).map_err(|e| bad(e.into()))?,
        request,
        priority: priority.cast_signed(),
        inputs,
        outputs,
        origin: Origin::from_number(origin).ok_or_else(|| unknown("origin", origin))?,
        copied: match copied {
            0 | 1 => copied == 1,
            other => return Err(unknown("copied", other)),
        },
        site: CallSite { number: site, text: site_text },
    })
}

/// The first bytes of words that hold at least as many.
fn bytes(words: &[u64], count: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.truncate(count);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(submission: &Submission) -> usize {
        let record = encode(submission);
        assert!(record.len() < MAX_RECORD_WORDS);
        assert_eq!(decode(&record).as_ref(), Ok(submission));
        // A shorter or longer record is refused.
        assert!(decode(&record[..record.len() - 1]).is_err());
        let longer: Vec<u64> = record.iter().copied().chain([0]).collect();
        assert!(decode(&longer).is_err());
        record.len()
    }

    fn submission(name: &str, request: Request) -> Submission {
        let place = |part: usize| Place { segment: u32::MAX, offset: u64::MAX - part as u64 };
        Submission {
            ticket: u64::MAX,
            process_set: 7,
            name: TensorName::new(name).unwrap(),
            priority: i32::MIN,
            inputs: (0..request.parts()).map(place).collect(),
            outputs: (0..request.parts())
                .map(|part| Place { segment: part as u32, offset: 64 })
                .collect(),
            origin: Origin::Adasum,
            copied: true,
            site: CallSite::default(),
            request,
        }
    }

    #[test]
    fn the_largest_and_the_smallest_survive() {
        let dims = Shape::new(&[1; Shape::MAX_DIMS]).unwrap();
        let longest = "x".repeat(TensorName::MAX_BYTES);
        let request = Request::broadcast(DType::F64, dims.clone(), Rank(u32::MAX));
        let words = round_trip(&submission(&longest, request));
        assert_eq!(words, FIXED + TENSOR + Shape::MAX_DIMS + NAME_WORDS);
        let words = round_trip(&submission("b", Request::barrier()));
        assert_eq!(words, FIXED + TENSOR + 1 + 1);

        // As many as `validate` accepts, in tensors and in a list.
        let mut group = Request::allreduce(DType::F64, dims.clone(), ReduceOp::Sum);
        let most = Request::MAX_EXTRA_WORDS / (5 + Shape::MAX_DIMS);
        group.more = vec![Part { dtype: DType::Bool, shape: dims.clone() }; most];
        round_trip(&submission(&longest, group.clone()));
        group.more.push(Part { dtype: DType::F32, shape: dims.clone() });
        assert!(group.validate().is_err());
        let mut split = Request::plain(Collective::Alltoall, DType::C128, dims);
        split.list = (0..Request::MAX_LIST as u64).collect();
        round_trip(&submission(&longest, split));
    }

    #[test]
    fn call_sites_survive_and_are_limited() {
        let with = |number, text: &str| {
            let site = CallSite { number, text: text.into() };
            Submission { site, ..submission("w", Request::barrier()) }
        };
        let plain = round_trip(&with(7, ""));
        assert_eq!(round_trip(&with(7, "naïve.py:1")), plain + 2);
        round_trip(&with(MAX_CALL_SITES - 1, &"x".repeat(MAX_CALL_SITE_BYTES)));
        // TRUST
        for (number, bytes) in [(MAX_CALL_SITES, 1), (0, MAX_CALL_SITE_BYTES + 1)] {
            let record = encode(&with(number, &"x".repeat(bytes)));
            assert!(matches!(decode(&record), Err(RingError::CallSite { .. })), "{number}");
        }
    }

    #[test]
    fn every_kind_survives() {
        let shape = Shape::new(&[3, 0]).unwrap();
        let mut survived = 0;
        for &collective in Collective::ALL {
            for &dtype in DType::ALL {
                for &op in ReduceOp::ALL {
                    let mut request =
                        Request { collective, ..Request::allreduce(dtype, shape.clone(), op) };
                    let lists = [
                        Collective::SendReceive,
                        Collective::AddProcessSet,
                        Collective::RemoveProcessSet,
                    ];
                    if lists.contains(&collective) {
                        request.list = vec![3];
                    }
                    // Both ends refuse what cannot be reduced.
                    if request.validate().is_ok() {
                        round_trip(&submission("naïve.weight", request));
                        survived += 1;
                    } else {
                        let record = encode(&submission("naïve.weight", request));
                        assert!(matches!(decode(&record), Err(RingError::Request { .. })));
                    }
                }
            }
        }
        assert!(survived > 1000, "{survived}");
    }

    /// TRUST: a flag has two values.
    #[test]
    fn a_flag_with_another_value_is_refused() {
        let mut record = encode(&submission("x", Request::barrier()));
        record[2] += 1 << 24;
        let error = decode(&record).unwrap_err();
        assert!(error.to_string().contains("copied"), "{error}");
    }

    #[test]
    fn every_origin_survives() {
        for &origin in Origin::ALL {
            let request = Request::barrier();
            round_trip(&Submission { origin, copied: false, ..submission("o", request) });
        }
        assert_eq!(Origin::from_number(Origin::ALL.len() as u8), None);
    }
}
