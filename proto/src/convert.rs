//! Conversions from wire to domain types: the only place where wire values are checked (TRUST).
//!
//! Conversions to the wire can't fail and are `From`; conversions from the wire are `TryFrom` with
//! a [`WireError`] that names the field.

use crate::{
    agreed::Agreed,
    pb,
    request::{Part, Request},
    types::{Collective, DType, Rank, ReduceOp, Shape, TensorId, TensorName, TypeError},
};

/// Why a message was refused: the field and the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the names of the fields say what they are")]
pub enum WireError {
    /// A required field is missing.
    #[error("the message has no {0}")]
    Missing(&'static str),
    /// The number of an enum is unknown.
    #[error("{field} has the unknown number {number}")]
    Unknown { field: &'static str, number: i32 },
    /// The value of a field is invalid.
    #[error("{field}: {reason}")]
    Invalid { field: &'static str, reason: String },
    /// A value does not fit its domain type.
    #[error(transparent)]
    Type(#[from] TypeError),
}

fn invalid(field: &'static str, reason: impl Into<String>) -> WireError {
    WireError::Invalid { field, reason: reason.into() }
}

impl Request {
    /// Checks rules over several fields: what a collective accepts, and what fits the element
    /// types.
    pub fn validate(&self) -> Result<(), WireError> {
        let collective = self.collective;
        let reduces = collective.reduces();
        for dtype in (0..self.parts()).map(|part| self.dtype_of(part)) {
            self.check_scales(dtype)?;
            if let Some(why) = self.reduce_op.refuses(dtype).filter(|_| reduces) {
                let reason = format!("{} of {dtype} is not possible: {why}", self.reduce_op);
                return Err(invalid("reduce_op", reason));
            }
        }
        if !reduces && (self.prescale != 1.0 || self.postscale != 1.0) {
            return Err(invalid("prescale", format!("{collective} takes no scale factors")));
        }
        let groups = matches!(
            collective,
            Collective::Allreduce | Collective::Allgather | Collective::ReduceScatter
        );
        if !groups && !self.more.is_empty() {
            return Err(invalid("more", format!("{collective} has no grouped form")));
        }
        if self.parts() > Self::MAX_PARTS {
            let reason = format!(
                "a group of {} tensors exceeds the limit of {}: use several groups",
                self.parts(),
                Self::MAX_PARTS
            );
            return Err(invalid("more", reason));
        }
        let bytes =
            (0..self.parts()).try_fold(0u64, |all, part| all.checked_add(self.bytes_of(part)));
        if bytes.is_none_or(|bytes| bytes > Self::MAX_BYTES) {
            let reason = format!("the tensors have more than {} bytes", Self::MAX_BYTES);
            return Err(invalid("more", reason));
        }
        let more: usize = self.more.iter().map(|part| 5 + part.shape.dims().len()).sum();
        if self.list.len() > Self::MAX_LIST || self.list.len() + more > Self::MAX_EXTRA_WORDS {
            let reason = format!(
                "{} entries and {} further tensors are too many for one request",
                self.list.len(),
                self.more.len()
            );
            return Err(invalid("list", reason));
        }
        let has_list = match collective {
            Collective::Alltoall | Collective::Scatter => true,
            Collective::SendReceive => self.list.len() == 1,
            Collective::RemoveProcessSet => matches!(self.list[..], [_] | [_, Self::GIVE_UP]),
            Collective::AddProcessSet => {
                !self.list.is_empty() && self.list.is_sorted_by(|a, b| a < b)
            }
            Collective::Allreduce => self.list.len() <= 1,
            _ => self.list.is_empty(),
        };
        let ranks = matches!(
            collective,
            Collective::SendReceive | Collective::AddProcessSet | Collective::RemoveProcessSet
        );
        if !has_list || (ranks && self.list.iter().any(|&rank| rank > u64::from(u32::MAX))) {
            return Err(invalid("list", format!("invalid for {collective}: {:?}", self.list)));
        }
        let has_rows = |part| !self.shape_of(part).dims().is_empty();
        let split = self.has_free_rows() || collective == Collective::ReduceScatter;
        let sent = collective == Collective::SendReceive;
        if split && !sent && !(0..self.parts()).all(has_rows) {
            let reason =
                format!("{collective} works along the first dimension, and a 0-d tensor has none");
            return Err(invalid("shape", reason));
        }
        let is_empty = matches!(
            collective,
            Collective::Join | Collective::AddProcessSet | Collective::RemoveProcessSet
        );
        if is_empty && self.bytes() != 0 {
            return Err(invalid("shape", format!("{collective} has no elements: use [0]")));
        }
        Ok(())
    }

    /// Refuses factors that are not finite, and factors for elements that can't be multiplied.
    fn check_scales(&self, dtype: DType) -> Result<(), WireError> {
        for (field, factor) in [("prescale", self.prescale), ("postscale", self.postscale)] {
            if factor == 1.0 {
                continue;
            }
            if !factor.is_finite() {
                return Err(invalid(field, format!("{factor} is not a finite number")));
            }
            if let Some(what) = self.reduce_op.refuses_factors(dtype) {
                let reason = format!("a factor of {factor} can't be applied to {what}; use 1");
                return Err(invalid(field, reason));
            }
        }
        Ok(())
    }
}

impl From<&Request> for pb::Request {
    fn from(request: &Request) -> Self {
        let more = request.more.iter().map(|part| pb::Part {
            dtype: part.dtype.to_wire(),
            shape: part.shape.dims().to_vec(),
        });
        Self {
            collective: request.collective.to_wire(),
            dtype: request.dtype.to_wire(),
            shape: request.shape.dims().to_vec(),
            reduce_op: request.reduce_op.to_wire(),
            root: request.root.0,
            prescale: request.prescale,
            postscale: request.postscale,
            list: request.list.clone(),
            more: more.collect(),
        }
    }
}

fn part(dtype: i32, shape: &[u64]) -> Result<Part, WireError> {
    let unknown = WireError::Unknown { field: DType::WHAT, number: dtype };
    Ok(Part { dtype: DType::from_wire(dtype).ok_or(unknown)?, shape: Shape::new(shape)? })
}

/// The request in a message, without [`Request::validate`]: pieces carry no shape and no list.
fn unchecked(wire: pb::Request) -> Result<Request, WireError> {
    let unknown = |field, number| WireError::Unknown { field, number };
    let Part { dtype, shape } = part(wire.dtype, &wire.shape)?;
    let more = wire.more.iter().map(|more| part(more.dtype, &more.shape));
    Ok(Request {
        collective: Collective::from_wire(wire.collective)
            .ok_or_else(|| unknown(Collective::WHAT, wire.collective))?,
        dtype,
        shape,
        reduce_op: ReduceOp::from_wire(wire.reduce_op)
            .ok_or_else(|| unknown(ReduceOp::WHAT, wire.reduce_op))?,
        root: Rank(wire.root),
        prescale: wire.prescale,
        postscale: wire.postscale,
        list: wire.list,
        more: more.collect::<Result<_, _>>()?,
    })
}

impl TryFrom<pb::Request> for Request {
    type Error = WireError;

    fn try_from(wire: pb::Request) -> Result<Self, WireError> {
        let request = unchecked(wire)?;
        request.validate()?;
        Ok(request)
    }
}

/// The request of a piece, which has only some fields (see [`pb::Operation`]).
pub fn piece(wire: pb::Request) -> Result<Request, WireError> {
    let request = unchecked(wire)?;
    request.check_scales(request.dtype)?;
    Ok(request)
}

impl From<&Agreed> for pb::Agreed {
    fn from(agreed: &Agreed) -> Self {
        Self { request: Some(agreed.request().into()), rows: agreed.rows().to_vec() }
    }
}

/// The caller must check the rows against the members, with [`Agreed::is_of`].
impl TryFrom<pb::Agreed> for Agreed {
    type Error = WireError;

    fn try_from(wire: pb::Agreed) -> Result<Self, WireError> {
        let request = wire.request.ok_or(WireError::Missing("request"))?.try_into()?;
        Ok(Self::from_parts(request, wire.rows))
    }
}

/// How a message refers to a tensor: by id once it has one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorRef {
    /// By the id that a registration gave it.
    Id(TensorId),
    /// By name.
    Name(TensorName),
}

impl From<TensorRef> for pb::TensorRef {
    fn from(tensor: TensorRef) -> Self {
        let tensor = match tensor {
            TensorRef::Id(id) => pb::tensor_ref::Tensor::Id(id.0),
            TensorRef::Name(name) => pb::tensor_ref::Tensor::Name(name.as_str().to_owned()),
        };
        Self { tensor: Some(tensor) }
    }
}

impl TryFrom<Option<pb::TensorRef>> for TensorRef {
    type Error = WireError;

    fn try_from(wire: Option<pb::TensorRef>) -> Result<Self, WireError> {
        match wire.and_then(|w| w.tensor).ok_or(WireError::Missing("tensor"))? {
            pb::tensor_ref::Tensor::Id(id) => Ok(Self::Id(TensorId(id))),
            pb::tensor_ref::Tensor::Name(name) => Ok(Self::Name(TensorName::new(&name)?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Request::allreduce(DType::F32, Shape::new(&[2, 3]).unwrap(), ReduceOp::Average)
    }

    #[test]
    fn a_request_survives_the_wire() {
        let wire = pb::Request::from(&request());
        assert_eq!(Request::try_from(wire).unwrap(), request());
    }

    #[test]
    fn each_bad_field_is_named() {
        let good = pb::Request::from(&request());
        let huge = pb::Part { dtype: DType::F64.to_wire(), shape: vec![1 << 53] };
        let cases = [
            (pb::Request { dtype: 77, ..good.clone() }, "element type has the unknown number 77"),
            (pb::Request { reduce_op: 0, ..good.clone() }, "reduce operation has the unknown"),
            (pb::Request { collective: -3, ..good.clone() }, "collective has the unknown"),
            (
                pb::Request { shape: vec![u64::MAX, 4], ..good.clone() },
                "shape [18446744073709551615, 4]",
            ),
            (pb::Request { prescale: f64::NAN, ..good.clone() }, "prescale: NaN is not a finite"),
            (
                pb::Request { more: vec![huge; 33], ..good.clone() },
                "more: the tensors have more than 288230376151711744 bytes",
            ),
            (
                pb::Request {
                    dtype: DType::I32.to_wire(),
                    prescale: f64::INFINITY,
                    ..good.clone()
                },
                "prescale: inf is not a finite",
            ),
            (
                pb::Request {
                    dtype: DType::Bool.to_wire(),
                    reduce_op: ReduceOp::Max.to_wire(),
                    postscale: 0.5,
                    ..good.clone()
                },
                "postscale: a factor of 0.5 can't be applied to booleans",
            ),
            (
                pb::Request {
                    dtype: DType::I32.to_wire(),
                    reduce_op: ReduceOp::BitOr.to_wire(),
                    postscale: 0.5,
                    ..good
                },
                "postscale: a factor of 0.5 can't be applied to bits",
            ),
        ];
        for (wire, text) in cases {
            let error = Request::try_from(wire).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        let error = TensorRef::try_from(None).unwrap_err();
        assert_eq!(error, WireError::Missing("tensor"));
    }
}
