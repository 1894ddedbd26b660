//! The wire type of elements between nodes. The coordinator's cost model and all daemons use the
//! same rule.
//!
//! For f16, bf16 and 8-bit floats, sums and products are computed in f32 and rounded once, at the
//! end. So partial results travel between nodes in f32. Rounding on the way could overflow although
//! the average does not, and the result would depend on which ranks share a node.
//!
//! A job may use bf16 for partial results, also of f32: they have half the bytes, and are rounded
//! at every hop. Or it may use eight bits, in groups of 256 elements that share a scale, for
//! allreduces of large f32 tensors. Data that is only moved (broadcasts, gathers, messages) arrives
//! bit for bit. The coordinator announces the compression of a job with the world, so nodes can't
//! differ.

use crate::{
    request::Request,
    types::{Collective, Compression, DType, ReduceOp},
};

/// The number of elements of a group with one scale.
pub const GROUP: usize = 256;

/// The bytes of a group: its scale and a byte for each element.
pub const GROUP_BYTES: usize = size_of::<f32>() + GROUP;

/// The smallest tensor that is quantized, in bytes.
pub const QUANTIZED_MIN_BYTES: u64 = 64 << 10;

impl Compression {
    /// Whether a tensor of `bytes` bytes travels in groups of eight bits: allreduces of f32 that
    /// are sums or averages.
    pub fn quantizes(self, collective: Collective, dtype: DType, op: ReduceOp, bytes: u64) -> bool {
        self.is_quantized()
            && collective == Collective::Allreduce
            && dtype == DType::F32
            && matches!(op, ReduceOp::Sum | ReduceOp::Average)
            && bytes >= QUANTIZED_MIN_BYTES
    }

    /// Whether it uses groups of eight bits.
    pub const fn is_quantized(self) -> bool {
        matches!(self, Self::Int8 | Self::Fp8)
    }

    /// The bytes of `elements` elements of a request between nodes, in groups of eight bits if
    /// `quantized`.
    pub fn wire_bytes(self, request: &Request, elements: u64, quantized: bool) -> u64 {
        if quantized {
            return elements.div_ceil(GROUP as u64) * GROUP_BYTES as u64;
        }
        elements * self.between_nodes(request).size() as u64
    }

    /// The wire type of a request's elements between nodes, if they are not quantized.
    pub fn between_nodes(self, request: &Request) -> DType {
        let Request { collective, dtype, reduce_op: op, prescale, postscale, .. } = *request;
        let reduces = collective.reduces();
        let computes = match op {
            ReduceOp::Sum | ReduceOp::Average | ReduceOp::Product => true,
            // The result is one of the inputs, perhaps with a factor, and rounded once. With a
            // second factor it would be rounded twice.
            ReduceOp::Min | ReduceOp::Max => prescale != 1.0 && postscale != 1.0,
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => false,
        };
        match (self, dtype) {
            (Self::Bf16, DType::F32) if reduces && op.refuses(dtype).is_none() => DType::Bf16,
            (_, DType::F16 | DType::Bf16 | DType::F8E4m3 | DType::F8E5m2)
                if reduces && computes =>
            {
                if self == Self::Bf16 {
                    DType::Bf16
                } else {
                    DType::F32
                }
            }
            _ => dtype,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shape;

    fn check(request: Request) {
        use DType::{Bf16, F8E4m3, F8E5m2, F16, F32};
        let Request { collective, dtype, reduce_op: op, .. } = request;
        let reduces = ["allreduce", "reduce", "reducescatter"].contains(&collective.name());
        let sums = ["sum", "average", "product"].contains(&op.name());
        let scaled_twice = request.prescale != 1.0 && request.postscale != 1.0;
        let computed = sums || scaled_twice && ["min", "max"].contains(&op.name());
        let short = [F16, Bf16, F8E4m3, F8E5m2].contains(&dtype) && computed;
        let whole = dtype == F32 && !op.name().starts_with("bit");
        let plain = Compression::None.between_nodes(&request);
        assert_eq!(plain, if reduces && short { F32 } else { dtype }, "{request:?}");
        let halved = Compression::Bf16.between_nodes(&request);
        let is_halved = reduces && (short || whole);
        assert_eq!(halved, if is_halved { Bf16 } else { dtype }, "{request:?}");
    }

    #[test]
    fn only_computed_values_change_their_type() {
        let factors = [(1.0, 1.0), (0.5, 1.0), (1.0, 3.0), (0.5, 3.0)];
        for &collective in Collective::ALL {
            for &dtype in DType::ALL {
                for &op in ReduceOp::ALL {
                    for (prescale, postscale) in factors {
                        let plain = Request::plain(collective, dtype, Shape::default());
                        check(Request { reduce_op: op, prescale, postscale, ..plain });
                    }
                }
            }
        }
    }

    #[test]
    fn only_large_sums_of_f32_are_quantized() {
        use Collective::{Allreduce, Reduce};
        use DType::{Bf16, F32, F64};
        use ReduceOp::{Average, Max, Product, Sum};
        const LEAST: u64 = QUANTIZED_MIN_BYTES;
        for &compression in Compression::ALL {
            let expected = ["int8", "fp8"].contains(&compression.name());
            assert_eq!(compression.quantizes(Allreduce, F32, Sum, LEAST), expected);
            assert_eq!(compression.quantizes(Allreduce, F32, Average, LEAST), expected);
            assert!(!compression.quantizes(Allreduce, F32, Sum, LEAST - 4));
            assert!(!compression.quantizes(Allreduce, F32, Max, LEAST));
            assert!(!compression.quantizes(Allreduce, F32, Product, LEAST));
            assert!(!compression.quantizes(Allreduce, F64, Sum, LEAST));
            assert!(!compression.quantizes(Allreduce, Bf16, Sum, LEAST));
            assert!(!compression.quantizes(Reduce, F32, Sum, LEAST));
        }
    }

    #[test]
    fn names_are_found_and_0_on_the_wire_is_none() {
        for &compression in Compression::ALL {
            assert_eq!(compression.name().parse(), Ok(compression));
            assert_eq!(Compression::from_wire(compression.to_wire()), Some(compression));
        }
        assert!("fp16".parse::<Compression>().is_err());
        assert_eq!(Compression::from_wire(4), None);
        assert_eq!(Compression::None.to_wire(), 0);
    }
}
