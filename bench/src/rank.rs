//! A measurement as one of its ranks. All ranks do the same; only rank 0 writes the report.

use std::{collections::BTreeMap, process::ExitCode};

use gradwire_launcher::error::CommandError;
use gradwire_worker::Session;

use super::{
    args::{Bench, Common},
    measure::Rounds,
    model,
    report::{self, Head},
    sweep,
};

/// Runs a measurement as the rank that the environment names, and returns its exit code.
///
/// # Errors
/// As of [`run_with`].
pub fn run(bench: &Bench) -> Result<ExitCode, CommandError> {
    run_with(
        bench.common(),
        |ranks| bench.check_size(ranks),
        |session, settings| measure(bench, session, settings),
    )
}

/// The settings that the job was started with, where `gradwire bench` started it.
pub type Changed = Option<BTreeMap<String, String>>;

/// Runs `measure` as the rank that the environment names, if `check` accepts the number of ranks.
/// Returns the exit code.
///
/// # Errors
/// [`CommandError`] if this process is not a rank, or `check` refuses. Errors of `measure` are
/// reported here, before the other ranks are notified (TELL).
pub fn run_with(
    common: &Common,
    check: impl FnOnce(u32) -> Result<(), CommandError>,
    measure: impl FnOnce(&Session, Changed) -> Result<(), CommandError>,
) -> Result<ExitCode, CommandError> {
    let settings = common.started.as_deref().map(serde_json::from_str::<BTreeMap<String, String>>);
    let settings = settings.transpose().map_err(|error| {
        CommandError::usage(format!("--started: {error}"))
            .hint("gradwire bench sets this option for its ranks; do not use it yourself")
    })?;
    let session = Session::from_env().map_err(CommandError::failed)?;
    // All ranks get the same result, so all of them leave in good order.
    if let Err(error) = check(session.size()) {
        session.shutdown().map_err(CommandError::failed)?;
        return Err(error);
    }
    if let Err(error) = measure(&session, settings) {
        // Report first: the other ranks end when they are notified, and then the launcher ends this
        // process.
        let code = error.report();
        session.abort(&error.what);
        return Ok(code);
    }
    session.shutdown().map_err(CommandError::failed)?;
    Ok(ExitCode::SUCCESS)
}

fn measure(bench: &Bench, session: &Session, settings: Changed) -> Result<(), CommandError> {
    let begin =
        |settings| report::begin(Head::new(bench, session, settings), bench, session.rank() == 0);
    match bench {
        Bench::Barrier { common } => {
            let (warmup, iters) = (common.warmup, common.iters);
            // All barriers are checked at the end, by their recorded times.
            let rounds = Rounds { warmup, iters, check: u32::MAX, barrier: common.barrier };
            let mut report = begin(settings)?;
            sweep::barriers(session, rounds, &mut report)?;
            report.finish()
        }
        Bench::Model { shapes, compute_ms, op, data } => {
            let mut report = begin(settings)?;
            model::run(session, *op, data, (shapes, *compute_ms), &mut report)?;
            report.finish()
        }
        Bench::Sweep(collective) => {
            let (operation, sweep) = collective.parts();
            let mut report = begin(settings)?;
            sweep::run(session, operation, sweep, &mut report)?;
            report.finish()
        }
    }
}
