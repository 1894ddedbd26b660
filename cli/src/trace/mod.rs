//! `gradwire trace`: records the activities of all nodes and ranks of a running job in a file for
//! Perfetto and Chrome.
//!
//! The file grows line by line, so it can be opened even if this process is killed.
//!
//! - `window`: the steps to trace (pure)
//! - `file`: the file and its limit
//! - this file: the stream of the coordinator, and the end

mod file;
mod window;

use std::{
    collections::BTreeSet,
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use clap::Args;
use gradwire_launcher::{
    error::{CommandError, print_line},
    signals::Endings,
};
use gradwire_proto::pb::{StatusResponse, TraceBatch, TracePart, TraceRequest};
use gradwire_viewer::{
    trace::file::Trace,
    view::{self, count},
};
use prost::Message as _;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, sleep_until},
};
use tonic::Code;

use self::{
    file::TraceFile,
    window::{Steps, Window},
};
use crate::status::{self, open, refused};

/// How long after its end the events of a trace may arrive: nodes look for new events twenty times
/// per second.
const LATE: Duration = Duration::from_millis(300);

/// Printed when the trace waits for steps that may never come.
const NO_STEPS: &str = "no rank has made a step yet; an optimizer, the last bucket of ddp_hook or \
                        mark_step() makes one";

/// The most seconds of a trace.
const MAX_SECONDS: f64 = 86_400.0;

/// The job, the part to trace, and the file.
#[derive(Debug, Args)]
pub struct Options {
    /// The job [default: your job on this host].
    ///
    /// Its id if you started it on this host.
    ///
    /// Otherwise the address of its coordinator or status page.
    #[arg(value_name = "JOB")]
    pub address: Option<String>,
    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Trace these steps, LAST included.
    ///
    /// From when a rank first begins FIRST until all have ended LAST.
    #[arg(long, value_name = "FIRST..LAST", conflicts_with = "seconds")]
    pub steps: Option<Steps>,
    /// Trace for this number of seconds.
    ///
    /// Without this and --steps: until Ctrl-C or the end of the job.
    #[arg(long, value_parser = seconds, allow_negative_numbers = true)]
    pub seconds: Option<Duration>,
    /// The largest size of the file.
    ///
    /// The trace ends when the file reaches this size.
    #[arg(long, value_name = "MIB", default_value_t = 1024,
          value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub max_mib: u64,
    /// Print a line once the trace has begun, and end it when standard input ends.
    #[arg(long, hide = true)]
    pub until_eof: bool,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    if !(seconds > 0.0 && seconds <= MAX_SECONDS) {
        return Err(format!("must be more than 0 and at most {MAX_SECONDS}"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Traces a job. Prints a summary of the file.
///
/// # Errors
/// [`CommandError`] if the file can't be written, the coordinator can't be reached or is lost, or
/// the steps have passed.
pub async fn run(address: &str, options: &Options) -> Result<(), CommandError> {
    let mut file = TraceFile::open(&options.output, options.max_mib)?;
    let mut endings = Endings::listen().map_err(|error| CommandError::system(&error))?;
    let eof = options.until_eof.then(until_eof);
    let asked = async {
        match eof {
            Some(eof) => tokio::select! { _ = eof => {} _ = endings.next() => {} },
            None => drop(endings.next().await),
        }
    };
    let window = match &options.steps {
        None => Window::default(),
        Some(steps) => {
            let status = status::ask(address).await?;
            let window = Window::of(steps.clone(), &status)?;
            if view::ranks(&status).all(|rank| rank.steps == 0) {
                print_line(NO_STEPS);
            }
            window
        }
    };
    let limit = options.seconds.unwrap_or(Duration::MAX);
    let end = async {
        tokio::select! { () = sleep(limit) => {} () = asked => {} }
    };
    let begun = || {
        if options.until_eof {
            // The reader may have closed the pipe.
            let _ = writeln!(std::io::stdout(), "all nodes are recording");
        }
    };
    let summary = follow(address, window, &mut file, begun, end).await?;
    print_line(&summary);
    Ok(())
}

/// Resolves when standard input has ended. Its thread ends with the process.
fn until_eof() -> oneshot::Receiver<()> {
    let (sender, ended) = oneshot::channel();
    thread::spawn(move || {
        let mut rest = Vec::new();
        let _ = std::io::stdin().read_to_end(&mut rest);
        let _ = sender.send(());
    });
    ended
}

/// Traces a job until it is over, for its launcher. Returns a summary of the file.
///
/// # Errors
/// [`CommandError`] as from [`run`].
pub async fn whole(address: &str, path: &Path) -> Result<String, CommandError> {
    let mut file = TraceFile::open(path, DEFAULT_MAX_MIB)?;
    follow(address, Window::default(), &mut file, || (), std::future::pending()).await
}

/// The largest trace file of a launcher, in MiB.
const DEFAULT_MAX_MIB: u64 = 1024;

/// Checks that a file can be written, before the job starts.
///
/// # Errors
/// [`CommandError`] if it can't.
pub fn check(path: &Path) -> Result<(), CommandError> {
    TraceFile::open(path, DEFAULT_MAX_MIB).map(drop)
}

/// Writes events until `end`, or until the window or the job ends. Calls `begun` once all nodes
/// record.
async fn follow(
    address: &str,
    mut window: Window,
    file: &mut TraceFile,
    begun: impl FnOnce(),
    end: impl Future<Output = ()>,
) -> Result<String, CommandError> {
    let mut parts = open(address, async |client| client.trace(TraceRequest {}).await).await?;
    let mut begun = Some(begun);
    let mut trace: Option<Traced> = None;
    let mut end = std::pin::pin!(end);
    let mut until: Option<Instant> = None;
    let ended = loop {
        let part = tokio::select! {
            part = parts.message() => part,
            () = &mut end, if until.is_none() => {
                until = Some(Instant::now() + LATE);
                continue;
            }
            () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                break Ok("");
            }
        };
        match part {
            Ok(Some(part)) => {
                let traced = match &mut trace {
                    Some(traced) => traced,
                    // Nodes record only once the world has formed, so it is known by now.
                    None => trace.insert(Traced::begin(&status::ask(address).await?, file)?),
                };
                traced.add(part, &mut window, file)?;
                if traced.recording.len() == traced.hosts
                    && let Some(begun) = begun.take()
                {
                    begun();
                }
                if file.is_full() {
                    break Ok(", and it is full: --max-mib allows more");
                }
                if window.is_over() && until.is_none() {
                    until = Some(Instant::now() + LATE);
                }
            }
            Ok(None) => break Ok(", and the job is over"),
            Err(status) if status.code() == Code::Unavailable && status.message() == OVER => {
                break Ok(", and the job is over");
            }
            Err(status) => break Err(status),
        }
    };
    let name = file.name().to_owned();
    let Some(mut traced) = trace else {
        return match ended {
            Err(status) => Err(refused(address, &status)),
            Ok(why) => {
                let what = format!("no node recorded anything{why}: {name} is not written");
                Err(CommandError::failed(what))
            }
        };
    };
    let summary = traced.end(file)?;
    match ended {
        Ok(why) if !window.has_begun() => {
            let what = format!("the first step was not reached{why}");
            Err(CommandError::failed(what)
                .hint(format!("{name} has no steps: use earlier ones, or --seconds")))
        }
        Ok(why) => Ok(format!("{name}: {summary}{why}")),
        Err(status) => {
            let why = status.message();
            let what = format!("lost the coordinator at {address}: {why}");
            Err(CommandError::failed(what)
                .hint(format!("{name} has the events until then: {summary}")))
        }
    }
}

/// The coordinator's message when the job has ended.
const OVER: &str = "the job is over";

/// The events of a job on their way to the file.
struct Traced {
    trace: Trace,
    hosts: usize,
    /// The nodes that have sent events.
    recording: BTreeSet<u32>,
    /// The events that are in the file.
    written: u64,
    text: Vec<u8>,
}

impl Traced {
    fn begin(status: &StatusResponse, file: &mut TraceFile) -> Result<Self, CommandError> {
        let trace = Trace::new(status);
        let mut text = Vec::new();
        trace.begin(status, &mut text);
        file.write(&text)?;
        let (hosts, recording) = (status.nodes.len(), BTreeSet::new());
        Ok(Self { trace, hosts, recording, written: 0, text })
    }

    fn add(
        &mut self,
        part: TracePart,
        window: &mut Window,
        file: &mut TraceFile,
    ) -> Result<(), CommandError> {
        self.trace.joiner().missed(part.lost_batches);
        // A batch that can't be decoded counts as lost (TRUST).
        let Ok(batch) = TraceBatch::decode(&part.batch[..]) else {
            self.trace.joiner().missed(1);
            return Ok(());
        };
        if (batch.node as usize) < self.hosts {
            self.recording.insert(batch.node);
        }
        for batch in window.admit(batch) {
            self.text.clear();
            let before = self.trace.written();
            self.trace.add(batch, |begin, end| window.contains(begin, end), &mut self.text);
            if file.write(&self.text)? {
                self.written += self.trace.written() - before;
            }
        }
        Ok(())
    }

    fn end(&mut self, file: &mut TraceFile) -> Result<String, CommandError> {
        self.text.clear();
        self.trace.end(&mut self.text);
        file.end(&self.text)?;
        let (written, lost) = (self.written, self.trace.joiner().lost());
        let mut summary = format!(
            "{written} events of {}, clocks agree within {:.3} ms",
            count(self.hosts as u64, "host"),
            self.trace.joiner().error_ns() as f64 / 1e6
        );
        if lost.events > 0 {
            summary.push_str(&format!(", {} lost because nodes were busy", lost.events));
        }
        if lost.batches > 0 {
            let batches = count(lost.batches, "batch");
            summary.push_str(&format!(", {batches} lost because this host was busy"));
        }
        Ok(summary)
    }
}
