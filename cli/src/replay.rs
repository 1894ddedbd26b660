//! `gradwire run --record` and `gradwire replay`: which ranks are recorded, and how one of them
//! runs alone.

use std::{
    ffi::OsString,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
};

use clap::Args;
use gradwire_bench::size;
use gradwire_launcher::{
    error::{CommandError, print_line},
    launch::plan::Record,
};
use gradwire_replay::{Replay, Summary, recorded_ranks};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::Command,
    signal::unix::{SignalKind, signal},
};

use crate::process::block_on;

/// What `gradwire run` records.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Records")]
pub struct RecordOptions {
    /// Record what ranks receive, for `gradwire replay`.
    ///
    /// DIR is a new folder. Each recorded rank gets a folder in it, on its host.
    #[arg(long, value_name = "DIR")]
    pub record: Option<PathBuf>,
    /// The ranks to record, such as 3,5-7 [default: all].
    #[arg(long, value_name = "RANKS", requires = "record", value_parser = ranks)]
    pub record_ranks: Option<Ranks>,
    /// The most bytes of the record of a rank [default: 1G].
    ///
    /// After that, the job goes on and is not recorded any more.
    #[arg(long, value_name = "BYTES", requires = "record", value_parser = size::parse_bytes)]
    pub record_bytes: Option<u64>,
}

/// The record of a rank, unless `--record-bytes` says something else.
const RECORD_BYTES: u64 = 1 << 30;

/// The smallest limit of a record, with room for its beginning and its end.
const LEAST_BYTES: u64 = 1 << 20;

/// Ranks in an option: the first and the last of each range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranks(Vec<(u32, u32)>);

/// Ranks such as `3,5-7`.
fn ranks(text: &str) -> Result<Ranks, String> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last).then_some((first, last))
    };
    let ranges: Option<_> = text.split(',').map(range).collect();
    ranges.map(Ranks).ok_or_else(|| "expected ranks such as 3,5-7".to_owned())
}

impl RecordOptions {
    /// What a job of this many ranks records; nothing without `--record`.
    ///
    /// # Errors
    /// [`CommandError`] for ranks that the job does not have, a folder with other content, or an
    /// elastic job.
    pub fn plan(&self, size: u32, is_elastic: bool) -> Result<Option<Record>, CommandError> {
        let Some(folder) = &self.record else { return Ok(None) };
        if is_elastic {
            let what = "--record: an elastic job can't be recorded, because its ranks change";
            let hint = "start it without --min-np, --max-np and --host-discovery-script";
            return Err(CommandError::usage(what).hint(hint));
        }
        let all = Ranks(vec![(0, size.saturating_sub(1))]);
        let ranges = self.record_ranks.as_ref().unwrap_or(&all).0.clone();
        if let Some((_, last)) = ranges.iter().find(|(_, last)| *last >= size) {
            let what =
                format!("--record-ranks: the job has no rank {last}, only 0 to {}", size - 1);
            return Err(CommandError::usage(what));
        }
        let bytes = self.record_bytes.unwrap_or(RECORD_BYTES);
        if bytes < LEAST_BYTES {
            let what = format!("--record-bytes: {bytes} is less than 1M");
            return Err(CommandError::usage(what));
        }
        let shown = folder.display();
        if folder.exists() && folder.read_dir().map_or(true, |mut all| all.next().is_some()) {
            let what = format!("--record: {shown} exists and is not an empty folder");
            return Err(CommandError::usage(what).hint("name a new folder"));
        }
        let folder = std::path::absolute(folder).ok();
        let folder = folder.and_then(|folder| folder.into_os_string().into_string().ok());
        let folder = folder.ok_or_else(|| {
            CommandError::usage(format!("--record: the name of {shown} is not UTF-8"))
        })?;
        Ok(Some(Record { folder, ranks: ranges, bytes }))
    }
}

/// Run one recorded rank alone, with the results of the recorded job.
#[derive(Debug, Args)]
pub struct Options {
    /// The folder of `gradwire run --record`.
    #[arg(value_name = "DIR")]
    pub record: PathBuf,
    /// The rank [default: the only recorded one].
    #[arg(long, value_name = "RANK")]
    pub rank: Option<u32>,
    /// The program and its arguments, as in the recorded job.
    ///
    /// A debugger may be before it, as in `python -m pdb train.py`.
    #[arg(required = true, last = true, value_name = "PROGRAM")]
    pub command: Vec<OsString>,
}

/// Runs the program as the recorded rank. Returns its exit code.
///
/// # Errors
/// [`CommandError`] if the rank has no record, or the program can't be started.
pub fn run(options: &Options) -> Result<ExitCode, CommandError> {
    let Options { record, rank, command } = options;
    let rank = match rank {
        Some(rank) => *rank,
        None => only_rank(record)?,
    };
    let replay = Replay::open(record, rank).map_err(CommandError::usage)?;
    let variables = replay.variables();
    let stopped = Arc::new(AtomicBool::new(false));
    let own = stopped.clone();
    let server = thread::Builder::new().name("gw-replay".to_owned());
    let server = server.spawn(move || replay.serve(&own));
    let server = server.map_err(|error| CommandError::system(&error))?;
    let ended = block_on(program(command, &variables))?;
    stopped.store(true, SeqCst);
    let served = server.join().map_err(|_| CommandError::failed("the replay has panicked"))?;
    let code = ended?;
    Ok(ExitCode::from(tell(served.map_err(|error| CommandError::system(&error))?, rank, code)))
}

/// The only recorded rank.
fn only_rank(record: &Path) -> Result<u32, CommandError> {
    match *recorded_ranks(record) {
        [rank] => Ok(rank),
        [] => Err(CommandError::usage(format!("{} has no records", record.display()))
            .hint("`gradwire run --record DIR` makes them")),
        [first, ..] => {
            let what = format!("{} has the records of several ranks", record.display());
            Err(CommandError::usage(what).hint(format!("choose one: --rank {first}")))
        }
    }
}

/// Runs the program to its end. Returns its exit code, as a shell does.
async fn program(
    command: &[OsString],
    variables: &std::collections::BTreeMap<String, String>,
) -> Result<u8, CommandError> {
    let Some((program, words)) = command.split_first() else {
        return Err(CommandError::usage("the program's name is empty"));
    };
    // The terminal sends SIGINT to the program, too. It belongs to the program and its debugger.
    let interrupted = signal(SignalKind::interrupt());
    let mut interrupted = interrupted.map_err(|error| CommandError::system(&error))?;
    let ended = signal(SignalKind::terminate());
    let mut ended = ended.map_err(|error| CommandError::system(&error))?;
    let mut child = Command::new(program).args(words).envs(variables).spawn().map_err(|error| {
        CommandError::failed(format!("can't start {}: {error}", program.display()))
    })?;
    let pid = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            _ = interrupted.recv() => {}
            _ = ended.recv() => {
                if let Some(pid) = pid {
                    let _ = kill_process(pid, Signal::TERM);
                }
            }
        }
    };
    let status = status.map_err(|error| CommandError::system(&error))?;
    let code = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
    Ok(u8::try_from(code).unwrap_or(1))
}

/// Tells how the replay went. Returns the exit code.
fn tell(summary: Option<Summary>, rank: u32, code: u8) -> u8 {
    let Some(Summary { made, recorded, problem }) = summary else {
        print_line(format_args!("gradwire: the program did not become rank {rank}"));
        return code;
    };
    if let Some(problem) = problem {
        let first = problem.lines().next().unwrap_or_default();
        print_line(format_args!("gradwire: the replay of rank {rank} ended early: {first}"));
        return code.max(1);
    }
    let calls = if made == recorded {
        format!("all {recorded} recorded calls of rank {rank}")
    } else {
        format!("only {made} of the {recorded} recorded calls of rank {rank}")
    };
    print_line(format_args!("gradwire: the program made {calls}"));
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(folder: &Path, ranks: Option<&str>) -> RecordOptions {
        let record_ranks = ranks.map(|text| super::ranks(text).unwrap());
        RecordOptions { record: Some(folder.to_owned()), record_ranks, record_bytes: None }
    }

    #[test]
    fn ranks_are_numbers_and_ranges() {
        assert_eq!(ranks("3,5-7"), Ok(Ranks(vec![(3, 3), (5, 7)])));
        for wrong in ["", "a", "3-", "7-5", "3,,4", "-1"] {
            assert!(ranks(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_wrong_use_is_refused_with_its_reason() {
        let folder = tempfile::tempdir().unwrap();
        let new = folder.path().join("new");
        let planned = options(&new, Some("1,3")).plan(4, false).unwrap().unwrap();
        assert_eq!((planned.ranks, planned.bytes), (vec![(1, 1), (3, 3)], 1 << 30));
        let refused =
            |options: RecordOptions, is_elastic| options.plan(4, is_elastic).unwrap_err().what;
        assert!(refused(options(&new, Some("9")), false).contains("no rank 9, only 0 to 3"));
        assert!(refused(options(&new, None), true).contains("elastic"));
        let small = RecordOptions { record_bytes: Some(9), ..options(&new, None) };
        assert!(refused(small, false).contains("less than 1M"));
        std::fs::write(folder.path().join("other"), "").unwrap();
        assert!(refused(options(folder.path(), None), false).contains("not an empty folder"));
        assert!(RecordOptions::default().plan(4, true).unwrap().is_none());
    }
}
