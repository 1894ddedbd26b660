//! How a host is reached: the program that is started for it, here or through ssh or srun, and why
//! it did not answer.

use std::{collections::VecDeque, io, path::Path, process::Stdio};

use gradwire_settings::{Settings, Starter, layers};
use rustix::process::Pid;
use tokio::process::{Child, Command};

use crate::{
    allocation,
    error::{CommandError, limits_hint},
    outer, processes,
};

/// The words that start `gradwire` on another host. If the user named no path, a shell there looks
/// at the path of this program first: hosts often have the same folders, and a login without a
/// terminal has a short PATH. Programs other than ssh may not start a shell.
fn remote_words(settings: &Settings, by_slurm: bool) -> Vec<String> {
    match own_path(settings, by_slurm) {
        Some(own) => {
            let find = format!("p={own}; test -x $p || p=gradwire; exec $p \"$@\"");
            // ssh gives all words to a shell as one text.
            let find = if by_slurm { find } else { format!("'{find}'") };
            vec!["sh".to_owned(), "-c".to_owned(), find, "gradwire".to_owned()]
        }
        None => vec![settings.launch.remote_gradwire.clone()],
    }
}

/// The options of srun for a helper: one process beside the other steps of the allocation, with all
/// processors of the host.
const SRUN: [&str; 7] = [
    "srun",
    "--overlap",
    "--nodes=1",
    "--ntasks=1",
    "--cpu-bind=none",
    "--unbuffered",
    "--kill-on-bad-exit=0",
];

/// Variables of Slurm that would contradict these options.
const NOT_FOR_SRUN: [&str; 4] =
    ["SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_LABELIO"];

/// Whether srun starts programs on this host.
fn is_by_slurm(host: &str, settings: &Settings) -> bool {
    match settings.launch.starter {
        Starter::Srun => true,
        Starter::Ssh => false,
        Starter::Auto => {
            // A list that can't be read is an error only for a job without a list of its own.
            let found = allocation::find(&layers::text(std::env::vars_os()));
            found.is_ok_and(|found| found.is_some_and(|it| it.is_by_slurm(host)))
        }
    }
}

/// The program that reaches another host, with its arguments, and the words that start `gradwire`
/// there.
pub fn remote(host: &str, settings: &Settings) -> (Vec<String>, Vec<String>) {
    let launch = &settings.launch;
    let by_slurm = is_by_slurm(host, settings);
    let mut program: Vec<String> = if by_slurm {
        SRUN.map(str::to_owned).to_vec()
    } else {
        [&launch.ssh].into_iter().chain(&launch.ssh_args).cloned().collect()
    };
    program.push(if by_slurm { format!("--nodelist={host}") } else { host.to_owned() });
    (program, remote_words(settings, by_slurm))
}

/// The path of this program, if it is looked for on other hosts.
fn own_path(settings: &Settings, by_slurm: bool) -> Option<String> {
    let launch = &settings.launch;
    let is_ssh = by_slurm || Path::new(&launch.ssh).file_name() == Some("ssh".as_ref());
    let own = std::env::current_exe().ok()?.into_os_string().into_string().ok()?;
    // Other paths would have to be quoted for two shells.
    let is_plain = own.bytes().all(|b| b.is_ascii_alphanumeric() || b"/-_.+".contains(&b));
    (is_ssh && is_plain && launch.remote_gradwire == "gradwire").then_some(own)
}

/// The way to a host.
#[derive(Debug, Clone)]
pub struct Way {
    /// The host, as the user named it.
    pub host: String,
    /// Whether it is this machine.
    pub local: bool,
    /// The program and its arguments, without those for gradwire.
    program: Vec<String>,
    /// The arguments of gradwire there.
    words: Vec<String>,
    /// Where gradwire is looked for there, for texts.
    tried: String,
}

impl Way {
    /// The way to a host, where gradwire is started with `words`. All else that it needs is sent to
    /// its standard input; the command line is the same for every job (TRUST).
    ///
    /// # Errors
    /// [`CommandError`] if this program can't be found.
    pub fn new(
        host: &str,
        local: bool,
        words: &[&str],
        settings: &Settings,
    ) -> Result<Self, CommandError> {
        let launch = &settings.launch;
        let (program, mut rest) = if local {
            let own = std::env::current_exe().map_err(|error| {
                CommandError::failed(format!("can't find the gradwire program: {error}"))
            })?;
            (vec![own.to_string_lossy().into_owned()], Vec::new())
        } else {
            remote(host, settings)
        };
        rest.extend(words.iter().map(ToString::to_string));
        let by_slurm = program[0] == SRUN[0];
        let tried = match own_path(settings, by_slurm) {
            Some(own) => format!("{own} and the PATH of a login"),
            None => launch.remote_gradwire.clone(),
        };
        Ok(Self { host: host.to_owned(), local, program, words: rest, tried })
    }

    /// What ends if the connection does, for texts: the agent, or the program that reaches it.
    pub fn what(&self) -> &str {
        if self.local { "its agent" } else { &self.program[0] }
    }

    /// Starts the program that reaches the host, with pipes as its standard streams.
    ///
    /// # Errors
    /// The error and a hint.
    pub fn start(&self) -> Result<Reached, (String, String)> {
        let mut command = Command::new(&self.program[0]);
        for name in outer::variables(|name| std::env::var_os(name).is_some()) {
            command.env_remove(name);
        }
        if self.program[0] == SRUN[0] {
            for name in NOT_FOR_SRUN {
                command.env_remove(name);
            }
        }
        command
            .args(&self.program[1..])
            .args(&self.words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own: Ctrl-C is the launcher's to handle, not the agent's or ssh's.
            .process_group(0)
            .kill_on_drop(true);
        command.spawn().map(Reached).map_err(|error| self.not_started(&error))
    }

    fn not_started(&self, error: &io::Error) -> (String, String) {
        let (host, program) = (&self.host, &self.program[0]);
        let what = match self.local {
            true => format!("gradwire's agent on host {host} can't be started: {error}"),
            false => format!("host {host} can't be reached: {program} can't be run: {error}"),
        };
        let hint = match limits_hint(error) {
            Some(hint) => hint,
            None if self.local => "",
            None => "set launch.ssh to the program that reaches other hosts",
        };
        (what, hint.to_owned())
    }

    /// Why there was no first answer, and a hint: from the exit code, the output on standard error,
    /// and a line that was not an answer.
    pub fn unreachable(
        &self,
        code: Option<i32>,
        stderr: &VecDeque<String>,
        strange: Option<String>,
    ) -> (String, String) {
        let host = &self.host;
        // An agent that can't begin prints an error like every command.
        let own = stderr.iter().find_map(|line| line.strip_prefix("hint: "));
        let lines = stderr.iter().filter(|line| !line.starts_with("hint: "));
        let lines = lines.map(|line| line.strip_prefix("error: ").unwrap_or(line).trim());
        let text = lines.collect::<Vec<_>>().join("; ");
        let program = &self.program[0];
        let how = match (strange, text.as_str(), code) {
            (Some(strange), ..) => strange,
            (None, "", Some(code)) => format!("{program} ended with exit code {code}"),
            (None, "", None) => format!("{program} was killed"),
            (None, text, _) => text.to_owned(),
        };
        let hint = match (own, code) {
            (Some(hint), _) => hint.to_owned(),
            _ if self.local => String::new(),
            // A shell's exit codes for a program that it can't find or run.
            (None, Some(126 | 127)) => format!(
                "install gradwire there, or set launch.remote_gradwire to its path (tried: {})",
                self.tried
            ),
            _ => format!("`{} true` must work without a password", self.program.join(" ")),
        };
        let what = match self.local {
            true => format!("gradwire's agent on host {host} failed: {how}"),
            false => format!("host {host} can't be reached: {how}"),
        };
        (what, hint)
    }
}

/// The process that reaches a host: an agent, or ssh. If this is dropped before it ends, its
/// process group is killed and waited for (CLEAN), but not a shared connection that ssh has put
/// into the background.
#[derive(Debug)]
pub struct Reached(pub Child);

impl Drop for Reached {
    fn drop(&mut self) {
        // The id is gone once the end is known: another process may have the group's id by then.
        let group = self.0.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        if let Some(group) = group {
            processes::kill_group(group);
        }
    }
}
