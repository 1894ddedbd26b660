//! The files that list the running jobs: one for each job, written by its launcher and removed at
//! the end. They tell commands such as `gradwire status` the address of a job, and `gradwire why`
//! its secret.
//!
//! They are in `gradwire/` of `$XDG_RUNTIME_DIR`, or in `gradwire-UID/` of the folder for temporary
//! files. Only their owner reads and writes them. If a launcher is killed, its agents on this
//! machine remove the file. Without such an agent the next launcher does, or the next command that
//! looks for jobs, which says so: the file has the launcher's process id and start time.

use std::{
    env,
    fs::{self, DirBuilder, OpenOptions},
    io::{self, ErrorKind, Read, Write},
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use gradwire_proto::Secret;
use procfs::process::Process;
use rustix::{
    fs::{Access, access},
    process::geteuid,
};
use serde::{Deserialize, Serialize};

/// The most files that are read (BOUND).
const MAX_FILES: usize = 1024;

/// The largest file, in bytes (BOUND).
const MAX_BYTES: u64 = 64 << 10;

/// The longest command that is kept, in characters.
const MAX_COMMAND: usize = 120;

/// How often the folder is made again if another launcher removes it at the same moment.
const TRIES: usize = 10;

/// A running job, as its file describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningJob {
    /// Its id.
    pub job: String,
    /// Where its coordinator serves.
    pub coordinator: SocketAddr,
    /// The number of its ranks.
    pub ranks: u32,
    /// The number of its hosts.
    pub hosts: usize,
    /// The program of its ranks with its arguments, shortened if long.
    pub command: String,
    /// The secret of the job.
    #[serde(with = "hex")]
    pub secret: Secret,
    launcher: Launcher,
}

/// A secret as text.
mod hex {
    use gradwire_proto::Secret;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(secret: &Secret, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&secret.to_hex())
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Secret, D::Error> {
        Secret::from_hex(&String::deserialize(from)?).map_err(D::Error::custom)
    }
}

/// Identifies a process even if a later one has its id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Launcher {
    pid: i32,
    /// When it started, in ticks since the machine's boot.
    start_time: u64,
    /// The machine and the namespace of the process id: several may share the folder.
    place: String,
}

impl Launcher {
    fn myself() -> io::Result<Self> {
        let stat = Process::myself().and_then(|me| me.stat()).map_err(io::Error::other)?;
        Ok(Self { pid: stat.pid, start_time: stat.starttime, place: place()? })
    }

    /// Whether the process runs. A zombie has ended.
    fn is_alive(&self) -> bool {
        let stat = Process::new(self.pid).and_then(|process| process.stat());
        stat.is_ok_and(|stat| stat.starttime == self.start_time && !"ZX".contains(stat.state))
    }
}

/// The boot of this machine and the namespace of process ids.
fn place() -> io::Result<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let namespace = fs::read_link("/proc/self/ns/pid")?;
    Ok(format!("{} {}", boot.trim(), namespace.display()))
}

impl RunningJob {
    /// A job that this process runs.
    ///
    /// # Errors
    /// If `/proc` does not describe this process.
    pub fn new(
        job: &str,
        secret: &Secret,
        coordinator: SocketAddr,
        (ranks, hosts): (u32, usize),
        command: &[String],
    ) -> io::Result<Self> {
        let command = command.join(" ").chars().take(MAX_COMMAND).collect();
        let launcher = Launcher::myself()?;
        Ok(Self {
            job: job.to_owned(),
            coordinator,
            ranks,
            hosts,
            command,
            secret: secret.clone(),
            launcher,
        })
    }
}

/// The file of a job, which is removed when this is dropped.
#[derive(Debug)]
pub struct RunFile {
    path: PathBuf,
}

impl RunFile {
    /// Writes the file of a job.
    ///
    /// # Errors
    /// The folder is not this user's alone, or the file can't be written.
    pub fn create(job: &RunningJob) -> io::Result<Self> {
        Self::create_in(&folder(), job)
    }

    /// Describes the job as it is in a later epoch.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn update(&self, job: &RunningJob) -> io::Result<()> {
        write_whole(&self.path, 0o600, content(job)?.as_bytes())
    }

    fn create_in(folder: &Path, job: &RunningJob) -> io::Result<Self> {
        // Removes the files of launchers that were killed (CLEAN). The list is not needed.
        let _ = running_in(folder);
        let path = path_in(folder, &job.job);
        let text = content(job)?;
        for _ in 0..TRIES {
            make_private(folder)?;
            match write_whole(&path, 0o600, text.as_bytes()) {
                // The last job of another launcher has ended.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => {
                    // A folder with other files stays.
                    let _ = fs::remove_dir(folder);
                    return Err(error);
                }
                Ok(()) => return Ok(Self { path }),
            }
        }
        Err(io::Error::other(format!("other launchers keep removing {}", folder.display())))
    }
}

fn content(job: &RunningJob) -> io::Result<String> {
    Ok(format!("{}\n", serde_json::to_string_pretty(job)?))
}

impl Drop for RunFile {
    fn drop(&mut self) {
        // If it is gone already, all is well. A folder with other files stays.
        let _ = fs::remove_file(&self.path);
        let _ = self.path.parent().map(fs::remove_dir);
    }
}

/// Removes a file of a launcher that was killed: a run file with its folder, if that is empty now.
pub(crate) fn remove(path: &Path) {
    let _ = fs::remove_file(path);
    if let Some(folder) = path.parent().filter(|parent| *parent == folder()) {
        let _ = fs::remove_dir(folder);
    }
}

/// The run file of a job.
pub(crate) fn path(job: &str) -> PathBuf {
    path_in(&folder(), job)
}

fn path_in(folder: &Path, job: &str) -> PathBuf {
    folder.join(format!("{job}.json"))
}

/// Writes a file at once: readers see the old or the new content, never a part.
pub(crate) fn write_whole(path: &Path, mode: u32, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("json.new");
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&new)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| fs::rename(&new, path));
    written.inspect_err(|_| {
        // The first error is the one to report.
        let _ = fs::remove_file(&new);
    })
}

/// The folder of this user's files; it exists while a job runs.
pub fn folder() -> PathBuf {
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    folder_in(runtime, &env::temp_dir())
}

/// The same, for these values of the environment.
fn folder_in(runtime: Option<PathBuf>, temporary: &Path) -> PathBuf {
    // After `su` the variable may name the folder of another user, and in a container one that does
    // not exist or can't be written.
    let is_mine = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|at| at.is_dir() && at.uid() == user())
            && access(path, Access::WRITE_OK | Access::EXEC_OK).is_ok()
    };
    match runtime.filter(|path| path.is_absolute() && is_mine(path)) {
        Some(runtime) => runtime.join("gradwire"),
        None => temporary.join(format!("gradwire-{}", user())),
    }
}

fn user() -> u32 {
    geteuid().as_raw()
}

/// Makes the folder, and checks that no other user made it or can change it (TRUST).
fn make_private(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => check_private(folder),
    }
}

fn check_private(folder: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(folder)?;
    let why = if !found.is_dir() {
        "it is not a folder".to_owned()
    } else if found.uid() != user() {
        format!("it belongs to user {}, not to {}", found.uid(), user())
    } else if found.mode() & 0o077 != 0 {
        format!("other users can access it: its mode is {:03o}, not 700", found.mode() & 0o777)
    } else {
        return Ok(());
    };
    let what = format!("{} is not safe: {why}; remove it", folder.display());
    Err(io::Error::new(ErrorKind::PermissionDenied, what))
}

/// The jobs of a folder, each sorted by id.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Jobs {
    /// The running ones.
    pub running: Vec<RunningJob>,
    /// The ids of those whose launcher was killed. Their files have been removed.
    pub killed: Vec<String>,
}

impl Jobs {
    /// Says in one line which files were removed; `None` if there were none.
    pub fn removed(&self) -> Option<String> {
        let [first, more @ ..] = &self.killed[..] else { return None };
        Some(match more {
            [] => format!("the launcher of job {first} was killed: removed the job's run file"),
            _ => format!(
                "the launchers of job {first} and {} more were killed: removed their run files",
                more.len()
            ),
        })
    }
}

/// The running jobs that this user has started on this machine. Removes the files of jobs that have
/// ended.
///
/// # Errors
/// The folder is not this user's alone, or can't be read.
pub fn running() -> io::Result<Jobs> {
    running_in(&folder())
}

/// As [`running`], in this folder.
///
/// # Errors
/// As there.
pub fn running_in(folder: &Path) -> io::Result<Jobs> {
    match check_private(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Jobs::default()),
        checked => checked?,
    }
    let place = place()?;
    let mut jobs = Jobs::default();
    for entry in fs::read_dir(folder)?.take(MAX_FILES) {
        let path = entry?.path();
        // A file that can't be read is from another release, or was removed just now.
        let Some(job) = read(&path).filter(|job| job.launcher.place == place) else { continue };
        if job.launcher.is_alive() {
            jobs.running.push(job);
        } else {
            drop(RunFile { path });
            jobs.killed.push(job.job);
        }
    }
    jobs.running.sort_by(|one, other| one.job.cmp(&other.job));
    jobs.killed.sort_unstable();
    Ok(jobs)
}

/// The job of a file; `None` if it does not describe one (TRUST).
fn read(path: &Path) -> Option<RunningJob> {
    if path.extension()? != "json" || !fs::symlink_metadata(path).ok()?.is_file() {
        return None;
    }
    let mut text = String::new();
    fs::File::open(path).ok()?.take(MAX_BYTES).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt, process::Command};

    use super::*;

    fn job(id: &str) -> RunningJob {
        let command = ["train".to_owned(), "x".repeat(200)];
        RunningJob::new(id, &Secret::generate(), "127.0.0.1:7".parse().unwrap(), (4, 2), &command)
            .unwrap()
    }

    #[test]
    fn a_job_is_listed_until_it_ends() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("gradwire");
        assert_eq!(running_in(&folder).unwrap(), Jobs::default());
        let [one, two] = ["j1", "j2"].map(job);
        let first = RunFile::create_in(&folder, &one).unwrap();
        let second = RunFile::create_in(&folder, &two).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&folder), mode(&first.path)), (0o700, 0o600));
        assert_eq!(one.command.chars().count(), MAX_COMMAND, "BOUND");
        let running = || running_in(&folder).unwrap().running;
        assert_eq!(running(), [one.clone(), two.clone()]);
        let later = RunningJob { ranks: 3, ..one };
        first.update(&later).unwrap();
        assert_eq!(running(), [later, two.clone()]);
        drop(first);
        assert_eq!(running(), [two]);
        drop(second);
        assert!(!folder.exists(), "CLEAN");
    }

    /// A process that has ended, one that started later with the same id, and one of another
    /// machine, whose file stays.
    #[test]
    fn the_file_of_a_killed_launcher_is_removed() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("gradwire");
        let mut child = Command::new("true").spawn().unwrap();
        let (mut ended, mut reused, mut elsewhere) = (job("a"), job("b"), job("c"));
        ended.launcher.pid = i32::try_from(child.id()).unwrap();
        child.wait().unwrap();
        reused.launcher.start_time += 1;
        elsewhere.launcher.place.push('x');
        for job in [&ended, &elsewhere, &reused] {
            std::mem::forget(RunFile::create_in(&folder, job).unwrap());
        }
        assert!(!folder.join("a.json").exists(), "the next launcher removes it");
        fs::write(folder.join("d.json"), "{\"job\": 1}").unwrap();
        let jobs = running_in(&folder).unwrap();
        assert_eq!((&jobs.running[..], &jobs.killed[..]), (&[][..], &["b".to_owned()][..]));
        let said = "the launcher of job b was killed: removed the job's run file";
        assert_eq!(jobs.removed().as_deref(), Some(said));
        let two = Jobs { killed: vec!["b".into(), "c".into()], ..jobs };
        let said = "the launchers of job b and 1 more were killed: removed their run files";
        assert_eq!(two.removed().as_deref(), Some(said));
        assert_eq!(running_in(&folder).unwrap().removed(), None);
        let left = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut left: Vec<_> = left.collect();
        left.sort();
        assert_eq!(left, ["c.json", "d.json"]);
    }

    #[test]
    fn an_unusable_runtime_folder_is_not_used() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("file");
        fs::write(&file, "").unwrap();
        let temporary = Path::new("/temporary");
        let fallback = temporary.join(format!("gradwire-{}", user()));
        let good = place.path().to_owned();
        assert_eq!(folder_in(Some(good.clone()), temporary), good.join("gradwire"));
        let mut bad = vec![PathBuf::new(), "relative".into(), "/none".into(), file];
        if user() != 0 {
            // Root can write everywhere.
            let closed = place.path().join("closed");
            DirBuilder::new().mode(0o500).create(&closed).unwrap();
            bad.push(closed);
        }
        for bad in bad {
            assert_eq!(folder_in(Some(bad.clone()), temporary), fallback, "{}", bad.display());
        }
        assert_eq!(folder_in(None, temporary), fallback);
    }

    #[test]
    fn a_folder_that_others_can_change_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let open = place.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
        let link = place.path().join("link");
        std::os::unix::fs::symlink(&open, &link).unwrap();
        for (folder, why) in [(&open, "its mode is 755, not 700"), (&link, "it is not a folder")] {
            for error in [
                RunFile::create_in(folder, &job("j")).unwrap_err(),
                running_in(folder).unwrap_err(),
            ] {
                assert!(error.to_string().contains(why), "TRUST: {error}");
            }
        }
        assert_eq!(fs::read_dir(&open).unwrap().count(), 0);
    }
}
