//! The service of a host: starts its daemon, tells every task of the host how to attach, and stays
//! until the daemon has ended. If all tasks that have come are gone, it ends the daemon (CLEAN).

use std::{
    collections::HashMap,
    io::{self, ErrorKind, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::fd::OwnedFd,
    process::{ExitCode, Stdio},
    time::Duration,
};

use gradwire_proto::Secret;
use gradwire_services::launch::{HERE, ServiceReport, from_line};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    sync::watch,
    time::{interval, timeout},
};

use super::{
    byteps::BPSLAUNCH,
    given::RENDEZVOUS,
    known::Join,
    meeting::{Answer, Meeting},
};
use crate::{
    agent::host::{find_gradwired, source_towards},
    error::{CommandError, print_line},
    launch::places,
    outer,
};

/// The line after an answer.
pub(super) const END: &str = ".";

/// The interval at which the service looks whether tasks are left.
const LOOK: Duration = Duration::from_millis(500);

/// Serves the tasks of this host.
pub(super) async fn run(join: &Join<'_>) -> Result<ExitCode, CommandError> {
    let meeting = Meeting::open(&join.place()).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => {
            let first = join.placement.rank - join.placement.local;
            let what = format!("another process is rank {first} of job {} on this host", join.job);
            CommandError::failed(what).hint(
                "is the rank started twice, as by a launcher inside of another one, or does \
                 another job have the same variables?",
            )
        }
        _ => CommandError::failed(format!("the ranks of this host can't meet: {error}")),
    })?;
    let (mut daemon, answer) = match start(join).await {
        Ok((daemon, variables, _)) => (Some(daemon), Ok(variables)),
        Err(error) => {
            let hint =
                if error.hint.is_empty() { String::new() } else { format!("\n{}", error.hint) };
            (None, Err(format!("{}{hint}", error.what)))
        }
    };
    tell_starter(&answer);
    let mut tasks = Tasks::default();
    tasks.add(join.pid);
    let Some(daemon) = daemon.as_mut() else {
        // The other tasks of the host get the reason, too.
        let others = async {
            for _ in 1..join.placement.slots {
                meeting.next(&answer).await;
            }
        };
        let _ = timeout(join.settings.start.timeout, others).await;
        return Ok(ExitCode::FAILURE);
    };
    let mut look = interval(LOOK);
    loop {
        tokio::select! {
            _ = daemon.wait() => return Ok(ExitCode::SUCCESS),
            pid = meeting.next(&answer) => tasks.add(pid),
            _ = look.tick() => {
                if tasks.are_gone() {
                    let grace = join.settings.launch.grace;
                    if join.placement.nodes > 1 {
                        end(daemon, grace).await;
                    } else if timeout(grace, daemon.wait()).await.is_err() {
                        print_line(
                            "gradwire: all processes of the job have ended, and not all of them \
                             had called init()",
                        );
                        // It has nobody to tell.
                        let _ = daemon.kill().await;
                    }
                    return Ok(ExitCode::SUCCESS);
                }
            }
        }
    }
}

/// Writes the answer for the task that has started this service. It may be gone.
fn tell_starter(answer: &Answer) {
    let (sign, text) = match answer {
        Ok(text) => ('+', text.trim_end()),
        Err(text) => ('-', text.trim_end()),
    };
    let mut output = io::stdout();
    let _ = output.write_all(format!("{sign}{text}\n{END}\n").as_bytes());
    let _ = output.flush();
}

/// The processes of the tasks that have come, as long as they live.
#[derive(Debug, Default)]
struct Tasks(Vec<OwnedFd>);

impl Tasks {
    /// Adds a task, unless its process has ended.
    fn add(&mut self, pid: u32) {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        self.0.extend(pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()));
    }

    /// Whether all processes have ended.
    fn are_gone(&mut self) -> bool {
        // Such a descriptor becomes readable when its process ends.
        self.0.retain(|process| {
            let mut ended = [PollFd::new(process, PollFlags::IN)];
            !poll(&mut ended, Some(&Timespec::default())).is_ok_and(|count| count > 0)
        });
        self.0.is_empty()
    }
}

/// Ends the daemon after its ranks: it ends by itself when its last rank has left or is lost. After
/// `grace` it is asked to end, and after the same time again it is killed.
pub(super) async fn end(daemon: &mut Child, grace: Duration) {
    if timeout(grace, daemon.wait()).await.is_ok() {
        return;
    }
    if let Some(pid) = daemon.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::TERM);
    }
    if timeout(grace, daemon.wait()).await.is_err() {
        let _ = daemon.kill().await;
    }
}

/// The rank that the daemon has blamed for the end of the job; `None` as long as it has not.
pub(super) type Blamed = watch::Receiver<Option<u32>>;

/// Starts the daemon of this host. Returns the variables with which a rank attaches, as lines.
pub(super) async fn start(join: &Join<'_>) -> Result<(Child, String, Blamed), CommandError> {
    let limit = join.settings.start.timeout;
    let placement = &join.placement;
    let secret = join.secret.clone().unwrap_or_else(Secret::generate);
    let socket = format!("@gradwire-{}-{}", join.job, placement.node);
    let own_name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut variables = HashMap::from(
        [
            ("GRADWIRE_JOB", join.job.to_string()),
            ("GRADWIRE_SECRET", secret.to_hex()),
            ("GRADWIRE_SOCKET", socket),
        ]
        .map(|(name, value)| (name.to_owned(), value)),
    );
    let mut attach: Vec<_> =
        variables.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    attach.sort();
    attach.extend(placement.counts().map(|(name, number)| format!("{name}={number}\n")));
    attach.extend(join.of_ranks.iter().map(|(name, value)| format!("{name}={value}\n")));
    let mut set = |name: &str, value: String| variables.insert(name.to_owned(), value);
    set("GRADWIRE_HOST", own_name.clone());
    set("GRADWIRE_SLOTS", placement.slots.to_string());
    set("GRADWIRE_ORDER", placement.node.to_string());
    let address = match &join.rendezvous {
        None => IpAddr::from(Ipv4Addr::LOCALHOST),
        Some(rendezvous) if placement.node == 0 => {
            let own = match places::literal(&rendezvous.host) {
                Some(address) => address,
                // The name of a host is often a loopback address on this host itself.
                None => {
                    let other = placement.hosts.get(1).map_or("192.0.2.1", String::as_str);
                    places::local_address(&rendezvous.host, Some(other)).await
                }
            };
            if !places::is_ours(own) {
                let what = format!(
                    "{own}, where the hosts are to meet, is not an address of this host, which has \
                     rank 0"
                );
                let name = match placement.starter {
                    BPSLAUNCH => "DMLC_PS_ROOT_URI",
                    _ => RENDEZVOUS,
                };
                let hint = format!("set {name} to an address of this host, on all hosts");
                return Err(CommandError::failed(what).hint(hint));
            }
            set(
                "GRADWIRE_COORDINATOR__LISTEN",
                SocketAddr::from((own, rendezvous.port)).to_string(),
            );
            own
        }
        Some(rendezvous) => {
            let first = rendezvous.address(limit).await?;
            set("GRADWIRE_COORDINATOR", first.to_string());
            source_towards(first.ip()).ok_or_else(|| {
                let what = format!("no network leads to {first}, where the coordinator is to be");
                CommandError::failed(what)
            })?
        }
    };
    set("GRADWIRE_ADDRESS", address.to_string());
    // The other hosts compare them with the coordinator's. A server does not know the ranks.
    if placement.slots > 0 {
        set("GRADWIRE_NODES", placement.nodes.to_string());
        set("GRADWIRE_RANKS", placement.size.to_string());
    }
    if placement.node == 0 {
        set("GRADWIRE_SERVERS", placement.servers.to_string());
        set("GRADWIRE_COORDINATOR", HERE.to_owned());
    }
    set("GRADWIRE_PATIENCE_MS", patience(join).as_millis().to_string());
    let mut daemon = spawn(join, &variables)?;
    let ended = timeout(limit, serving(&mut daemon)).await;
    if let Ok(Some(blamed)) = ended {
        return Ok((daemon, attach.concat(), blamed));
    }
    let _ = daemon.kill().await;
    let how = match ended {
        Ok(_) => "ended before it was ready".to_owned(),
        Err(_) => format!("was not ready within {} s", limit.as_secs_f64()),
    };
    let what = format!("the daemon of host {own_name} {how}; see its output");
    Err(CommandError::failed(what))
}

/// How long the rendezvous may still belong to an earlier job. If tasks form several jobs, some
/// tasks may still be in the one before. If a scheduler starts a job again, its first run may still
/// be ending ([`end`]). The daemon gives up a little before this service does, so that it can say
/// why.
fn patience(join: &Join<'_>) -> Duration {
    let limit = join.settings.start.timeout.saturating_sub(Duration::from_secs(1));
    let before = 2 * join.settings.launch.grace + Duration::from_secs(4);
    if join.session > 0 { limit } else { before.min(limit) }
}

fn spawn(join: &Join<'_>, variables: &HashMap<String, String>) -> Result<Child, CommandError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let here = std::env::current_dir().unwrap_or_default();
    let gradwired = find_gradwired(&join.settings.launch.gradwired, &path, &here);
    let gradwired = gradwired.ok_or_else(|| {
        CommandError::failed("program 'gradwired' not found on this host")
            .hint("install gradwired beside gradwire, or set launch.gradwired")
    })?;
    let own = std::env::current_exe().map_err(|error| CommandError::system(&error))?;
    let mut command = Command::new(own);
    for name in outer::variables(|name| join.environment.contains_key(name)) {
        command.env_remove(name);
    }
    command
        .args(["exec-child", "--gently", &std::process::id().to_string()])
        .arg(gradwired)
        .envs(variables)
        // A process that starts the ranks tells the daemon how they end.
        .stdin(if join.placement.starts_ranks { Stdio::piped() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| CommandError::system(&error))
}

/// Waits until a daemon serves; `None` if it ends before.
async fn serving(daemon: &mut Child) -> Option<Blamed> {
    let mut lines = BufReader::new(daemon.stdout.take()?).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if let Ok(ServiceReport::Serving { .. }) = from_line(&line) {
            let (blame, blamed) = watch::channel(None);
            tokio::spawn(async move {
                // To its end: a closed pipe would be an error.
                while let Ok(Some(line)) = lines.next_line().await {
                    if let Ok(ServiceReport::Failed { failure }) = from_line(&line) {
                        blame.send_replace(failure.rank.map(|rank| rank.0));
                    }
                }
            });
            return Some(blamed);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_gone_when_their_processes_are() {
        let mut tasks = Tasks::default();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        tasks.add(child.id());
        assert!(!tasks.are_gone());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(tasks.are_gone());
        tasks.add(child.id());
        assert!(tasks.are_gone());
    }
}
