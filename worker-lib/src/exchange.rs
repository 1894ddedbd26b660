//! The exchange of numbers on which ranks must agree before the parts of an operation, and the
//! common failure if they disagree.

use gradwire_proto::{DType, Failure, FailureKind};

use crate::{
    error::Result,
    options::{AllgatherOptions, Common},
    session::Session,
};

/// The most ranks that a text lists.
const LISTED: usize = 64;

impl Session {
    /// The numbers of every rank that takes part, in rank order.
    pub(crate) fn exchange<const N: usize>(
        &self,
        common: Common,
        own: [u64; N],
    ) -> Result<Vec<[u64; N]>> {
        let own = self.tensor(&own, &[1, N])?;
        let all = self.allgather(&own, AllgatherOptions { common, op: None })?.tensor;
        Ok(all.as_slice().as_chunks().0.to_vec())
    }
}

/// The name of an element type that a rank has reported.
pub(crate) fn dtype_name(number: u64) -> &'static str {
    i32::try_from(number).ok().and_then(DType::from_wire).map_or("?", DType::name)
}

/// The failure of ranks that disagree, the same on all ranks, with a line for each.
pub(crate) fn disagreement(what: &str, lines: impl ExactSizeIterator<Item = String>) -> Failure {
    let more = lines.len().saturating_sub(LISTED);
    let mut table: Vec<String> = lines.take(LISTED).collect();
    if more > 0 {
        table.push(format!("and {more} more"));
    }
    let what = format!("ranks disagree on {what}\n{}", table.join("\n"));
    Failure::new(FailureKind::Disagreement, what)
        .hint("call it with the same shape, element type and operation on every rank")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_beyond_the_limit_are_only_counted() {
        let lines = |ranks: usize| (0..ranks).map(|rank| format!("rank {rank}: x"));
        let few = disagreement("a sum", lines(64));
        assert_eq!((few.what.as_str(), few.details.lines.len()), ("ranks disagree on a sum", 64));
        let many = disagreement("a sum", lines(67)).details.lines;
        assert_eq!(many[63..], ["rank 63: x", "and 3 more"]);
    }
}
