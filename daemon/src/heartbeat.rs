//! Heartbeats to and from the coordinator.

use std::{sync::Arc, time::Duration};

use gradwire_proto::{Failure, FailureKind};

use crate::{
    job::Ending,
    negotiate::{Outgoing, client::Pulse},
    node::Node,
};

/// Sends heartbeats and listens for the coordinator's, on a thread of its own (`gw-heartbeat`):
/// no load on the control runtime may look like death, and a stopped coordinator closes nothing.
pub(crate) fn start(node: &Arc<Node>, pulse: Arc<Pulse>) -> std::io::Result<()> {
    let node = Arc::downgrade(node);
    let beat = move || {
        loop {
            let Some(node) = node.upgrade() else { return };
            let world = node.job.world();
            if let Some(world) = &world {
                node.job.tell(Outgoing::Heartbeat);
                let silence = pulse.silence();
                if silence > world.heartbeat_timeout {
                    let what = format!(
                        "the coordinator at {} has been silent for {:.1} s",
                        node.config.coordinator,
                        silence.as_secs_f64()
                    );
                    let failure = Failure::new(FailureKind::CoordinatorLost, what)
                        .hint("it is stopped, or the network to the first host is down");
                    node.job.end(Ending::Failed(failure));
                }
            }
            drop(node);
            let interval = world.map_or(Duration::from_millis(100), |w| w.heartbeat_interval);
            std::thread::sleep(interval);
        }
    };
    std::thread::Builder::new().name("gw-heartbeat".into()).spawn(beat)?;
    Ok(())
}
