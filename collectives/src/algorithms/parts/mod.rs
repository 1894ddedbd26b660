//! What several algorithms are made of, or what is best understood by itself. The lowest first:
//!
//! - [`build`]: from a choice of trees, or from steps, to a schedule
//! - [`tiers`]: where participants are in the groups of all tiers
//! - [`shape`]: what a cost consists of
//! - [`trees`], [`rings`], [`circle`], [`doubling`], [`grid`], [`colours`], [`packing`]: trees and
//!   exchanges that several algorithms choose from
//! - [`aligned`]: a reduction to one participant in the canonical order of additions
//! - [`exchange`]: pieces in which each block has roles of its own

pub mod aligned;
pub mod build;
pub mod circle;
pub mod colours;
pub mod doubling;
pub mod exchange;
pub mod grid;
pub mod packing;
pub mod rings;
pub mod shape;
pub mod tiers;
pub mod trees;
