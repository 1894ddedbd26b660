//! Allreduce of a tensor of which each rank has some rows, such as the gradient of an embedding.
//!
//! Each rank adds up its rows with the same index, and all ranks exchange their numbers of rows.
//! Then an allgather moves the indices and values, and every rank adds them up in rank order
//! (SAME). If the dense tensor is smaller, an allreduce of it is used instead. All ranks see the
//! same numbers, so all make the same choice (SparCML, Renggli et al., SC 2019).
//!
//! TELL: if one rank gives invalid input, all ranks fail with the reason.

mod coalesce;

use gradwire_proto::{Failure, FailureKind, Rank, ReduceOp};
use gradwire_shm::control::Origin;

use crate::{
    element::Element,
    error::{GradwireError, Result},
    exchange::{disagreement, dtype_name},
    handle::Handle,
    memory::{Buffer, Tensor},
    options::{AllgatherOptions, AllreduceOptions, SparseOptions},
    session::Session,
    sizes,
    task::Parts,
};
pub use coalesce::Number;
use coalesce::{coalesce, dense_is_smaller};

/// Some rows of a tensor of `rows` times `cols` elements; the others are zero.
#[derive(Debug, Clone, PartialEq)]
pub struct SparseRows<T> {
    /// The rows of the whole tensor.
    pub rows: usize,
    /// The elements of a row.
    pub cols: usize,
    /// The index of each row. Rows with the same index are added up.
    pub indices: Vec<usize>,
    /// The rows in the order of the indices, `cols` elements each.
    pub values: Vec<T>,
}

/// The result of a sparse allreduce.
#[derive(Debug, Clone, PartialEq)]
pub struct SparseReduced<T> {
    /// Each row once, ascending: the rows that any rank gave, or all rows if `dense`.
    pub rows: SparseRows<T>,
    /// Whether the dense tensor was moved, because it was smaller.
    pub dense: bool,
}

/// A rank's report before rows are moved, as [`Report::NUMBERS`] numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Report {
    rank: u64,
    /// Rows, columns, element type and operation, which must be the same on all ranks.
    common: [u64; 4],
    /// The number of its rows.
    count: u64,
    /// An index that is out of range, and the number of such indices.
    bad: [u64; 2],
}

impl Report {
    const NUMBERS: usize = 8;

    fn to_numbers(self) -> [u64; Self::NUMBERS] {
        let ([a, b, c, d], [bad, how_many]) = (self.common, self.bad);
        [self.rank, a, b, c, d, self.count, bad, how_many]
    }

    fn from_numbers([rank, a, b, c, d, count, bad, how_many]: [u64; Self::NUMBERS]) -> Self {
        Self { rank, common: [a, b, c, d], count, bad: [bad, how_many] }
    }

    /// The text for what the rank gave.
    fn what(&self) -> String {
        let [rows, cols, dtype, op] = self.common;
        let op = i32::try_from(op).ok().and_then(ReduceOp::from_wire).map_or("?", ReduceOp::name);
        format!("rank {}: {op} of {} [{rows}, {cols}]", self.rank, dtype_name(dtype))
    }
}

/// Checks that the ranks' rows can be reduced. Otherwise all ranks get the same failure.
fn agree(all: &[Report]) -> Result<(), Failure> {
    if let Some(Report { rank, common: [rows, ..], bad: [index, how_many], .. }) =
        all.iter().find(|report| report.bad[1] > 0)
    {
        let what = format!(
            "index {index} of a sparse allreduce is out of range: its tensor has {rows} rows \
             ({how_many} such indices)"
        );
        return Err(Failure::new(FailureKind::Invalid, what).rank(Rank(*rank as u32)));
    }
    if all.windows(2).any(|pair| pair[0].common != pair[1].common) {
        return Err(disagreement("a sparse allreduce", all.iter().map(Report::what)));
    }
    Ok(())
}

impl Session {
    /// Adds up the ranks' rows; every rank gets all rows. If the dense tensor is smaller, it is
    /// moved instead, and the result says so. [`crate::Stats`] counts both cases.
    ///
    /// # Errors
    /// As for [`Session::allreduce`]; also if the number of values does not match the indices. If
    /// an index is out of range, all ranks fail, with the index, the rows and the rank.
    #[track_caller]
    pub fn sparse_allreduce<T: Number>(
        &self,
        rows: &SparseRows<T>,
        options: SparseOptions,
    ) -> Result<SparseReduced<T>> {
        let (parts, op) = self.sparse_parts(rows, options)?;
        self.run_parts(&parts, |session| session.add_rows(&parts, op, rows))
    }

    /// Starts [`Session::sparse_allreduce`] without waiting for it.
    #[track_caller]
    pub fn sparse_allreduce_async<T: Number>(
        &self,
        rows: SparseRows<T>,
        options: SparseOptions,
    ) -> Result<Handle<SparseReduced<T>>> {
        let (parts, op) = self.sparse_parts(&rows, options)?;
        let own = parts.clone();
        self.spawn_parts(parts, move |session| session.add_rows(&own, op, &rows))
    }

    #[track_caller]
    fn sparse_parts<T: Number>(
        &self,
        rows: &SparseRows<T>,
        options: SparseOptions,
    ) -> Result<(Parts, ReduceOp)> {
        let SparseOptions { common, op } = options;
        if !matches!(op, ReduceOp::Sum | ReduceOp::Average) {
            let text = format!("a sparse allreduce is a sum or an average, not {op}");
            return Err(GradwireError::Invalid(text));
        }
        sizes::shape(&[rows.rows, rows.cols])?;
        let (indices, values) = (rows.indices.len(), rows.values.len());
        if indices.checked_mul(rows.cols) != Some(values) {
            let text =
                format!("{indices} rows of {} columns do not match {values} values", rows.cols);
            return Err(GradwireError::Invalid(text));
        }
        Ok((self.parts(common, "sparse-allreduce", Origin::SparseRows)?, op))
    }

    fn add_rows<T: Number>(
        &self,
        parts: &Parts,
        op: ReduceOp,
        given: &SparseRows<T>,
    ) -> Result<SparseReduced<T>> {
        let SparseRows { rows, cols, ref indices, ref values } = *given;
        let mut wrong = indices.iter().copied().filter(|index| *index >= rows);
        let bad = wrong.next().map_or([0, 0], |first| [first as u64, 1 + wrong.count() as u64]);
        let own = if bad[1] == 0 { coalesce(indices, values, cols, 1) } else { Default::default() };
        let report = Report {
            rank: u64::from(self.rank()),
            common: [rows as u64, cols as u64, T::DTYPE as u64, op as u64],
            count: own.0.len() as u64,
            bad,
        };
        let all = self.exchange(parts.counts("counts"), report.to_numbers())?;
        let all: Vec<Report> = all.into_iter().map(Report::from_numbers).collect();
        agree(&all).map_err(|failure| parts.named(failure))?;
        let gathered = all.iter().fold(0u64, |sum, report| sum.saturating_add(report.count));
        let dense = dense_is_smaller(gathered, rows as u64, (cols * size_of::<T>()) as u64);
        self.count_sparse(dense);
        let rows = if dense {
            self.add_dense(parts, op, given, own)?
        } else {
            self.add_sparse(parts, op, given, own, &all)?
        };
        Ok(SparseReduced { rows, dense })
    }

    fn add_dense<T: Number>(
        &self,
        parts: &Parts,
        op: ReduceOp,
        given: &SparseRows<T>,
        (indices, values): (Vec<usize>, Vec<T>),
    ) -> Result<SparseRows<T>> {
        let (rows, cols) = (given.rows, given.cols);
        let mut tensor = self.zeros::<T>(&[rows, cols])?;
        let cells = tensor.as_mut_slice();
        if cols > 0 {
            for (index, row) in indices.iter().zip(values.chunks_exact(cols)) {
                cells[*index * cols..][..row.len()].copy_from_slice(row);
            }
        }
        let common = parts.part_of("dense", Origin::SparseDense);
        self.allreduce(&mut tensor, AllreduceOptions { common, ..Default::default() }.op(op))?;
        let values = tensor.as_slice().to_vec();
        Ok(SparseRows { rows, cols, indices: (0..rows).collect(), values })
    }

    fn add_sparse<T: Number>(
        &self,
        parts: &Parts,
        op: ReduceOp,
        given: &SparseRows<T>,
        (indices, values): (Vec<usize>, Vec<T>),
        all: &[Report],
    ) -> Result<SparseRows<T>> {
        let (rows, cols) = (given.rows, given.cols);
        // One operation for both, so that no index is moved without its row.
        let own: [Buffer; 2] = [
            self.tensor(sizes::to_wire(&indices), &[indices.len()])?.into_buffer(),
            self.tensor(&values, &[indices.len(), cols])?.into_buffer(),
        ];
        let options = AllgatherOptions { common: parts.part("rows"), op: None };
        let gathered = self.grouped_allgather(&own, options)?;
        // ONE: every rank that was counted gave as many rows as it had reported.
        let counts = || all.iter().map(|report| report.count as usize);
        if !gathered.iter().all(|gathered| gathered.rows.iter().copied().eq(counts())) {
            let what = "some ranks exchanged the counts of a sparse allreduce but not its rows";
            let hint = "wait for all handles before a rank joins";
            return Err(parts.named(Failure::new(FailureKind::Invalid, what).hint(hint)).into());
        }
        let mut tensors = gathered.into_iter().map(|gathered| gathered.tensor);
        let indices = typed::<u64>(tensors.next())?;
        let values = typed::<T>(tensors.next())?;
        let indices = sizes::of_wire(&indices);
        if indices.iter().any(|index| *index >= rows) {
            return Err(GradwireError::Protocol("an index that was checked has changed".into()));
        }
        let divisor = if op == ReduceOp::Average { all.len() as u32 } else { 1 };
        let (indices, values) = coalesce(indices, &values, cols, divisor);
        Ok(SparseRows { rows, cols, indices, values })
    }
}

/// One of a group's tensors, with the element type of the request.
fn typed<T: Element>(buffer: Option<Buffer>) -> Result<Tensor<T>> {
    let typed = buffer.and_then(|buffer| buffer.into_tensor().ok());
    typed.ok_or_else(|| GradwireError::Protocol("a gathered tensor has another type".into()))
}

#[cfg(test)]
mod tests {
    use gradwire_proto::DType;

    use super::*;

    fn report(rank: u64) -> Report {
        let common = [10, 4, DType::F32 as u64, ReduceOp::Sum as u64];
        Report { rank, common, count: 3, bad: [0, 0] }
    }

    #[test]
    fn reports_survive_the_exchange_and_are_compared() {
        let one = Report { rank: 3, bad: [12, 2], ..report(3) };
        assert_eq!(Report::from_numbers(one.to_numbers()), one);
        assert_eq!(agree(&[report(0), report(1)]), Ok(()));
        let failure = agree(&[report(0), one]).unwrap_err();
        assert_eq!((failure.kind, failure.rank), (FailureKind::Invalid, Some(Rank(3))));
        assert!(failure.what.contains("index 12") && failure.what.contains("10 rows"), "{failure}");

        let other =
            Report { common: [10, 5, DType::F64 as u64, ReduceOp::Sum as u64], ..report(1) };
        let failure = agree(&[report(0), other]).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Disagreement);
        for line in ["rank 0: sum of f32 [10, 4]", "rank 1: sum of f64 [10, 5]"] {
            assert!(failure.details.lines.iter().any(|it| it == line), "{failure}");
        }
    }
}
