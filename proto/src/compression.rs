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

use crate::types::{Collective, Compression, DType, ReduceOp};

impl Compression {
    /// The compression of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|compression| compression.name() == name)
    }

    /// The type as which elements of `dtype` travel between nodes in a collective.
    pub fn between_nodes(self, collective: Collective, dtype: DType, op: ReduceOp) -> DType {
        let reduces = matches!(
            collective,
            Collective::Allreduce | Collective::Reduce | Collective::ReduceScatter
        );
        // A minimum or maximum is one of the inputs: it needs no wider type.
        let computes = matches!(op, ReduceOp::Sum | ReduceOp::Average | ReduceOp::Product);
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

    #[test]
    fn only_what_is_computed_travels_as_something_else() {
        use DType::{Bf16, F8E4m3, F8E5m2, F16, F32};
        for &collective in Collective::ALL {
            for &dtype in DType::ALL {
                for &op in ReduceOp::ALL {
                    let name = collective.name();
                    let reduces = ["allreduce", "reduce", "reducescatter"].contains(&name);
                    let sums = ["sum", "average", "product"].contains(&op.name());
                    let short = [F16, Bf16, F8E4m3, F8E5m2].contains(&dtype) && sums;
                    let whole = dtype == F32 && !op.name().starts_with("bit");
                    let plain = Compression::None.between_nodes(collective, dtype, op);
                    assert_eq!(plain, if reduces && short { F32 } else { dtype }, "{name} {op}");
                    let halved = Compression::Bf16.between_nodes(collective, dtype, op);
                    let is_halved = reduces && (short || whole);
                    assert_eq!(halved, if is_halved { Bf16 } else { dtype }, "{name} {op}");
                }
            }
        }
    }

    #[test]
    fn names_are_found_and_0_on_the_wire_is_none() {
        for &compression in Compression::ALL {
            assert_eq!(Compression::named(compression.name()), Some(compression));
            assert_eq!(Compression::from_wire(compression.to_wire()), Some(compression));
        }
        assert_eq!((Compression::named("fp16"), Compression::from_wire(2)), (None, None));
        assert_eq!(Compression::None.to_wire(), 0);
    }
}
