//! From wire to domain types: the only place where wire values are checked (TRUST).
//!
//! Conversions to the wire can't fail and are `From`; conversions from it are `TryFrom` with a
//! [`WireError`] that names the field.

use crate::{
    pb,
    request::Request,
    types::{Collective, DType, Rank, ReduceOp, Shape, TensorId, TensorName, TypeError},
};

/// Why a message was refused: the field, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A field that must be there is not.
    #[error("the message has no {0}")]
    Missing(&'static str),
    /// An enum's number has no meaning here.
    #[error("{field} has the unknown number {number}")]
    Unknown {
        /// The field.
        field: &'static str,
        /// The number that was received.
        number: i32,
    },
    /// A value is outside of what the field may hold.
    #[error("{field}: {reason}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// Why it is refused.
        reason: String,
    },
    /// A value is not one of our types.
    #[error(transparent)]
    Type(#[from] TypeError),
}

/// What is asked of integers and can't be given.
fn check_scale(field: &'static str, dtype: DType, factor: f64) -> Result<(), WireError> {
    if factor == 1.0 || (dtype.is_float() && factor.is_finite()) {
        return Ok(());
    }
    let reason = if dtype.is_float() {
        format!("{factor} is not a finite number")
    } else {
        format!("a factor of {factor} can't be applied to {dtype}; use 1 or a float tensor")
    };
    Err(WireError::Invalid { field, reason })
}

impl Request {
    /// Checks what no single field shows: scale factors fit the element type, a barrier and a
    /// broadcast carry none.
    ///
    /// # Errors
    /// [`WireError::Invalid`] with the field and the reason.
    pub fn validate(&self) -> Result<(), WireError> {
        check_scale("prescale", self.dtype, self.prescale)?;
        check_scale("postscale", self.dtype, self.postscale)?;
        if self.collective != Collective::Allreduce
            && (self.prescale != 1.0 || self.postscale != 1.0)
        {
            let reason = format!("a {} takes no scale factors", self.collective);
            return Err(WireError::Invalid { field: "prescale", reason });
        }
        Ok(())
    }
}

impl From<&Request> for pb::Request {
    fn from(request: &Request) -> Self {
        Self {
            collective: request.collective.to_wire(),
            dtype: request.dtype.to_wire(),
            shape: request.shape.dims().to_vec(),
            reduce_op: request.reduce_op.to_wire(),
            root: request.root.0,
            prescale: request.prescale,
            postscale: request.postscale,
        }
    }
}

impl TryFrom<pb::Request> for Request {
    type Error = WireError;

    fn try_from(wire: pb::Request) -> Result<Self, WireError> {
        let unknown = |field, number| WireError::Unknown { field, number };
        let request = Self {
            collective: Collective::from_wire(wire.collective)
                .ok_or_else(|| unknown(Collective::WHAT, wire.collective))?,
            dtype: DType::from_wire(wire.dtype).ok_or_else(|| unknown(DType::WHAT, wire.dtype))?,
            shape: Shape::new(&wire.shape)?,
            reduce_op: ReduceOp::from_wire(wire.reduce_op)
                .ok_or_else(|| unknown(ReduceOp::WHAT, wire.reduce_op))?,
            root: Rank(wire.root),
            prescale: wire.prescale,
            postscale: wire.postscale,
        };
        request.validate()?;
        Ok(request)
    }
}

/// A tensor as a message names it: by id once it has one.
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
                pb::Request { dtype: DType::I32.to_wire(), postscale: 0.5, ..good },
                "postscale: a factor of 0.5 can't be applied to i32",
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
