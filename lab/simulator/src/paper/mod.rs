//! Published results, reproduced by simulation.

pub mod byteps;
mod errata;
pub mod formulas;
pub mod rat;
pub mod ring;
mod setting;
pub mod torus;

use crate::table::Results;

/// The papers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paper {
    /// The formulas of the literature.
    Formulas,
    /// Baidu's and Horovod's ring.
    Ring,
    /// Sony's 2D torus.
    Torus,
    /// BytePS.
    BytePs,
    /// RAT.
    Rat,
}

impl Paper {
    /// Runs all simulations of a paper.
    pub fn run(self) -> Results {
        match self {
            Self::Formulas => {
                let mut results = formulas::run();
                results.tables.push(errata::errata());
                results
            }
            Self::Ring => ring::run(),
            Self::Torus => torus::run(),
            Self::BytePs => byteps::run(1),
            Self::Rat => rat::run(&rat::Extent::default()),
        }
    }
}
