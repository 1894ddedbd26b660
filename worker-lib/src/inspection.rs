//! NaN and infinite values in what this rank contributes (`checks.finite`).
//!
//! A sum spreads the NaN of one rank to all, and afterwards nobody can tell where it came from. So
//! each rank looks at its own contribution, right before the daemon gets it. This reads the tensor
//! once more.

use gradwire_keys::CheckFinite;
use gradwire_proto::{Collective, Request};

use crate::{
    finite::{self, Found},
    memory::Memory,
};

/// The contribution of this rank to an operation, which is to be looked at.
#[derive(Debug)]
pub(crate) struct Inspection {
    /// Whether the job ends if something is found.
    pub(crate) fails: bool,
    rank: u32,
    inputs: Vec<Memory>,
}

impl Inspection {
    /// The inspection of an operation; `None` if there is nothing to look at: the check is off, or
    /// the tensor of the collective may be only a place for the result.
    pub(crate) fn of(
        when: CheckFinite,
        rank: u32,
        request: &Request,
        inputs: &[&Memory],
    ) -> Option<Self> {
        let contributes = matches!(
            request.collective,
            Collective::Allreduce
                | Collective::Reduce
                | Collective::ReduceScatter
                | Collective::Allgather
                | Collective::Gather
                | Collective::Alltoall
        );
        if when == CheckFinite::Off || !contributes {
            return None;
        }
        let has_nan = |memory: &&&Memory| finite::has_nan(memory.dtype());
        let inputs: Vec<Memory> =
            inputs.iter().filter(has_nan).map(|&memory| memory.clone()).collect();
        (!inputs.is_empty()).then_some(Self { fails: when == CheckFinite::Fail, rank, inputs })
    }

    /// What is wrong with the contribution to the operation of this name; `None` if nothing is.
    pub(crate) fn problem(&self, name: &str) -> Option<String> {
        let found = self.inputs.iter().find_map(|memory| Some((memory, memory.not_finite()?)));
        let (memory, Found { count, first, is_nan }) = found?;
        let value = if is_nan { "NaN" } else { "an infinite value" };
        let rest = if count == 1 { String::new() } else { format!(", and {} more", count - 1) };
        Some(format!(
            "rank {} contributes {value} to '{name}' at element {first} of {}{rest}",
            self.rank,
            memory.shape().elements()
        ))
    }
}
