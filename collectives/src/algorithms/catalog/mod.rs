//! The algorithms, one file for each name. A file has everything about its algorithm: the idea and
//! the paper, the parameters, the schedules, and their costs.
//!
//! A new algorithm is a file with a `Definition`, a variant of [`Algorithm`] and a row in
//! `Algorithm::definition`. Shared code is in [`parts`](super::parts):
//!
//! | made of | algorithms |
//! |---|---|
//! | [rings](super::parts::rings) | [`ring`], [`multi_ring`], [`chain`] |
//! | [exchange in pairs](super::parts::doubling) | [`halving_doubling`], [`rabenseifner`], [`swing`], [`bine`] |
//! | [a circle](super::parts::circle) | [`circulant`], [`bcube`], [`direct`] |
//! | [a grid](super::parts::grid) | [`torus`], [`blueconnect`], [`hips`], [`mesh`] |
//! | [trees with one root](super::parts::trees) | [`linear`], [`binomial`], [`k_nomial`] |
//! | [groups of tiers](super::parts::tiers) | [`hierarchical`] |
//! | [two trees](super::parts::colours) | [`double_tree`] |
//! | [packed trees](super::parts::packing) | [`blink`] |
//! | nothing else | [`recursive_doubling`], [`circulant_blocks`], [`leader_ring`], [`servers`], [`parameterhub`] |

pub mod bcube;
pub mod bine;
pub mod binomial;
pub mod blink;
pub mod blueconnect;
pub mod chain;
pub mod circulant;
pub mod circulant_blocks;
pub mod direct;
pub mod double_tree;
pub mod halving_doubling;
pub mod hierarchical;
pub mod hips;
pub mod k_nomial;
pub mod leader_ring;
pub mod linear;
pub mod mesh;
pub mod multi_ring;
pub mod parameterhub;
pub mod rabenseifner;
pub mod recursive_doubling;
pub mod ring;
pub mod servers;
pub mod swing;
pub mod torus;

mod prelude;

use super::{
    about::About,
    definition::Definition,
    name::{Algorithm, Parameter},
};

impl Algorithm {
    /// The definition in the file of an algorithm.
    pub(super) fn definition(self) -> &'static dyn Definition {
        match self {
            Self::Ring => &ring::Ring,
            Self::RecursiveDoubling => &recursive_doubling::RecursiveDoubling,
            Self::DoubleTree => &double_tree::DoubleTree,
            Self::Hierarchical => &hierarchical::Hierarchical,
            Self::Circulant => &circulant::Circulant,
            Self::Bcube => &bcube::Bcube,
            Self::Direct => &direct::Direct,
            Self::HalvingDoubling => &halving_doubling::HalvingDoubling,
            Self::Rabenseifner => &rabenseifner::Rabenseifner,
            Self::Swing => &swing::Swing,
            Self::MultiRing => &multi_ring::MultiRing,
            Self::Linear => &linear::Linear,
            Self::Binomial => &binomial::Binomial,
            Self::KNomial => &k_nomial::KNomial,
            Self::Chain => &chain::Chain,
            Self::Torus => &torus::Torus,
            Self::Blueconnect => &blueconnect::Blueconnect,
            Self::Hips => &hips::Hips,
            Self::LeaderRing => &leader_ring::LeaderRing,
            Self::Bine => &bine::Bine,
            Self::CirculantBlocks => &circulant_blocks::CirculantBlocks,
            Self::Mesh => &mesh::Mesh,
            Self::Servers => &servers::Servers,
            Self::Parameterhub => &parameterhub::Parameterhub,
            Self::Blink => &blink::Blink,
        }
    }

    /// Its summary.
    pub fn about(self) -> About {
        self.definition().about()
    }

    /// Its parameters.
    pub fn parameters(self) -> &'static [Parameter] {
        self.definition().parameters()
    }
}
