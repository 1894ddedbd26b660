//! The imports of the files of the catalog.

pub(super) use crate::{
    algorithms::{
        about::{About, CHAN, THAKUR, TRAEFF},
        definition::Definition,
        kind::Kind,
        name::{FACTORS, Parameter, SEGMENTS, Values},
        parts::{
            build::{self, Builder, Link, Place, Rooted},
            circle::{self, Circle, RADIX},
            doubling::{self, Fold, Pairs},
            exchange::Trees,
            grid::{ANY, Along, Grid, TWO},
            rings,
            shape::{Cluster, Shape},
            trees,
        },
        spec::Spec,
        symmetry::Symmetry,
    },
    schedule::{Action, Block, GRAIN, Schedule, split},
    topology::Topology,
};
