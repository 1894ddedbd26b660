//! A place to run the real `gradwire` in.
#![allow(unused_imports, dead_code, reason = "each test program uses some of it")]

pub(crate) use gradwire_tests::place::{
    Output, Place, children, finish, kill, number, until, wait,
};

pub(crate) const GRADWIRE: &str = env!("CARGO_BIN_EXE_gradwire");
