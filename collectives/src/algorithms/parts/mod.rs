//! The building blocks of algorithms, the lowest first:
//!
//! - [`build`]: from a choice of trees, or from steps, to a schedule
//! - [`tiers`]: the groups of participants in all tiers
//! - [`shape`]: what a cost consists of
//! - [`trees`], [`rings`], [`circle`], [`doubling`], [`grid`], [`colours`], [`packing`]: trees and
//!   exchanges that several algorithms choose from
//! - [`aligned`]: a reduction to one participant in the canonical order of additions
//! - [`exchange`]: pieces in which each block has its own roles

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
