//! `gradwire run`: starts a job on hosts, watches it, and leaves nothing behind.
//!
//! - [`hosts`], [`plan`]: which hosts, which ranks, which environment (pure)
//! - [`elastic`], [`membership`]: the rules of an elastic job, and its hosts and workers (pure)
//! - [`report`], [`job`]: the report at the end, and what to do next (pure)
//! - [`metrics_file`]: where Prometheus finds the metrics
//! - [`link`], [`places`], [`targets`], [`discovery`]: agents, addresses, hosts that come later
//! - [`requests`]: what other commands ask of a running job
//! - [`lines`], [`console`], [`files`], [`fold`], [`drain`]: output, its files, errors that ranks
//!   report alike, the end of output
//! - [`progress`]: the line of progress below the output

pub mod console;
pub mod discovery;
pub mod drain;
pub mod dry_run;
pub mod elastic;
pub mod files;
pub mod fold;
pub mod hosts;
pub mod job;
pub mod lines;
pub mod link;
pub mod membership;
pub mod metrics_file;
mod options;
pub mod places;
pub mod plan;
pub mod progress;
pub mod report;
pub mod requests;
pub mod targets;

use std::{
    iter,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use gradwire_services::launch::{ITSELF, Text};
use gradwire_settings::Settings;
use rustix::process::Signal;
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::{AbortHandle, JoinSet},
    time::{sleep, sleep_until},
};

pub use self::options::Options;
use self::{
    console::{Console, outputs_differ},
    drain::{Drain, print_all},
    files::Files,
    job::{
        Job,
        events::{Command, Event, Limits},
    },
    lines::{Entry, Line},
    link::Shared,
    metrics_file::MetricsFile,
    plan::{Plan, count},
    report::{Cause, JobReport},
    targets::Targets,
};
use crate::{
    error::{CommandError, print_line},
    processes::{self, Which},
    run_file::{RunFile, RunningJob},
    signals::{self, Endings, Passed, suspend},
};

/// How many events may wait for a decision (BOUND); when the queue is full, senders wait.
const EVENTS: usize = 1024;

/// How much longer the launcher gathers failures than the coordinator does.
const MARGIN: Duration = Duration::from_millis(100);

/// How much longer it waits for a daemon's report of the cause, which a busy machine delays.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// How long standard output may stay unread before the report is printed without waiting for it.
const EARLY: Duration = Duration::from_secs(2);

/// How long orders may take to go out before the launcher suspends itself.
const GOES_OUT: Duration = Duration::from_millis(200);

/// Runs a job to its end and returns its report. Afterwards no host has any of its processes
/// (CLEAN), or the report names the host that could not be cleaned up.
///
/// # Errors
/// [`CommandError`] if the launcher itself can't work.
pub async fn run(
    plan: Plan,
    settings: &Settings,
    mut options: Options,
) -> Result<JobReport, CommandError> {
    signals::heed().map_err(|error| CommandError::system(&error))?;
    // If an agent here is killed, we have to end what it had started.
    processes::adopt_orphans().map_err(CommandError::failed)?;
    let files = options.output_dir.as_deref().map(|directory| {
        let hosts = plan.nodes.iter().map(|node| node.host.as_str());
        Files::create(directory, plan.size(), hosts).map_err(|(path, error)| {
            CommandError::failed(format!("--output-dir: can't create {}: {error}", path.display()))
        })
    });
    let files = files.transpose()?;
    let metrics_file = options.metrics_sd.as_deref();
    let mut metrics_file =
        metrics_file.map(|folder| MetricsFile::create(folder, plan.job.as_str())).transpose()?;
    let mut signals = Endings::listen().map_err(|error| CommandError::system(&error))?;
    let mut passed = Passed::listen().map_err(|error| CommandError::system(&error))?;
    let born = Instant::now();
    let Console { lines: console, ended: mut written, mut reading } =
        Console::start(files, options.bare, options.with_time)
            .map_err(|error| CommandError::system(&error))?;
    let (events, mut happened) = mpsc::channel(EVENTS);
    let hushed = Arc::new(AtomicBool::new(false));
    let shared = Shared {
        events,
        console: console.clone(),
        born,
        verbose: options.verbose,
        hushed: hushed.clone(),
    };

    let mut tasks = JoinSet::new();
    let mut agents = Vec::new();
    // More orders than wait for an agent at any time.
    let per_agent = usize::try_from(plan.size()).unwrap_or(EVENTS) + 256;
    let targets = Arc::new(Targets::new(&plan, settings, &options));
    let found = tokio::select! {
        found = targets.first(&plan) => found?,
        // Looking up the names of hosts may take long.
        signal = signals.next() => {
            let report = JobReport::new(&[Cause::Interrupted(signal)], None, false);
            print_all(report.lines.clone());
            return Ok(report);
        }
    };
    for target in found {
        let orders = mpsc::channel(per_agent);
        agents.push(orders.0.clone());
        tasks.spawn(link::serve(target, shared.clone(), orders));
    }
    let watch = options
        .discovery
        .take()
        .map(|(script, hosts)| tasks.spawn(script.watch(Ok(hosts), shared.events.clone())));
    let (answers, decided) = mpsc::channel(1);
    let asked = plan.elastic.is_some().then(|| match requests::listen(&plan.job) {
        Ok(listener) => {
            Some(tasks.spawn(requests::serve(listener, shared.events.clone(), decided)))
        }
        // The job does not need it.
        Err(error) => {
            tracing::warn!(%error, "gradwire drain can't reach this job");
            None
        }
    });
    // Only an elastic job opens further links.
    let mut later = plan.elastic.is_some().then_some(shared);

    let progress = options.progress.take().map(|line| tasks.spawn(show(line, console.downgrade())));

    let limits = Limits {
        start: settings.start.timeout,
        grace: settings.launch.grace,
        // The coordinator reports the cause before we order the end (TELL).
        gather: settings.coordinator.cause_window + MARGIN,
        report: REPORT_TIMEOUT,
        // As long as the daemons of several hosts wait for each other.
        silence: settings.recovery.return_timeout.max(settings.heartbeat.timeout),
    };
    let (id, size, hosts) = (plan.job.clone(), plan.size(), plan.nodes.len());
    let secret = plan.secret.clone();
    let words = shown(&plan.program, &plan.args);
    let mut run_file = None;
    let mut job = Job::new(plan, limits);
    let mut suspend_at = None;
    let mut report = loop {
        if let Some(report) = job.report() {
            break report;
        }
        let deadline = job.deadline().unwrap_or(Duration::from_secs(3600));
        let event = tokio::select! {
            Some(event) = happened.recv() => event,
            heard = hear(&mut signals, &mut passed, suspend_at) => {
                let Some(event) = heard else {
                    suspend_at = None;
                    if let Err(error) = suspend() {
                        tracing::warn!(%error, "can't suspend the launcher");
                    }
                    continue;
                };
                if continues(&event) {
                    suspend_at = None;
                }
                event
            }
            why = output_ends(&mut written) => {
                Event::OutputClosed { why: why.unwrap_or_default() }
            }
            () = sleep_until((born + deadline).into()) => {
                if reading.is_slow() { Event::Unread } else { Event::Tick }
            }
        };
        let commands = job.step(event, born.elapsed());
        hushed.fetch_or(job.is_stopping(), Ordering::Relaxed);
        for command in commands {
            match command {
                Command::Order { node, order } => {
                    // The end of an agent is a separate event.
                    if let Err(error) = agents[node].try_send(order) {
                        tracing::debug!(%error, "order not given");
                    }
                }
                Command::Reach { agent, host } => {
                    let (send, receive) = mpsc::channel(per_agent);
                    agents.push(send.clone());
                    let (targets, shared) = (targets.clone(), later.clone());
                    tasks.spawn(async move {
                        let Some(shared) = shared else { return };
                        match targets.later(agent, &host, &shared.events).await {
                            Ok(target) => link::serve(target, shared, (send, receive)).await,
                            Err(error) => {
                                let (what, hint) = (error.what, error.hint);
                                let event = Event::Refused { node: agent, what, hint };
                                // The receiver is gone only at the end of the job.
                                let _ = shared.events.send(event).await;
                            }
                        }
                    });
                }
                // One request waits at a time, so there is room.
                Command::Answer(answer) => drop(answers.try_send(answer)),
                // A note may get lost: the launcher must not wait.
                Command::Say(text) => drop(console.try_send(Line::note(&text).into())),
                Command::Note(text) if options.verbose => {
                    drop(console.try_send(Line::note(&text).into()));
                }
                Command::Note(_) => {}
                Command::Suspend => suspend_at = Some(Instant::now() + GOES_OUT),
                Command::Serving { epoch, coordinator, daemons, ranks } => {
                    metrics_file.iter_mut().for_each(|file| file.list(&daemons));
                    if let Some(serving) = &options.serving {
                        serving.send_replace(Some((epoch, coordinator)));
                    }
                    let at = (ranks, daemons.len());
                    let running = RunningJob::new(id.as_str(), &secret, coordinator, at, &words);
                    let written = running.and_then(|running| match &run_file {
                        Some(file) => RunFile::update(file, &running),
                        None => RunFile::create(&running).map(|file| run_file = Some(file)),
                    });
                    // The job does not need the file.
                    if let Err(error) = written {
                        tracing::info!(%error, "gradwire status can't find this job by its id");
                    }
                }
            }
        }
    };
    drop((metrics_file, run_file, later.take()));
    let aside = watch.iter().chain(asked.iter().flatten()).chain(&progress);
    aside.for_each(AbortHandle::abort);
    // The report comes at the end of the output, without a line of progress.
    drop(console.try_send(Entry::Progress(String::new())));
    if options.verbose && report.code == 0 {
        let seconds = born.elapsed().as_secs_f64();
        let (ranks, hosts) = (count(size, "rank"), count(hosts, "host"));
        let text = format!("{ranks} on {hosts} succeeded after {seconds:.1} s");
        let _ = console.try_send(Line::note(&text).into());
    }
    report = report.with_output(options.output_dir.as_deref(), options.verbose);
    // This closes the standard inputs of the agents.
    drop(agents);
    // A report on standard error must not wait for a reader of standard output.
    let early = (report.code != 0 && outputs_differ()).then(|| {
        let (is_stuck, lines) = (reading.stuck(), report.lines.clone());
        tokio::spawn(async move {
            sleep(EARLY).await;
            let tells = is_stuck();
            if tells {
                print_all(lines);
            }
            tells
        })
    });
    let hurried = job.is_hurried();
    let mut last = Drain { reading: &mut reading, signals: &mut signals, hurried };
    let ending = last.wait(async {
        // The remaining reports decide nothing, but must not hold up output.
        let ignore = async { while happened.recv().await.is_some() {} };
        tokio::join!(ignore, async { while tasks.join_next().await.is_some() {} });
    });
    // Agents that have not ended are killed. Lost output is noticed below.
    drop(ending.await);
    tasks.shutdown().await;
    let has_told = match early {
        Some(early) if early.is_finished() => early.await.unwrap_or(false),
        Some(early) => {
            early.abort();
            false
        }
        None => false,
    };
    let words = if has_told { Vec::new() } else { report.lines.clone() };
    let said = last.wait(async move {
        for line in &words {
            // If output can't be written, that is reported below.
            let _ = console.send(Line::report(line).into()).await;
        }
    });
    let out = match said.await {
        // Output had failed before, and the report says so.
        Ok(()) if written.is_terminated() => Err(None),
        Ok(()) => match last.wait(output_ends(&mut written)).await {
            Ok(None) => Ok(()),
            Ok(Some(why)) => Err(Some(Cause::Output(why))),
            Err(lost) => Err(Some(lost)),
        },
        Err(lost) => Err(Some(lost)),
    };
    if let Err(lost) = out {
        if let Some(lost) = lost.filter(|_| report.code == 0) {
            report = JobReport::new(&[lost], None, false);
        }
        if !has_told {
            print_all(report.lines.clone());
        }
    }
    if !processes::kill_all(&[].into(), Which::OfJob(&id)).await {
        print_line("gradwire: processes of the job on this machine can't be killed");
    }
    Ok(report)
}

/// Passes the line of progress on to the writing thread. A line may get lost: the next one follows.
async fn show(mut line: watch::Receiver<String>, console: mpsc::WeakSender<Entry>) {
    while line.changed().await.is_ok()
        && let Some(console) = console.upgrade()
    {
        let text = line.borrow_and_update().clone();
        drop(console.try_send(Entry::Progress(text)));
    }
}

/// The next signal as an event, or `None` when it is time to suspend the launcher. A signal comes
/// first: a suspended launcher would never see the SIGCONT that came before. Cancel-safe.
async fn hear(
    signals: &mut Endings,
    passed: &mut Passed,
    suspend_at: Option<Instant>,
) -> Option<Event> {
    let suspends = async {
        match suspend_at {
            Some(at) => sleep_until(at.into()).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        signal = signals.next() => Some(Event::Interrupted { signal }),
        signal = passed.next() => Some(Event::Passed { signal }),
        () = suspends => None,
    }
}

/// Whether a launcher that is about to suspend itself must not do so after this event.
fn continues(event: &Event) -> bool {
    match event {
        Event::Interrupted { .. } => true,
        Event::Passed { signal } => *signal == Signal::CONT.as_raw(),
        _ => false,
    }
}

/// Becomes ready once, when the writing thread has ended: with the error, if it can't write.
async fn output_ends(written: &mut oneshot::Receiver<Option<String>>) -> Option<String> {
    if written.is_terminated() {
        return std::future::pending().await;
    }
    written.await.unwrap_or_else(|_| Some("the writing thread panicked".to_owned()))
}

/// The command of a job as the user gave it: commands that start `gradwire` itself as the ranks add
/// words at the end.
fn shown(program: &Text, args: &[Text]) -> Vec<String> {
    let is_own = *program == ITSELF.into();
    let program = if is_own { "gradwire".into() } else { program.clone() };
    let args = args.iter().take_while(|word| !(is_own && **word == "--started".into()));
    iter::once(&program).chain(args).map(Text::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_as_its_user_gave_it() {
        let shown = |program: &str, words: &str| {
            let words: Vec<_> = words.split(' ').map(Text::from).collect();
            super::shown(&program.into(), &words).join(" ")
        };
        assert_eq!(
            shown(ITSELF, "bench barrier -np 2 --started {}"),
            "gradwire bench barrier -np 2"
        );
        assert_eq!(shown("train", "--started x"), "train --started x");
    }
}
