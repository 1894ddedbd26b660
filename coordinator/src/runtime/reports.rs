//! Reports of waits and of jobs that stand still: the nodes are asked what their ranks do, and the
//! answers go to viewers, to the ranks and to the log.

use std::{collections::BTreeSet, time::Duration};

use gradwire_proto::pb::{self, coordinator_message::Message};
use tokio::{sync::oneshot, time::Instant};

use super::Runtime;
use crate::{
    explanation::{self, Detail},
    metrics,
    model::{Event, Phase},
    watchdog::{Seen, Standstill},
};

impl Runtime {
    pub(super) fn ask(
        &mut self,
        viewer: Option<oneshot::Sender<pb::Explanation>>,
        reports: bool,
        save: bool,
    ) {
        for event in self.explain(viewer, reports, save) {
            self.step(event);
        }
    }

    /// Asks all nodes what their ranks do, for a viewer or for a report. Returns the loss of nodes
    /// that do not read their messages.
    pub(super) fn explain(
        &mut self,
        viewer: Option<oneshot::Sender<pb::Explanation>>,
        reports: bool,
        save: bool,
    ) -> Vec<Event> {
        let nodes = self.nodes.values().filter_map(|session| session.node);
        let question = self.explaining.ask(viewer, reports, save, nodes, Instant::now());
        question.map_or_else(Vec::new, |question| self.send_to_world(Message::Explain(question)))
    }

    /// Checks whether the job stands still. If it does, asks what its ranks do.
    pub(super) fn watch(&mut self) {
        let reports = self.reports();
        let mut ranks = reports.values().flat_map(|report| &report.ranks);
        self.is_paused = ranks.any(|rank| rank.paused);
        let now = Instant::now();
        if self.is_paused {
            self.meeting.restart(now);
            self.step(Event::Paused);
        }
        if self.engine.phase() != Phase::Running {
            return;
        }
        self.engine.count_lasting(&reports, self.start.elapsed());
        if self.meeting.is_due(now) {
            self.ask(None, false, false);
        }
        let seen = reports.iter().flat_map(|(node, report)| {
            let age = Duration::from_millis(report.age_ms);
            report.ranks.iter().map(move |rank| Seen::of((*node, rank), age))
        });
        if let Some(standstill) = self.watchdog.look(self.start.elapsed(), seen) {
            self.happened(standstill.text());
            metrics::stands_still();
            self.ask(None, false, false);
            self.explaining.add(standstill);
        }
    }

    /// Reports a standstill to all ranks, or ends the job with this report.
    fn stands_still(&mut self, standstill: &Standstill, explanation: &pb::Explanation) {
        if self.engine.phase() != Phase::Running {
            return;
        }
        let ranks = explanation::text(explanation, Detail::Standstill);
        let text = format!("{}\n{ranks}", standstill.text());
        if standstill.ends {
            return self.step(Event::StandsStill { what: text.trim_end().to_owned() });
        }
        tracing::warn!("{}", text.trim_end());
        let ranks = explanation.ranks.iter().map(|rank| rank.rank).collect();
        for event in self.send_to_world(Message::Stalled(pb::Stalled { text, ranks })) {
            self.step(event);
        }
    }

    /// Passes an explanation on, once the nodes have answered.
    pub(super) fn explained(&mut self, now: Instant) {
        let Some(answered) = self.explaining.close(now) else { return };
        let explanation = self.engine.explain(&answered.answers, self.start.elapsed());
        if answered.reports
            && self.engine.phase() == Phase::Running
            && let Some(due) = self.explaining.due(&explanation, self.stall_warning)
        {
            let text = explanation::text(&due, Detail::Report);
            tracing::warn!("{}", text.trim_end());
            let waiting: BTreeSet<u32> =
                due.waits.iter().flat_map(|wait| wait.waiting.iter().copied()).collect();
            let stalled = pb::Stalled { text, ranks: waiting.into_iter().collect() };
            for event in self.send_to_world(Message::Stalled(stalled)) {
                self.step(event);
            }
        }
        if let Some(failure) = self.meeting.look(&explanation, now) {
            self.step(Event::StaysAway { failure });
        }
        if let Some(standstill) = &answered.standstill {
            self.stands_still(standstill, &explanation);
        }
        for viewer in answered.viewers {
            // It may be gone.
            let _ = viewer.send(explanation.clone());
        }
    }
}
