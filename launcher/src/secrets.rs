//! The secrets of running jobs, for commands that show what ranks do.
//!
//! A secret comes from the job's run file, from the environment of this command, or from that of a
//! process of the job on this host ([`nearby`]).

use gradwire_proto::Secret;

use crate::{
    error::CommandError,
    nearby::{self, SECRET},
    run_file,
};

/// The secret of a job.
///
/// # Errors
/// [`CommandError`] if nothing on this host that this user may read has it.
pub fn of(job: &str) -> Result<Secret, CommandError> {
    let files = run_file::running().map(|jobs| jobs.running).unwrap_or_default();
    let from_file = files.into_iter().find(|running| running.job == job);
    if let Some(running) = from_file {
        return Ok(running.secret);
    }
    if let Ok(given) = std::env::var(SECRET) {
        return Secret::from_hex(&given)
            .map_err(|error| CommandError::usage(format!("{SECRET}: {error}")));
    }
    let here = nearby::daemons().into_iter().find(|daemon| daemon.job == job);
    here.map(|daemon| daemon.secret).ok_or_else(|| unknown(job))
}

fn unknown(job: &str) -> CommandError {
    CommandError::failed(format!(
        "only the user who has started job {job:?} may see what its ranks do"
    ))
    .hint(format!("run the command as that user on one of the job's hosts, or set {SECRET}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_job_says_what_to_do() {
        let error = of("no-such-job").unwrap_err();
        let text = format!("{error:?}");
        assert!(text.contains("one of the job's hosts") && text.contains(SECRET), "{text}");
    }
}
