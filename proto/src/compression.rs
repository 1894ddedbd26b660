//! As what elements travel between nodes: the one rule, which the coordinator prices by and every
//! daemon sends and receives by.
//!
//! Only sums and the like are shortened, because only there does each rank expect a rounded result.
//! What is moved (broadcasts, gathers, messages) arrives bit for bit, and so does everything that is no
//! f32. Which compression a job has is the coordinator's to say, once, with the world: so two nodes can't
//! differ.

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
        match self {
            Self::Bf16 if reduces && dtype == DType::F32 && op.refuses(dtype).is_none() => {
                DType::Bf16
            }
            Self::Bf16 | Self::None => dtype,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reductions_of_f32_are_shortened() {
        for &collective in Collective::ALL {
            for &dtype in DType::ALL {
                for &op in ReduceOp::ALL {
                    let plain = Compression::None.between_nodes(collective, dtype, op);
                    assert_eq!(plain, dtype);
                    let short = Compression::Bf16.between_nodes(collective, dtype, op);
                    let name = collective.name();
                    let reduces = ["allreduce", "reduce", "reducescatter"].contains(&name);
                    let shortens = reduces && dtype == DType::F32 && !op.name().starts_with("bit");
                    assert_eq!(short, if shortens { DType::Bf16 } else { dtype }, "{name} {op}");
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
