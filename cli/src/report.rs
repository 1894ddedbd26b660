//! `gradwire report`: what the flight recordings of a job say.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use clap::Args;
use gradwire_launcher::{
    error::{CommandError, print_line},
    secrets,
};
use gradwire_proto::{
    auth::Claim,
    pb::{self, ChallengeRequest, ExplainRequest},
};
use gradwire_trace::flight::Image;
use gradwire_viewer::{
    flight::{Job, file, story, torch},
    view::count,
};
use tokio::time::sleep;

use crate::{
    cluster::printable,
    status::{EXPLANATION, open, open_within, write},
};

/// The end of the name of a recording.
const EXTENSION: &str = "flight";

/// The most files of a folder that are read (BOUND).
const MAX_FILES: usize = 10_000;

/// How often the daemons are asked, and the pause before they are asked again: the coordinator or a
/// daemon may be in the middle of another question.
const TRIES: u32 = 3;
const AGAIN: Duration = Duration::from_secs(2);

/// The recordings, and what else to write.
#[derive(Debug, Args)]
pub struct Options {
    /// A folder with recordings, or a running job [default: your job on this host].
    ///
    /// The folder of recorder.directory, or a copy of the files of all hosts.
    ///
    /// The daemons of a running job write their recordings first. The job is its id if you started
    /// it on this host, otherwise the address of its coordinator or status page.
    #[arg(value_name = "DIR|JOB")]
    pub place: Option<String>,
    /// Which job, if the folder has recordings of several [default: the latest].
    #[arg(long, value_name = "ID")]
    pub job: Option<String>,
    /// Also write a trace file for Perfetto or Chrome.
    #[arg(long, value_name = "FILE")]
    pub perfetto: Option<PathBuf>,
    /// Also write the files of PyTorch's flight recorder to this folder.
    ///
    /// `torchfrtrace DIR` analyses them.
    #[arg(long, value_name = "DIR")]
    pub torch: Option<PathBuf>,
}

impl Options {
    /// The folder, if a folder is meant.
    ///
    /// # Errors
    /// [`CommandError`] if it looks like a folder but is none.
    pub fn folder(&self) -> Result<Option<PathBuf>, CommandError> {
        let Some(place) = &self.place else { return Ok(None) };
        let path = PathBuf::from(place);
        let is_url = place.starts_with("http://");
        match path.is_dir() {
            true => Ok(Some(path)),
            false if place.contains('/') && !is_url => {
                let what = format!("{} is not a folder", printable(place));
                Err(CommandError::failed(what)
                    .hint("name the folder of recorder.directory, or a running job"))
            }
            false => Ok(None),
        }
    }
}

/// The recordings of one job.
#[derive(Debug)]
pub struct Found {
    images: Vec<Image>,
}

impl Found {
    /// The recordings of a job in a folder; those of the latest job if none is named.
    ///
    /// # Errors
    /// [`CommandError`] if the folder can't be read or has no recordings of the job.
    pub fn in_folder(folder: &Path, job: Option<&str>) -> Result<Self, CommandError> {
        let name = printable(&folder.display().to_string());
        let unread =
            |error: io::Error| CommandError::failed(format!("{name} can't be read: {error}"));
        let mut paths = Vec::new();
        for entry in fs::read_dir(folder).map_err(unread)? {
            let path = entry.map_err(unread)?.path();
            if path.extension().is_some_and(|end| end == EXTENSION) && paths.len() < MAX_FILES {
                paths.push(path);
            }
        }
        paths.sort_unstable();
        let mut jobs: BTreeMap<String, (SystemTime, Vec<Image>)> = BTreeMap::new();
        let mut damaged = 0;
        for path in &paths {
            match read(path) {
                Ok((image, written)) => {
                    let (latest, images) = jobs
                        .entry(image.job.clone())
                        .or_insert_with(|| (SystemTime::UNIX_EPOCH, Vec::new()));
                    *latest = written.max(*latest);
                    images.push(image);
                }
                Err(error) => {
                    damaged += 1;
                    let name = printable(&path.display().to_string());
                    print_line(format_args!("gradwire: {name} is left out: {error}"));
                }
            }
        }
        let ids: Vec<String> = jobs.keys().map(|id| printable(id)).collect();
        let named = job.map(str::to_owned);
        let latest = || jobs.iter().max_by_key(|(_, (at, _))| *at).map(|(id, _)| id.clone());
        let chosen = named.or_else(latest).and_then(|id| Some((id.clone(), jobs.remove(&id)?.1)));
        match (chosen, job) {
            (Some((id, images)), None) if !jobs.is_empty() => {
                let others: Vec<&str> =
                    ids.iter().map(String::as_str).filter(|other| *other != id).collect();
                print_line(format_args!(
                    "gradwire: this is the latest job, {}; --job names another one: {}",
                    printable(&id),
                    others.join(", ")
                ));
                Ok(Self { images })
            }
            (Some((_, images)), _) => Ok(Self { images }),
            (None, Some(job)) if !ids.is_empty() => {
                let what = format!("{name} has no recording of job {}", printable(job));
                Err(CommandError::failed(what).hint(format!("it has those of {}", ids.join(", "))))
            }
            _ if damaged > 0 => {
                let what = format!("no recording in {name} can be read");
                Err(CommandError::failed(what).hint("copy the files again from their hosts"))
            }
            _ => {
                let what = format!("{name} has no flight recordings (*.{EXTENSION})");
                Err(CommandError::failed(what).hint(
                    "set recorder.directory for the job, and copy the files of all hosts to one \
                     folder",
                ))
            }
        }
    }

    /// The recordings in these files, as far as this host can read them.
    fn in_files(paths: &[&str]) -> Self {
        let images = paths.iter().filter_map(|path| Some(read(Path::new(path)).ok()?.0));
        Self { images: images.collect() }
    }
}

/// A recording, and when it was written.
fn read(path: &Path) -> Result<(Image, SystemTime), String> {
    let text = |error: io::Error| error.to_string();
    let file = File::open(path).map_err(text)?;
    let about = file.metadata().map_err(text)?;
    if !about.is_file() {
        return Err("it is not a file".to_owned());
    }
    let mut bytes = Vec::new();
    // A larger file is refused (BOUND).
    file.take(Image::MAX_BYTES + 1).read_to_end(&mut bytes).map_err(text)?;
    let image = Image::parse(&bytes).map_err(|error| error.to_string())?;
    Ok((image, about.modified().unwrap_or(SystemTime::UNIX_EPOCH)))
}

/// Asks the daemons of the job of the coordinator at `address` to save their recordings. Returns
/// those that this host can read.
///
/// # Errors
/// [`CommandError`] if the coordinator can't be reached, this user does not have the job's secret,
/// or no daemon has saved its recording.
pub async fn ask(address: &str) -> Result<Found, CommandError> {
    let mut explained = ask_once(address).await?;
    for _ in 1..TRIES {
        if !explained.saved.is_empty() && explained.silent_hosts.is_empty() {
            break;
        }
        sleep(AGAIN).await;
        explained = ask_once(address).await?;
    }
    let (saved, failed): (Vec<_>, Vec<_>) =
        explained.saved.iter().partition(|saved| saved.error.is_empty());
    for silent in &explained.silent_hosts {
        print_line(format_args!("gradwire: host {} did not answer", printable(silent)));
    }
    let Some(first) = explained.saved.first() else {
        return Err(CommandError::failed("no daemon has answered").hint("try again"));
    };
    if saved.is_empty() {
        let what = format!("host {}: {}", printable(&first.host), printable(&first.error));
        return Err(CommandError::failed(what).hint(
            "start jobs with recorder.directory set to a folder that all hosts can write to",
        ));
    }
    for it in &failed {
        let (host, error) = (printable(&it.host), printable(&it.error));
        print_line(format_args!("gradwire: host {host}: {error}"));
    }
    for it in &saved {
        let (host, path) = (printable(&it.host), printable(&it.path));
        print_line(format_args!("gradwire: host {host} has written {path}"));
    }
    let paths: Vec<&str> = saved.iter().map(|it| it.path.as_str()).collect();
    let found = Found::in_files(&paths);
    if found.images.is_empty() {
        let what = "this host can't read the files of the hosts";
        return Err(CommandError::failed(what)
            .hint("copy them to one folder, and give that: gradwire report DIR"));
    }
    let hosts = count(found.images.len() as u64, "host");
    print_line(format_args!("gradwire: this report is of {hosts}"));
    Ok(found)
}

async fn ask_once(address: &str) -> Result<pb::Explanation, CommandError> {
    let pb::ViewerChallenge { nonce, job } =
        open(address, async |client| client.challenge(ChallengeRequest {}).await).await?;
    let proof = secrets::of(&job)?.prove(&Claim::View { challenge: &nonce, job: &job }).to_vec();
    let request = ExplainRequest { stacks: false, nonce, proof, save: true };
    open_within(EXPLANATION, address, async |client| client.explain(request).await).await
}

/// Prints the report, and writes the files that are wanted.
///
/// # Errors
/// [`CommandError`] if a file can't be written.
pub fn show(found: &Found, options: &Options) -> Result<(), CommandError> {
    let none = || CommandError::failed("no recording was found");
    let job = Job::merge(found.images.clone()).ok_or_else(none)?;
    // The texts of ranks may contain anything (TRUST).
    let text = story::text(&job);
    let lines = text.lines().map(|line| format!("{}\n", printable(line)));
    write(&lines.collect::<String>())?;
    if let Some(path) = &options.perfetto {
        fs::write(path, file::text(&job)).map_err(|error| unwritten(path, &error))?;
    }
    if let Some(folder) = &options.torch {
        write_torch(&job, folder)?;
    }
    Ok(())
}

fn unwritten(path: &Path, error: &io::Error) -> CommandError {
    let name = printable(&path.display().to_string());
    CommandError::failed(format!("{name} can't be written: {error}")).hint("name another one")
}

/// Writes a file for each rank. The analyser reads all files of the folder, so it must be empty.
fn write_torch(job: &Job, folder: &Path) -> Result<(), CommandError> {
    let failed = |error: io::Error| unwritten(folder, &error);
    fs::create_dir_all(folder).map_err(failed)?;
    if fs::read_dir(folder).map_err(failed)?.next().is_some() {
        let what = format!("{} is not empty", printable(&folder.display().to_string()));
        return Err(CommandError::failed(what).hint("name a new folder"));
    }
    for (name, contents) in torch::files(job) {
        fs::write(folder.join(name), contents).map_err(failed)?;
    }
    Ok(())
}
