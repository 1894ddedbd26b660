//! Tests of the whole system: real processes, sockets, shared memory, networks and faults. They are
//! one program, because each test program links all of Gradwire.
//!
//! Tests that measure the memory, descriptors or threads of their own process are separate
//! programs: `soak.rs`, `small_jobs.rs`.

mod addresses;
mod bad_input;
mod collectives;
mod collector;
mod composites;
mod compression;
mod conformance;
mod control_breaks;
mod disagreement;
mod discovery;
mod doctor;
mod elastic;
mod elastic_jobs;
mod endings;
mod endurance;
mod epochs;
mod hostile_collectives;
mod hostile_memory;
mod hostile_network;
mod hostile_workers;
mod join;
mod kills;
mod lanes;
mod large;
mod late_room;
mod launch;
mod metrics;
mod network;
mod network_matrix;
mod otlp;
mod phases;
mod precision;

mod probe;
mod process_sets;
mod quantized;
mod random_collectives;
mod recorder;
mod replays;
mod resources;
mod run_files;
mod servers;
mod spans;
mod status_page;
mod steps;
mod stragglers;
mod strict;
mod traffic;
mod training;
mod tuning;
mod usage;
mod viewers;
