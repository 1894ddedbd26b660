//! Whole jobs as a user starts them: `gradwire run` with real daemons and processes, observed from
//! outside. After the end of each job, the tests search for everything that it might have left
//! behind (CLEAN).
//!
//! - [`Launch`]: what to start; [`Job`]: the running job; [`Report`]: how it ended
//! - [`processes`]: the live processes of a job
//! - [`programs`]: the programs under test, built if they are out of date
//! - [`network`]: two hosts made of network namespaces
//!
//! Every process of a job inherits a mark in its environment, and is found by it. No process is
//! found or ended by its name. Every wait in this module has a limit.

pub mod network;
pub mod processes;
pub mod programs;
mod report;

use std::{
    collections::{BTreeSet, HashSet},
    ffi::{OsStr, OsString},
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::fs::PermissionsExt,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread::{self, JoinHandle, sleep},
    time::{Duration, Instant},
};

use gradwire_launcher::run_file;
use rustix::{
    process::{Pid, Signal, geteuid, kill_process},
    time::{ClockId, clock_gettime},
};

use self::processes::{MARK, Process, Role, marked};
pub use self::report::{Line, Report, Said};

/// The time limit of a job, after which the test ends it.
const LIMIT: Duration = Duration::from_secs(90);

/// The interval between two checks of a condition.
const LOOK: Duration = Duration::from_millis(10);

/// `CLOCK_MONOTONIC` in microseconds, the same for all processes of a machine.
pub fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec * 1_000_000 + now.tv_nsec / 1000).unwrap_or_default()
}

/// Sends a signal to one process.
pub fn send_signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process id");
    kill_process(pid, signal).unwrap_or_else(|error| panic!("{signal:?} to {pid:?}: {error}"));
}

/// A job to be started, in its own folder.
#[derive(Debug)]
pub struct Launch {
    folder: tempfile::TempDir,
    mark: String,
    subcommand: &'static str,
    words: Vec<String>,
    command: Vec<String>,
    environment: Vec<(String, OsString)>,
    network: Option<String>,
    limit: Duration,
}

static JOBS: AtomicU32 = AtomicU32::new(0);

impl Launch {
    /// A job with default settings, except that its ranks have little memory.
    #[expect(clippy::new_without_default, reason = "it creates a folder")]
    pub fn new() -> Self {
        let number = JOBS.fetch_add(1, Ordering::Relaxed);
        let launch = Self {
            folder: tempfile::tempdir().expect("a temporary folder"),
            mark: format!("gwtest-{}-{number}-{}", std::process::id(), now_us()),
            subcommand: "run",
            words: Vec::new(),
            command: Vec::new(),
            environment: Vec::new(),
            network: None,
            limit: LIMIT,
        };
        launch.set("worker.arena_segment_bytes=1MiB")
    }

    /// Sets the number of ranks.
    #[must_use]
    pub fn ranks(self, ranks: u32) -> Self {
        self.words(&["-np", &ranks.to_string()])
    }

    /// Sets the hosts.
    #[must_use]
    pub fn hosts(self, hosts: &str) -> Self {
        self.words(&["-H", hosts])
    }

    /// Sets two nodes with two ranks each.
    #[must_use]
    pub fn two_by_two(self) -> Self {
        self.ranks(4).hosts("127.0.0.1:2,127.0.0.2:2")
    }

    /// Adds a setting.
    #[must_use]
    pub fn set(self, setting: &str) -> Self {
        self.words(&["--set", setting])
    }

    /// Checks the hosts without starting a job (`gradwire doctor`).
    #[must_use]
    pub fn doctor(mut self) -> Self {
        self.subcommand = "doctor";
        self
    }

    /// Adds options of `gradwire run`.
    #[must_use]
    pub fn words(mut self, words: &[&str]) -> Self {
        self.words.extend(words.iter().map(ToString::to_string));
        self
    }

    /// Adds an environment variable.
    #[must_use]
    pub fn variable(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Runs the launcher in this network namespace.
    #[must_use]
    pub fn in_network(mut self, namespace: &str) -> Self {
        self.network = Some(namespace.to_owned());
        self
    }

    /// Sets the time limit of the job.
    #[must_use]
    pub fn within(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Lets the ranks follow these steps; see `gradwire-test-rank`.
    #[must_use]
    pub fn rank(self, steps: &[&str]) -> Self {
        let program = programs::beside("gradwire-test-rank").display().to_string();
        self.program(&[&[program.as_str()], steps].concat())
    }

    /// Lets the ranks run this command.
    #[must_use]
    pub fn program(mut self, command: &[&str]) -> Self {
        self.command = command.iter().map(ToString::to_string).collect();
        self
    }

    /// The folder in which the whole job runs.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a program into that folder.
    pub fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder().join(name);
        fs::write(&path, text).expect("a script");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a script");
        path
    }

    /// Reaches hosts with this replacement for ssh. The script has `$host`, and the remote command
    /// as its remaining arguments.
    #[must_use]
    pub fn ssh(self, text: &str) -> Self {
        let script =
            format!("#!/bin/sh\nwhile [ \"$1\" = -o ]; do shift 2; done\nhost=$1; shift\n{text}\n");
        let ssh = self.script("fake-ssh", &script);
        let remote = programs::gradwire().display().to_string();
        self.set(&format!("launch.ssh={}", ssh.display()))
            .set(&format!("launch.remote_gradwire={remote}"))
    }

    /// Starts the job.
    pub fn start(self) -> Job {
        let gradwire = programs::gradwire();
        let mut command = match &self.network {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(gradwire);
                command
            }
            None => Command::new(gradwire),
        };
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("GRADWIRE_") {
                command.env_remove(name);
            }
        }
        command
            .arg(self.subcommand)
            .args(&self.words)
            .args((!self.command.is_empty()).then_some("--"))
            .args(&self.command)
            .current_dir(self.folder())
            .env(MARK, &self.mark)
            .env("TMPDIR", self.folder())
            // Puts the job's file into the folder for temporary files.
            .env_remove("XDG_RUNTIME_DIR")
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Its own group, so that it can be ended with all its processes.
            .process_group(0);
        let began_us = now_us();
        let mut launcher = command.spawn().expect("gradwire");
        let before = names_in(self.folder());
        let lines = Arc::new(Mutex::new(Vec::new()));
        let readers = vec![
            collect(launcher.stdout.take().map(|pipe| Box::new(pipe) as _), false, lines.clone()),
            collect(launcher.stderr.take().map(|pipe| Box::new(pipe) as _), true, lines.clone()),
        ];
        Job {
            launcher,
            began: Instant::now(),
            began_us,
            lines,
            readers,
            ids: Mutex::default(),
            before,
            orderly: true,
            launch: self,
        }
    }

    /// Runs the job to its end.
    pub fn run(self) -> Report {
        self.start().finish()
    }
}

type Lines = Arc<Mutex<Vec<Line>>>;

fn collect(pipe: Option<Box<dyn Read + Send>>, is_error: bool, lines: Lines) -> JoinHandle<()> {
    let began = Instant::now();
    thread::spawn(move || {
        let Some(pipe) = pipe else { return };
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&line).into_owned();
            let line = Line { after: began.elapsed(), is_error, text };
            lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
        }
    })
}

fn names_in(folder: &Path) -> HashSet<PathBuf> {
    fs::read_dir(folder).expect("the job's folder").flatten().map(|entry| entry.path()).collect()
}

/// A running job, which is ended if it is dropped early.
#[derive(Debug)]
pub struct Job {
    launch: Launch,
    launcher: Child,
    began: Instant,
    began_us: u64,
    lines: Lines,
    readers: Vec<JoinHandle<()>>,
    /// The ids of the job, read from its processes.
    ids: Mutex<BTreeSet<String>>,
    before: HashSet<PathBuf>,
    /// Whether the launcher itself cleans up, so that nothing remains when it ends.
    orderly: bool,
}

impl Job {
    /// The job's folder.
    pub fn folder(&self) -> &Path {
        self.launch.folder()
    }

    /// All output so far.
    pub fn lines(&self) -> Vec<Line> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the launcher has ended.
    pub fn has_ended(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.launcher.id()));
        stat.is_ok_and(|stat| stat.contains(") Z "))
    }

    /// The output after the first `count` lines.
    pub fn lines_after(&self, count: usize) -> Vec<Line> {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.get(count..).unwrap_or_default().to_vec()
    }

    /// The live processes of the job.
    pub fn processes(&self) -> Vec<Process> {
        let alive = marked(&self.launch.mark);
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        ids.extend(alive.iter().filter_map(|process| process.variable("GRADWIRE_JOB")));
        alive
    }

    /// Waits until `look` returns something. Panics with all output after the time limit.
    #[track_caller]
    pub fn wait_for<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(found) = look() {
                return found;
            }
            if self.began.elapsed() > self.launch.limit {
                panic!("{what} did not happen: {:#?}", self.lines());
            }
            sleep(LOOK);
        }
    }

    /// Waits until `ranks` ranks have printed a word; returns all lines with that word.
    #[track_caller]
    pub fn until_said(&self, word: &str, ranks: usize) -> Vec<Said> {
        self.wait_for(&format!("{ranks} times '{word}'"), || {
            let said: Vec<_> =
                self.lines().iter().filter_map(Line::said).filter(|s| s.word == word).collect();
            let who: BTreeSet<u32> = said.iter().map(|said| said.rank).collect();
            (who.len() >= ranks).then_some(said)
        })
    }

    /// The addresses of one kind (`grpc`, `metrics`, `data`) at which services listen, in the order
    /// of their log lines, which the launcher prints only with `--verbose`.
    pub fn served(&self, kind: &str) -> Vec<String> {
        let key = format!("\"{kind}\":\"");
        let lines = self.lines();
        let after = lines.iter().filter_map(|line| line.text.split_once(&key));
        after.filter_map(|(_, rest)| Some(rest.split_once('"')?.0.to_owned())).collect()
    }

    /// The process with a role.
    #[track_caller]
    pub fn process(&self, role: Role) -> Process {
        self.wait_for(&format!("{role:?}"), || {
            self.processes().into_iter().find(|process| process.role == Some(role))
        })
    }

    /// Sends a signal to the process with a role; returns the time just before, as [`now_us`].
    #[track_caller]
    pub fn signal(&mut self, role: Role, signal: Signal) -> u64 {
        let pid = match role {
            Role::Launcher => {
                self.orderly &= signal != Signal::KILL;
                // Remembers the job's id, which can't be read afterwards.
                drop(self.processes());
                self.launcher.id()
            }
            role => self.process(role).pid,
        };
        let at = now_us();
        send_signal(pid, signal);
        at
    }

    /// Creates a file in the job's folder, for ranks that wait with `until:name`.
    pub fn allow(&mut self, name: &str) {
        let path = self.folder().join(name);
        fs::write(&path, "").expect("a file");
        self.before.insert(path);
    }

    /// Waits for the launcher's end, and checks that nothing remains.
    #[track_caller]
    pub fn finish(self) -> Report {
        self.finish_and(|| {})
    }

    /// Like [`Job::finish`]; calls `look` before the folder is removed.
    #[track_caller]
    pub fn finish_and(mut self, look: impl FnOnce()) -> Report {
        let mut looked = Instant::now();
        let status = loop {
            if let Some(status) = self.launcher.try_wait().expect("the launcher") {
                break status;
            }
            if self.began.elapsed() > self.launch.limit {
                panic!("it did not end within {:?}: {:#?}", self.launch.limit, self.lines());
            }
            if looked.elapsed() > 10 * LOOK {
                // The job's id can be read only while the job runs.
                self.processes();
                looked = Instant::now();
            }
            sleep(LOOK);
        };
        let took = self.began.elapsed();
        self.assert_clean();
        look();
        for reader in self.readers.drain(..) {
            reader.join().expect("no panic in a reader");
        }
        Report { status, began_us: self.began_us, took, lines: self.lines() }
    }

    /// The traces of the job on this machine: processes, sockets, shared memory, files.
    pub fn traces(&self) -> Vec<String> {
        let mut left: Vec<String> =
            self.processes().iter().map(|process| format!("{process:?}")).collect();
        let ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
        let shared = names_in(Path::new("/dev/shm"));
        let shared: Vec<String> = shared.iter().map(|path| path.display().to_string()).collect();
        for id in &ids {
            let names = sockets.lines().chain(shared.iter().map(String::as_str));
            left.extend(names.filter(|line| line.contains(id)).map(ToOwned::to_owned));
        }
        // A killed launcher leaves the file of its job, which the next search for jobs removes.
        let run_files = format!("gradwire-{}", geteuid().as_raw());
        let _ = run_file::running_in(&self.folder().join(run_files));
        let files = names_in(self.folder());
        left.extend(files.difference(&self.before).map(|path| path.display().to_string()));
        left
    }

    /// CLEAN: no process, socket or file of the job remains: at once if the launcher has cleaned
    /// up, and soon if it was killed.
    #[track_caller]
    fn assert_clean(&self) {
        let began = Instant::now();
        loop {
            let left = self.traces();
            if left.is_empty() {
                return;
            }
            assert!(
                !self.orderly && began.elapsed() < self.launch.limit,
                "CLEAN: left behind: {left:#?}, of {:#?}",
                self.lines()
            );
            sleep(LOOK);
        }
    }

    /// Names a file that the job is expected to leave in its folder.
    pub fn leaves(&mut self, name: &str) {
        let path = self.folder().join(name);
        self.before.insert(path);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // After a panic, the job must not disturb other tests.
        let group = i32::try_from(self.launcher.id()).ok().and_then(Pid::from_raw);
        if self.launcher.try_wait().is_ok_and(|status| status.is_none())
            && let Some(group) = group
        {
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
        }
        let _ = self.launcher.wait();
        for process in marked(&self.launch.mark) {
            if let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}
