//! Sends steps of a job to a collector as spans, by OTLP: each step whose number is a multiple of
//! `otlp.sample_steps` becomes one trace.
//!
//! Ranks know the numbers of their steps, so they record such a step from its start to its end, and
//! their daemons record meanwhile. Other steps are not recorded. The events of nodes arrive on the
//! thread `gw-spans` of the process with the coordinator. Nothing waits for it: events that it does
//! not read in time are lost, and so are steps that the collector does not accept in time (BOUND).
//!
//! - `step`: turns slices into complete steps; pure
//! - `message`: turns a step into messages of OTLP; pure
//! - this file: the thread

mod message;
mod step;
#[cfg(test)]
mod tests;

use std::{io, sync::Arc, time::Duration};

use gradwire_coordinator::Inspection;
use gradwire_proto::{VERSION, pb::TraceBatch};
use gradwire_services::otlp::collector::trace::v1::ExportTraceServiceRequest;
use gradwire_telemetry::{Collector, OtlpConfig, reactor};
use prost::Message as _;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, MissedTickBehavior, interval, timeout},
};

use self::{
    message::{Origin, requests},
    step::{Sampled, Steps},
};
use crate::trace::join::Joiner;

/// The interval between checks whether steps are complete.
const LOOK: Duration = Duration::from_millis(100);

/// How long the collector may take for one message, and for the rest when the job is over (WAIT).
const ANSWER: Duration = Duration::from_secs(10);
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// How many messages may wait for the collector (BOUND).
const WAITING: usize = 40;

/// The thread that sends spans.
#[derive(Debug)]
pub struct Spans(oneshot::Receiver<()>);

impl Spans {
    /// Sends each step of the job whose number is a multiple of `every`, until the job is over.
    ///
    /// # Errors
    /// If the system refuses a thread or a descriptor.
    pub fn start(inspection: Arc<Inspection>, otlp: OtlpConfig, every: u64) -> io::Result<Self> {
        let (end, ended) = oneshot::channel();
        let run = move || async move {
            let _end = end;
            send(&inspection, &otlp, every.max(1)).await;
        };
        reactor::start("gw-spans", run)?;
        Ok(Self(ended))
    }

    /// Waits, at most two seconds, until the rest of a finished job has been sent.
    pub async fn finish(self) {
        // The sender is dropped when the thread ends.
        let _ = timeout(2 * LAST_ANSWERS, self.0).await;
    }
}

async fn send(inspection: &Inspection, otlp: &OtlpConfig, every: u64) {
    let Some(collector) = otlp.connect() else { return };
    let (queue, messages) = mpsc::channel(WAITING);
    let (over, is_over) = watch::channel(false);
    let deliver = deliver(&collector, messages, is_over);
    let collect = async {
        collect(inspection, every, Outbox { queue, is_full: false }).await;
        let _ = over.send(true);
    };
    tokio::join!(collect, deliver);
}

/// Sends messages one after the other until the queue is closed.
async fn deliver(
    collector: &Collector,
    mut messages: mpsc::Receiver<ExportTraceServiceRequest>,
    mut is_over: watch::Receiver<bool>,
) {
    let late = async {
        // If the sender is gone, the job is over, too.
        let _ = is_over.wait_for(|is_over| *is_over).await;
        tokio::time::sleep(LAST_ANSWERS).await;
    };
    let deliver = async {
        while let Some(message) = messages.recv().await {
            collector.send_spans(message, ANSWER).await;
        }
    };
    tokio::select! { () = deliver => {} () = late => {} }
}

/// Messages for the collector.
struct Outbox {
    queue: mpsc::Sender<ExportTraceServiceRequest>,
    is_full: bool,
}

impl Outbox {
    /// Queues a step, if there is room for all of it.
    fn send(&mut self, step: &Sampled, origin: &Origin) {
        let messages = requests(step, origin);
        if messages.len() > self.queue.capacity() {
            if !std::mem::replace(&mut self.is_full, true) {
                let step = step.number;
                tracing::warn!(step, "steps are not sent as spans: the collector is too slow");
            }
            return;
        }
        self.is_full = false;
        messages.into_iter().for_each(|message| drop(self.queue.try_send(message)));
    }
}

/// Turns the events of nodes into messages, until the job is over.
async fn collect(inspection: &Inspection, every: u64, mut outbox: Outbox) {
    let Ok(mut parts) = inspection.sample() else { return };
    // Nodes record only once the world has formed, so it is known by now.
    let Some(Ok(mut part)) = parts.recv().await else { return };
    let Some(status) = inspection.look().await else { return };
    let mut joiner = Joiner::new(&status);
    let mut steps = Steps::new(every, joiner.hosts());
    let hosts = joiner.hosts().to_vec();
    let origin = Origin { job: status.job.clone(), epoch: status.epoch, version: VERSION, hosts };
    let began = Instant::now();
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut goes_on = false;
    loop {
        joiner.missed(part.lost_batches);
        // A batch that can't be decoded counts as lost (TRUST).
        match TraceBatch::decode(&part.batch[..]) {
            Ok(batch) => joiner.add(batch, |_, _| true),
            Err(_) => joiner.missed(1),
        }
        steps.add(joiner.take(), began.elapsed());
        if steps.goes_on() != goes_on {
            goes_on = !goes_on;
            inspection.samples(goes_on).await;
        }
        part = loop {
            let next = tokio::select! {
                next = parts.recv() => Some(next),
                _ = ticks.tick(), if steps.is_open() => None,
            };
            steps.note_missing(joiner.lost(), joiner.error_ns(), began.elapsed());
            for step in steps.finish(began.elapsed()) {
                outbox.send(&step, &origin);
            }
            match next {
                Some(Some(Ok(part))) => break part,
                None => {}
                // The job is over.
                Some(_) => {
                    joiner.end();
                    steps.add(joiner.take(), began.elapsed());
                    for step in steps.end() {
                        outbox.send(&step, &origin);
                    }
                    return;
                }
            }
        };
    }
}
