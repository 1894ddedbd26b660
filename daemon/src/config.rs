//! The configuration of a daemon: the job's part from the environment that the launcher sets, the
//! rest from the settings.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use gradwire_net::interfaces::{data_addresses, is_own};
use gradwire_proto::{JobId, Secret, beat::Limits};
use gradwire_settings::{
    Settings,
    variables::{VariableError, Variables},
};
use rustix::process::{Pid, getppid};

use crate::{
    model::{elastic::Elastic, job::JobIdentity},
    transport::{handshake::MAX_STREAMS, places::Choice},
};

/// The configuration of a daemon, made by [`DaemonConfig::from_env`].
#[derive(Debug, Clone)]
pub struct DaemonConfig {
    pub(crate) identity: JobIdentity,
    pub(crate) coordinator: SocketAddr,
    pub(crate) host: String,
    /// The address at which other nodes reach this one.
    pub(crate) address: IpAddr,
    /// Where it listens for other nodes: on one address of each interface that it uses.
    pub(crate) data_listen: Vec<SocketAddr>,
    /// How to find other addresses if this host loses these; `None` if they were set, or if others
    /// reach this host at an address that it does not have itself, as behind a NAT.
    pub(crate) data_choice: Option<Choice>,
    /// The process that has started this one.
    pub(crate) parent: Option<Pid>,
    pub(crate) slots: u32,
    pub(crate) order: u32,
    /// The numbers of nodes and ranks that the job must have, if they were given.
    pub(crate) expected: Option<(u32, u32)>,
    /// In an elastic job: the epoch, and the processes of this node.
    pub(crate) elastic: Option<Elastic>,
    pub(crate) rack: String,
    /// The workers' Unix socket: a path, or `@name` in the abstract namespace.
    pub(crate) socket: String,
    pub(crate) start_timeout: Duration,
    /// How long an earlier job may still have the coordinator's address.
    pub(crate) patience: Duration,
    /// How long a rank that was in an earlier epoch may take to attach.
    pub(crate) elastic_timeout: Duration,
    /// The longest interval between retransmissions on the stream to the coordinator.
    pub(crate) retransmission: Duration,
    pub(crate) grace: Duration,
    /// How long a data connection may take, with its handshake.
    pub(crate) connect_timeout: Duration,
    /// How long a piece may go without progress.
    pub(crate) progress_timeout: Duration,
    /// How long a broken data connection may be missing; `None` if the job fails when it was used.
    pub(crate) recovery: Option<Duration>,
    /// The number of connections of each lane with a peer.
    pub(crate) streams: u32,
    pub(crate) chunk_bytes: u64,
    /// How many threads may work on tensor bytes at once, with the lanes, if it was set.
    pub(crate) threads: Option<u32>,
    /// The size of socket buffers; 0: it adapts to the path.
    pub(crate) socket_buffer_bytes: usize,
    /// Empty: the system's, except bbr, and reno on loopback.
    pub(crate) congestion_control: String,
    pub(crate) streaming_bytes: u64,
    pub(crate) feedback_max_bytes: u64,
    pub(crate) max_segments: u32,
    /// How long the reader of the workers' rings spins before it sleeps.
    pub(crate) spin: Duration,
    pub(crate) max_in_flight: u32,
    pub(crate) stall_warning: Duration,
    /// The wait for local ranks after which the job ends; zero: never.
    pub(crate) stall_shutdown: Duration,
    /// The rate of this host's line in Mbit/s, if it was set.
    pub(crate) line_rate: Option<u32>,
    /// Every step with a multiple of this number is recorded; 0: none.
    pub(crate) sample_steps: u64,
    /// The folder for the flight recording, if it is saved.
    pub(crate) recorder_directory: Option<PathBuf>,
}

/// Results of at least this size, in bytes, bypass the cache: they would be evicted before the rank
/// reads them. About the L2 cache of two cores.
const STREAMING_BYTES: u64 = 4 << 20;

/// How long an earlier job may still have the addresses of this one. Tasks of another launcher may
/// form one job after the other at the same rendezvous, and an epoch of an elastic job follows
/// another one.
///
/// # Errors
/// [`VariableError`] if the variable is invalid.
pub fn patience(env: Variables<'_>) -> Result<Duration, VariableError> {
    if env.0.contains_key("GRADWIRE_PATIENCE_MS") {
        let text = "it must be a number of milliseconds";
        return env.parse("GRADWIRE_PATIENCE_MS", text).map(Duration::from_millis);
    }
    let is_elastic = env.0.contains_key("GRADWIRE_ELASTIC");
    Ok(if is_elastic { Duration::from_secs(2) } else { Duration::ZERO })
}

/// A multiple of the size of every element type, in bytes.
const WIDEST: u64 = 64;

const MAX_SLOTS: u32 = 4096;

impl DaemonConfig {
    /// Reads the job's part from variables and the rest from settings.
    ///
    /// # Errors
    /// [`VariableError`] names the variable and what is wrong with it.
    pub fn from_env(
        variables: &HashMap<String, String>,
        settings: &Settings,
    ) -> Result<Self, VariableError> {
        let env = Variables(variables);
        let job = env.read("GRADWIRE_JOB", JobId::new)?;
        let secret = env.secret("GRADWIRE_SECRET", Secret::from_hex)?;
        let address: IpAddr = env.parse("GRADWIRE_ADDRESS", "it must be an IP address")?;
        let slots: u32 = env.parse("GRADWIRE_SLOTS", "it must be a number")?;
        if slots > MAX_SLOTS {
            return Err(VariableError::Invalid {
                variable: "GRADWIRE_SLOTS",
                value: slots.to_string(),
                reason: format!("a node has at most {MAX_SLOTS} ranks, and a server has none"),
            });
        }
        Ok(Self {
            identity: JobIdentity { job, secret },
            coordinator: env.parse("GRADWIRE_COORDINATOR", "it must be ip:port")?,
            host: env.text("GRADWIRE_HOST")?.to_owned(),
            address,
            data_choice: match settings.data.listen {
                Some(listen) if !listen.ip().is_unspecified() || !is_own(address) => None,
                _ => Some(Choice::new(&settings.data.interface, variables)),
            },
            data_listen: match settings.data.listen {
                Some(listen) => vec![listen],
                None => {
                    let given = &settings.data.interface;
                    let own = data_addresses(given, variables, address).map_err(|error| {
                        let (variable, value) = ("data.interface", given.clone());
                        VariableError::Invalid { variable, value, reason: error.0 }
                    })?;
                    if let Some((name, text)) = own.ignored {
                        let what = "no interface of this host fits: it is ignored";
                        tracing::warn!(%name, %text, "{what}");
                    }
                    own.addresses.into_iter().map(|own| SocketAddr::new(own, 0)).collect()
                }
            },
            parent: getppid(),
            slots,
            order: env.parse("GRADWIRE_ORDER", "it must be a number")?,
            expected: match variables.contains_key("GRADWIRE_NODES") {
                true => Some((
                    env.parse("GRADWIRE_NODES", "it must be a number")?,
                    env.parse("GRADWIRE_RANKS", "it must be a number")?,
                )),
                false => None,
            },
            elastic: elastic(env, slots)?,
            rack: settings.node.rack.clone(),
            socket: env.text("GRADWIRE_SOCKET")?.to_owned(),
            start_timeout: settings.start.timeout,
            patience: patience(env)?,
            elastic_timeout: settings.elastic.timeout,
            retransmission: Limits::new(settings.heartbeat.interval, settings.heartbeat.timeout)
                .retransmission,
            grace: settings.launch.grace,
            connect_timeout: settings.data.connect_timeout,
            progress_timeout: settings.job.timeout,
            recovery: settings.recovery.enabled.then_some(settings.recovery.return_timeout),
            streams: settings.data.streams.min(MAX_STREAMS),
            // Rounded down to whole elements of every type.
            chunk_bytes: settings.data.chunk_bytes / WIDEST * WIDEST,
            threads: settings.data.threads.and_then(|threads| u32::try_from(threads).ok()),
            socket_buffer_bytes: usize::try_from(settings.data.socket_buffer_bytes)
                .unwrap_or(usize::MAX),
            congestion_control: settings.data.congestion_control.clone(),
            streaming_bytes: STREAMING_BYTES,
            feedback_max_bytes: settings.data.feedback_max_bytes,
            max_segments: settings.worker.max_segments,
            spin: settings.worker.spin_on(slots),
            max_in_flight: settings.worker.max_in_flight,
            stall_warning: settings.negotiation.stall_warning,
            stall_shutdown: settings.negotiation.stall_shutdown,
            line_rate: line_rate(settings),
            sample_steps: settings.otlp.sample_steps,
            recorder_directory: Some(&settings.recorder.directory)
                .filter(|directory| !directory.is_empty())
                .map(PathBuf::from),
        })
    }

    /// The epoch that challenges and joins name: 0 in a job with only one.
    pub(crate) fn named_epoch(&self) -> u64 {
        self.elastic.as_ref().map_or(0, |elastic| elastic.epoch.0)
    }

    /// The address at which others reach this host.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// The address of the coordinator.
    pub fn coordinator(&self) -> SocketAddr {
        self.coordinator
    }

    /// The job and the host, which are labels of all metrics.
    pub fn labels(&self) -> (String, String) {
        (self.identity.job.to_string(), self.host.clone())
    }
}

/// The epoch of an elastic job, with the processes of this node.
fn elastic(env: Variables<'_>, slots: u32) -> Result<Option<Elastic>, VariableError> {
    let Some(epoch) = env.epoch()? else { return Ok(None) };
    let survivors = env.parse("GRADWIRE_SURVIVORS", "it must be a number")?;
    let workers = |list: &str| {
        let numbers = list.split(',').filter(|_| !list.is_empty()).map(str::parse);
        let numbers = numbers.collect::<Result<Vec<u32>, _>>();
        Elastic::new(
            epoch,
            numbers.map_err(|_| "expected numbers with commas between".to_owned())?,
            survivors,
            slots,
        )
    };
    env.read("GRADWIRE_WORKERS", workers).map(Some)
}

/// The rate of this host's line in Mbit/s, if the settings contain it.
fn line_rate(settings: &Settings) -> Option<u32> {
    let common = settings.network.rate_mbit;
    let is_set = common != Settings::default().network.rate_mbit;
    let own = settings.node.line_mbit.and_then(|rate| u32::try_from(rate).ok());
    own.or(is_set.then_some(common))
}

#[cfg(test)]
mod tests {
    use gradwire_proto::Epoch;
    use gradwire_settings::Layers;

    use super::*;

    /// The variables of a daemon, with some more.
    fn variables(more: &[(&str, &str)]) -> HashMap<String, String> {
        let secret = "00".repeat(32);
        let job = [
            ("GRADWIRE_JOB", "job"),
            ("GRADWIRE_SECRET", secret.as_str()),
            ("GRADWIRE_ADDRESS", "127.0.0.1"),
            ("GRADWIRE_SLOTS", "1"),
            ("GRADWIRE_COORDINATOR", "127.0.0.1:1"),
            ("GRADWIRE_HOST", "here"),
            ("GRADWIRE_ORDER", "0"),
            ("GRADWIRE_SOCKET", "@socket"),
        ];
        let all = job.iter().chain(more);
        all.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    /// A host behind a NAT is reached at an address that it never has.
    #[test]
    fn only_an_address_of_its_own_can_be_lost() {
        for (listen, address, follows) in [
            ("", "127.0.0.1", true),
            ("127.0.0.1:0", "127.0.0.1", false),
            ("0.0.0.0:7000", "127.0.0.1", true),
            ("0.0.0.0:7000", "192.0.2.1", false),
        ] {
            let listens = !listen.is_empty();
            let flags = listens.then(|| format!("data.listen={listen}")).into_iter().collect();
            let settings = Settings::load(&Layers { flags, ..Layers::default() }).unwrap().settings;
            let given = variables(&[("GRADWIRE_ADDRESS", address)]);
            let config = DaemonConfig::from_env(&given, &settings).unwrap();
            assert_eq!(config.data_choice.is_some(), follows, "{listen} {address}");
        }
    }

    /// A chunk that ended within an element would lose the rest of the element.
    #[test]
    fn chunks_hold_whole_elements_of_every_type() {
        let flags = vec!["data.chunk_bytes=5001".to_owned()];
        let settings = Settings::load(&Layers { flags, ..Layers::default() }).unwrap().settings;
        let config = DaemonConfig::from_env(&variables(&[]), &settings).unwrap();
        assert_eq!(config.chunk_bytes, 4992);
        for &dtype in gradwire_proto::DType::ALL {
            assert!(config.chunk_bytes.is_multiple_of(dtype.size() as u64));
        }
    }

    #[test]
    fn an_elastic_daemon_has_an_epoch_and_workers() {
        let read = |more: &[(&str, &str)]| {
            let config = DaemonConfig::from_env(&variables(more), &Settings::default());
            config.map(|config| config.elastic).map_err(|error| error.to_string())
        };
        let elastic = ("GRADWIRE_ELASTIC", "1");
        let (epoch, known) = (("GRADWIRE_EPOCH", "3"), ("GRADWIRE_SURVIVORS", "1"));
        assert_eq!(read(&[("GRADWIRE_WORKERS", "5")]), Ok(None));
        let three = Elastic::new(Epoch(3), vec![5, 2], 1, 2).unwrap();
        let two = [elastic, epoch, known, ("GRADWIRE_SLOTS", "2"), ("GRADWIRE_WORKERS", "5,2")];
        assert_eq!(read(&two), Ok(Some(three)));
        let server = [elastic, epoch, known, ("GRADWIRE_SLOTS", "0"), ("GRADWIRE_WORKERS", "")];
        assert!(read(&server).is_ok_and(|elastic| elastic.is_some()));
        assert!(
            read(&[elastic, epoch, known]).unwrap_err().contains("GRADWIRE_WORKERS is not set")
        );
        for (workers, why) in [
            ("5,2", "expected as many numbers as GRADWIRE_SLOTS, which is 1"),
            ("5,", "expected numbers with commas between"),
            ("a", "expected numbers with commas between"),
        ] {
            let error = read(&[elastic, epoch, known, ("GRADWIRE_WORKERS", workers)]).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
