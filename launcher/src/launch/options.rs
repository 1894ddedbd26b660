//! How a job is run, besides its plan and its settings.

use std::{collections::HashMap, net::SocketAddr, path::PathBuf};

use tokio::sync::watch;

use super::{discovery::Script, hosts::Host};

/// How to run a job.
#[derive(Debug)]
pub struct Options {
    /// The folder for the output of each process.
    pub output_dir: Option<PathBuf>,
    /// The folder for the file that tells Prometheus where the metrics are.
    pub metrics_sd: Option<PathBuf>,
    /// Receives the number of each epoch and the address of its coordinator, once daemons serve.
    pub serving: Option<watch::Sender<Option<(u64, SocketAddr)>>>,
    /// The line of progress, which is shown at the end of the terminal.
    pub progress: Option<watch::Receiver<String>>,
    /// The script that lists the hosts of an elastic job, and its first list.
    pub discovery: Option<(Script, Vec<Host>)>,
    /// Show what happens.
    pub verbose: bool,
    /// The standard output of ranks gets no prefix, because only one of them writes.
    pub bare: bool,
    /// Lines begin with the time.
    pub with_time: bool,
    /// The launcher's environment.
    pub environment: HashMap<String, String>,
    /// The launcher's working directory.
    pub directory: PathBuf,
}
