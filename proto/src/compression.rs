//! As what elements travel between nodes: the one rule, which the coordinator prices by and every
//! daemon sends and receives by.
//!
//! Sums and products are computed in f32 where the elements are f16, bf16 or 8-bit floats, and
//! rounded once, at the end. On several nodes that takes partial results in f32: rounded on the
//! way, they would be too large where the average is not, and depend on which ranks share a node.
//!
//! A job may ask for partial results in bf16, of f32, too: half the bytes, rounded at every hop.
//! What is moved (broadcasts, gathers, messages) arrives bit for bit. Which compression a job has
//! is the coordinator's to say, once, with the world: so two nodes can't differ.

use crate::{
    request::Request,
    types::{Collective, Compression, DType, ReduceOp},
};

impl Compression {
    /// The type as which elements of a request travel between nodes.
    pub fn between_nodes(self, request: &Request) -> DType {
        let Request { collective, dtype, reduce_op: op, prescale, postscale, .. } = *request;
        let reduces = matches!(
            collective,
            Collective::Allreduce | Collective::Reduce | Collective::ReduceScatter
        );
        let computes = match op {
            ReduceOp::Sum | ReduceOp::Average | ReduceOp::Product => true,
            // One of the inputs, or what a factor made of it: it is rounded once, wherever that is.
            // With a second factor it would be rounded twice.
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
    fn only_what_is_computed_travels_as_something_else() {
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
    fn names_are_found_and_0_on_the_wire_is_none() {
        for &compression in Compression::ALL {
            assert_eq!(compression.name().parse(), Ok(compression));
            assert_eq!(Compression::from_wire(compression.to_wire()), Some(compression));
        }
        assert!("fp16".parse::<Compression>().is_err());
        assert_eq!(Compression::from_wire(2), None);
        assert_eq!(Compression::None.to_wire(), 0);
    }
}
