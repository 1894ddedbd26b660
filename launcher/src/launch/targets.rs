//! The way to each host of a job, also to hosts that join it later.

use std::{
    path::absolute,
    sync::{Mutex, MutexGuard, PoisonError},
};

use gradwire_services::launch::{Begin, Text};
use gradwire_settings::Settings;
use tokio::sync::mpsc;

use super::{
    job::events::Event,
    link::{self, Target},
    metrics_file,
    options::Options,
    places,
    plan::{Plan, Variables, forwarded},
};
use crate::{error::CommandError, reach::Way, run_file};

/// Makes targets for the links to agents.
#[derive(Debug)]
pub struct Targets {
    settings: Settings,
    /// The first order, without what depends on the host.
    begin: Begin,
    /// The variables of remote hosts.
    forwarded: Variables,
    /// Where the agent looks for the program.
    path: Option<String>,
    /// The files that an agent on this machine removes if this process is killed.
    leftovers: Vec<Text>,
    known: Mutex<Known>,
}

/// The hosts that are known by now.
#[derive(Debug, Default)]
struct Known {
    /// The agents on this machine, with the names of their hosts.
    local: Vec<(usize, String)>,
    /// A host that is another machine.
    remote: Option<String>,
}

impl Targets {
    /// The targets of a job.
    pub fn new(plan: &Plan, settings: &Settings, options: &Options) -> Self {
        let launch = &settings.launch;
        let begin = Begin {
            version: gradwire_proto::VERSION.to_owned(),
            host: String::new(),
            grace_ms: u64::try_from(launch.grace.as_millis()).unwrap_or(u64::MAX),
            silence_ms: 0,
            directory: options.directory.clone().into_os_string().into(),
            environment: Variables::new(),
            program: plan.program.clone(),
            gradwired: launch.gradwired.clone(),
            recorder: settings.recorder.directory.clone(),
            leftovers: Vec::new(),
        };
        let metrics_file =
            options.metrics_sd.as_deref().map(|sd| metrics_file::path(sd, &plan.job));
        let leftovers = [Some(run_file::path(&plan.job)), metrics_file];
        // An agent has another working directory.
        let leftovers = leftovers.into_iter().flatten().filter_map(|path| absolute(path).ok());
        Self {
            leftovers: leftovers.map(|path| path.into_os_string().into()).collect(),
            settings: settings.clone(),
            begin,
            forwarded: forwarded(&options.environment),
            path: plan.exported.get("PATH").cloned(),
            known: Mutex::default(),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The targets of the first hosts.
    ///
    /// # Errors
    /// [`CommandError`] if this program can't be found.
    pub async fn first(&self, plan: &Plan) -> Result<Vec<Target>, CommandError> {
        let names: Vec<_> = plan.nodes.iter().map(|node| node.host.clone()).collect();
        let local = places::are_local(&names).await;
        for ((agent, name), local) in names.iter().enumerate().zip(&local) {
            self.learn(agent, name, *local);
        }
        let hosts = names.iter().zip(local).enumerate();
        hosts.map(|(agent, (host, local))| self.target(agent, host, local)).collect()
    }

    /// The target of a host that joins the job. If it is the first that is another machine, hosts
    /// that are this machine get addresses that it can use.
    ///
    /// # Errors
    /// As [`Self::first`].
    pub async fn later(
        &self,
        agent: usize,
        host: &str,
        events: &mpsc::Sender<Event>,
    ) -> Result<Target, CommandError> {
        let is_local = places::is_local(host).await;
        let is_first_remote = !is_local && self.known().remote.is_none();
        self.learn(agent, host, is_local);
        if is_first_remote {
            let local = self.known().local.clone();
            for (node, name) in local {
                let address = places::local_address(&name, Some(host)).await;
                // The receiver is gone only at the end of the job.
                let _ = events.send(Event::Address { node, address }).await;
            }
        }
        self.target(agent, host, is_local)
    }

    fn learn(&self, agent: usize, host: &str, is_local: bool) {
        let mut known = self.known();
        if is_local {
            known.local.push((agent, host.to_owned()));
        } else {
            known.remote.get_or_insert_with(|| host.to_owned());
        }
    }

    fn target(&self, node: usize, host: &str, is_local: bool) -> Result<Target, CommandError> {
        let way = Way::new(host, is_local, &["agent"], &self.settings)?;
        let mut environment = if is_local { Variables::new() } else { self.forwarded.clone() };
        environment.extend(self.path.iter().map(|path| ("PATH".to_owned(), path.clone())));
        let begin = Begin {
            host: host.to_owned(),
            silence_ms: if is_local { 0 } else { link::SILENCE.as_secs() * 1000 },
            environment,
            leftovers: if is_local { self.leftovers.clone() } else { Vec::new() },
            ..self.begin.clone()
        };
        Ok(Target { node, way, remote: self.known().remote.clone(), begin })
    }
}
