"""The dashboards about a job as a whole: overview and stragglers."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from panels import (
    HOSTS,
    JOB,
    NODES,
    RANKS,
    Query,
    dashboard,
    increase,
    lines,
    number,
    percentiles,
    ranking,
    rate,
    rows,
    times,
)

RANK_LAG = "gradwire_coordinator_rank_lag_seconds_total"
RANK_LAST = "gradwire_coordinator_rank_last_total"
NODE_LAG = "gradwire_coordinator_node_lag_seconds_total"
RANK_WAIT = "gradwire_coordinator_rank_wait_seconds"
STEPS = "gradwire_daemon_rank_steps_total"
BLOCKED = "gradwire_daemon_rank_blocked_seconds_total"
IN_FLIGHT = "gradwire_daemon_rank_in_flight_seconds_total"
# Nodes may count the same tensors, and so may the coordinator: this is a lower bound.
STALLED = (
    f'max(label_replace(gradwire_coordinator_stalled_tensors{{{JOB}}}, "of", "coordinator", "", "")'
    f" or gradwire_daemon_stalled_tensors{{{JOB}}})"
)
STALLED_MEANS = (
    "At least this many tensors have waited longer than negotiation.stall_warning_ms for other "
    "nodes or for ranks of the same node. `gradwire status` and the log name the missing ranks."
)
NEGOTIATION = "gradwire_coordinator_negotiation_seconds"
OPERATION = "gradwire_daemon_operation_seconds"
SENT = "gradwire_daemon_network_sent_bytes_total"
PUBLISHED = "gradwire_daemon_published_bytes_total"
PHASES = ("gradwire_daemon_phase_seconds", "gradwire_coordinator_phase_seconds")
MOVED = "gradwire_daemon_moved_bytes_total"
FAILURES = "gradwire_daemon_failures_total"
SUBMISSIONS = "gradwire_daemon_submissions_total"


def overview() -> Dashboard:
    """A job's health and speed, and where its time goes."""
    about = "The health and speed of a Gradwire job, and what it waits for."
    made = dashboard("gradwire-overview", "Gradwire / Overview", about, with_ranks=True)
    panels = [
        number(
            "Nodes",
            "Nodes that have joined the job.",
            "none",
            Query(f"max(gradwire_coordinator_nodes{{{JOB}}})"),
        ),
        number(
            "Ranks",
            "Ranks of the complete world. 0 before it is complete.",
            "none",
            Query(f"max(gradwire_coordinator_ranks{{{JOB}}})"),
        ),
        number(
            "Reachable daemons",
            "Daemons whose metrics Prometheus can read. It should be the number of nodes.",
            "none",
            Query(f"sum(up{{{JOB}}})"),
        ),
        number(
            "Stalled tensors",
            STALLED_MEANS,
            "none",
            Query(STALLED),
            bad_from=1,
        ),
        number(
            "Failures",
            "Failures that ended tensors or the job, over the time range. Every affected daemon "
            "counts a failure.",
            "none",
            Query(f"sum({increase(FAILURES)})"),
            bad_from=0.5,
        ),
        number(
            "Alerts",
            "Alerts of this job that are firing.",
            "none",
            Query(f'count(ALERTS{{alertstate="firing", {JOB}}}) or vector(0)'),
            bad_from=1,
        ),
        lines(
            "Steps",
            "Steps of each rank, recorded by an optimizer, by ddp_hook with its last bucket, or by "
            "calls of mark_step().",
            "ops",
            Query(f"sum by (rank) ({rate(STEPS, RANKS)})", "rank {{rank}}"),
        ),
        lines(
            "Blocked in waits",
            "The share of time for which a rank waited for results: what communication and waiting "
            "for other ranks add to its steps.",
            "percentunit",
            Query(f"sum by (rank) ({rate(BLOCKED, RANKS)})", "rank {{rank}}"),
        ),
        lines(
            "Hidden communication",
            "The share of a rank's communication that is hidden behind its computation: the time "
            "with operations in flight for which it was not blocked.",
            "percentunit",
            Query(
                f"clamp_min(1 - sum by (rank) ({rate(BLOCKED, RANKS)}) "
                f"/ (sum by (rank) ({rate(IN_FLIGHT, RANKS)}) > 0), 0)",
                "rank {{rank}}",
            ),
        ),
        lines(
            "Time since the last step",
            "The time since each rank's last step. If a line keeps rising, the rank has stopped.",
            "s",
            Query(
                f"max by (rank) (gradwire_daemon_rank_since_step_seconds{{{RANKS}}})",
                "rank {{rank}}",
            ),
        ),
        lines(
            "Operations",
            "Operations (pieces) that the coordinator starts.",
            "ops",
            Query(f"sum({rate('gradwire_coordinator_operations_total')})", "operations"),
        ),
        lines(
            "Data of operations by host",
            "Bytes of the operations completed on each node.",
            "Bps",
            Query(f"sum by (host) ({rate(PUBLISHED, HOSTS)})", "{{host}}"),
        ),
        lines(
            "Ranks that others wait for",
            "The five ranks that others wait for the longest, as a share of time. Part of it may "
            "be hidden: ranks can compute while their tensors wait.",
            "percentunit",
            Query(f"topk(5, sum by (rank) ({rate(RANK_LAG, RANKS)}))", "rank {{rank}}"),
        ),
        lines(
            "Time of negotiation",
            "Time from the first announcement of a tensor to its first operation.",
            "s",
            *percentiles(NEGOTIATION, JOB),
        ),
        lines(
            "Time of an operation",
            "Time from the coordinator's order to the end of an operation on a node.",
            "s",
            *percentiles(OPERATION, HOSTS),
        ),
        lines(
            "Phases of operations",
            "Mean time of each phase: `gather` until all ranks of a node have submitted a tensor, "
            "`negotiate` until all nodes have, `credit` until its first operation starts, "
            "`transfer` until the result of an operation is complete, `publish` until the ranks "
            "have it.",
            "s",
            *(
                Query(
                    f"sum by (phase) ({rate(phases + '_sum')}) "
                    f"/ (sum by (phase) ({rate(phases + '_count')}) > 0)",
                    "{{phase}}",
                )
                for phases in PHASES
            ),
        ),
        lines(
            "Data by algorithm",
            "Bytes of completed operations, by collective and algorithm. Operations within one "
            "node need no algorithm.",
            "Bps",
            Query(
                f"sum by (collective, algorithm) ({rate(MOVED, HOSTS)})",
                "{{collective}}: {{algorithm}}",
            ),
        ),
        lines(
            "Tensors and operations at the coordinator",
            "Pending: not all nodes have announced the tensor. Queued: all ranks agree, and the "
            "tensor waits for credit. In flight: operations that not all nodes have completed.",
            "none",
            Query(f"max(gradwire_coordinator_pending_tensors{{{JOB}}})", "pending tensors"),
            Query(f"max(gradwire_coordinator_queued_tensors{{{JOB}}})", "queued tensors"),
            Query(STALLED, "stalled tensors"),
            Query(
                f"max(gradwire_coordinator_operations_in_flight{{{JOB}}})", "operations in flight"
            ),
        ),
        lines(
            "Data sent between nodes by host",
            "Bytes that each host sends to its peers' data planes.",
            "Bps",
            Query(f"sum by (host) ({rate(SENT, HOSTS)})", "{{host}}"),
        ),
        lines(
            "Submissions by collective",
            "Submissions of local ranks, by collective.",
            "cps",
            Query(f"sum by (collective) ({rate(SUBMISSIONS, HOSTS)})", "{{collective}}"),
        ),
        rows(
            "Services",
            "The services running on each host.",
            Query(f"gradwire_build_info{{{HOSTS}}}"),
            ["Time", "Value", "__name__", "gradwire_job", "instance", "job"],
        ),
        lines(
            "Disagreements",
            "Tensors whose ranks disagreed. The ranks receive a table of their requests.",
            "cps",
            Query(f"sum({rate('gradwire_coordinator_disagreements_total')})", "disagreements"),
        ),
    ]
    for panel in panels:
        made.with_panel(panel)
    return made


def stragglers() -> Dashboard:
    """The ranks and hosts that the others wait for."""
    about = "The ranks and hosts that the others wait for, and for how long."
    made = dashboard("gradwire-stragglers", "Gradwire / Stragglers", about, with_ranks=True)
    panels = [
        number(
            "Slowest rank",
            "The rank that others waited for the longest, over the time range.",
            "s",
            Query(f"topk(1, sum by (rank) ({increase(RANK_LAG)}))", "rank {{rank}}"),
        ),
        number(
            "Slowest host",
            "The host that others waited for the longest, over the time range.",
            "s",
            Query(f"topk(1, sum by (node_host) ({increase(NODE_LAG)}))", "{{node_host}}"),
        ),
        number(
            "Waits for ranks",
            "The share of time for which ranks waited for others. Waits for different ranks may "
            "overlap, so it may exceed 100 %.",
            "percentunit",
            Query(f"sum({rate(RANK_LAG)})"),
            bad_from=0.3,
        ),
        number(
            "Pending tensors",
            "Tensors that some nodes have announced and others have not.",
            "none",
            Query(f"max(gradwire_coordinator_pending_tensors{{{JOB}}})"),
        ),
        number(
            "Stalled tensors",
            STALLED_MEANS,
            "none",
            Query(STALLED),
            bad_from=1,
        ),
        number(
            "Ranks",
            "Ranks of the complete world.",
            "none",
            Query(f"max(gradwire_coordinator_ranks{{{JOB}}})"),
        ),
        lines(
            "Waits for each rank",
            "The share of time for which tensors waited for this rank, the last to submit them. A "
            "rank far above the others is a straggler.",
            "percentunit",
            Query(f"sum by (rank) ({rate(RANK_LAG, RANKS)})", "rank {{rank}}"),
        ),
        lines(
            "How often each rank is the last",
            "Tensors per second that waited at least a millisecond for this rank, the last to "
            "submit them.",
            "cps",
            Query(f"sum by (rank) ({rate(RANK_LAST, RANKS)})", "rank {{rank}}"),
        ),
        ranking(
            "Longest waits by rank",
            "The ten ranks that others waited for the longest, over the time range.",
            "s",
            Query(
                f"sort_desc(topk(10, sum by (rank) ({increase(RANK_LAG, RANKS)})))",
                "rank {{rank}}",
            ),
        ),
        lines(
            "Wait for each tensor by rank",
            "How long the others wait each time this rank is the last. Simultaneous waits count "
            "once, so the value is lower if many tensors wait at once.",
            "s",
            Query(
                f"sum by (rank) ({rate(RANK_LAG, RANKS)}) "
                f"/ (sum by (rank) ({rate(RANK_LAST, RANKS)}) > 0)",
                "rank {{rank}}",
            ),
        ),
        lines(
            "Waits for each host",
            "The share of time for which tensors waited for this host, the last to announce them. "
            "If a host is late with all its ranks, check the host.",
            "percentunit",
            Query(f"sum by (node_host) ({rate(NODE_LAG, NODES)})", "{{node_host}}"),
        ),
        lines(
            "Tensors that ranks of each host wait for",
            "Tensors that local ranks have submitted and that are not done. If others wait for a "
            "host, its own number is small and that of the others is large.",
            "none",
            Query(f"sum by (host) (gradwire_daemon_queued_tensors{{{HOSTS}}})", "{{host}}"),
        ),
        times(
            "Waits from the first rank to the last",
            "The distribution of the time from a tensor's submission by its first rank to that by "
            "its last one.",
            RANK_WAIT,
            JOB,
        ),
        lines(
            "Wait from the first rank to the last",
            "Time from a tensor's submission by its first rank to that by its last one.",
            "s",
            *percentiles(RANK_WAIT, JOB),
        ),
        times(
            "Times of negotiation",
            "The distribution of the time from a tensor's first announcement to its first "
            "operation. Two bands mean that some tensors wait for a late rank.",
            NEGOTIATION,
            JOB,
        ),
        lines(
            "Time of negotiation",
            "Time from the first announcement of a tensor to its first operation.",
            "s",
            *percentiles(NEGOTIATION, JOB),
        ),
    ]
    for panel in panels:
        made.with_panel(panel)
    return made
