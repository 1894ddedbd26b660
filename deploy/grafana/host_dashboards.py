"""The dashboards about hosts: their network and their daemons."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard
from panels import (
    HOSTS,
    Query,
    dashboard,
    increase,
    lines,
    matrix,
    number,
    percentiles,
    rate,
    times,
)

IN_USE = f'{HOSTS}, activity!="idle"'
LOST = f'{HOSTS}, kind="connection_lost"'
OPERATION = "gradwire_daemon_operation_seconds"
ROUND_TRIP = "gradwire_daemon_heartbeat_round_trip_seconds"
SENT = "gradwire_daemon_network_sent_bytes_total"
RECEIVED = "gradwire_daemon_network_received_bytes_total"
PUBLISHED = "gradwire_daemon_published_bytes_total"
OPERATIONS = "gradwire_daemon_operations_total"
FAILURES = "gradwire_daemon_failures_total"
REJECTED = "gradwire_daemon_rejected_connections_total"
SUBMISSIONS = "gradwire_daemon_submissions_total"
PACKETS = "gradwire_daemon_network_packets_total"
RETRANSMITS = "gradwire_daemon_network_retransmits_total"
PEER_ROUND_TRIP = "gradwire_daemon_network_round_trip_seconds"
LINE_RATE = "gradwire_daemon_line_rate_bytes"
LANES = "gradwire_daemon_lane_seconds_total"
THREADS = "gradwire_thread_cpu_seconds_total"
CONTRIBUTED = "gradwire_daemon_submitted_bytes_total"
TENSORS = "gradwire_daemon_operation_tensors_total"


def network() -> Dashboard:
    """The network traffic between nodes."""
    about = "The network traffic between the nodes of a job: rates, round trips and losses."
    made = dashboard("gradwire-network", "Gradwire / Network", about, with_ranks=False)
    mean = (
        f"sum by (host) ({rate(ROUND_TRIP + '_sum', HOSTS)}) "
        f"/ (sum by (host) ({rate(ROUND_TRIP + '_count', HOSTS)}) > 0)"
    )
    slowest = f"histogram_quantile(0.99, sum by (le) ({rate(ROUND_TRIP + '_bucket', HOSTS)}))"
    panels = [
        number(
            "Sent",
            "Bytes that the selected hosts send to their peers' data planes.",
            "Bps",
            Query(f"sum({rate(SENT, HOSTS)})"),
        ),
        number(
            "Received",
            "Bytes that the selected hosts receive from their peers' data planes.",
            "Bps",
            Query(f"sum({rate(RECEIVED, HOSTS)})"),
        ),
        number(
            "Slowest round trips",
            "The 99th percentile of the round trips of heartbeats to the coordinator.",
            "s",
            Query(slowest),
        ),
        number(
            "Coordinator responses",
            "Bytes that the coordinator sends to all nodes together.",
            "Bps",
            Query(f"sum({rate('gradwire_coordinator_message_bytes_total')})"),
        ),
        number(
            "Rejected connections",
            "Connections that failed their handshake, over the time range.",
            "none",
            Query(f"sum({increase(REJECTED, HOSTS)})"),
            bad_from=0.5,
        ),
        number(
            "Connection failures",
            "Failures of kind `connection_lost`, over the time range.",
            "none",
            Query(f"sum({increase(FAILURES, LOST)})"),
            bad_from=0.5,
        ),
        lines(
            "Share of the line: sent",
            "Bytes that a host sends for this job, as a share of its line rate. Near 100 %, the "
            "line is the bottleneck. Empty if the line rate is unknown: set network.rate_mbit.",
            "percentunit",
            Query(
                f"sum by (host) ({rate(SENT, HOSTS)}) / max by (host) ({LINE_RATE}{{{HOSTS}}})",
                "{{host}}",
            ),
        ),
        lines(
            "Share of the line: received",
            "Bytes that a host receives for this job, as a share of its line rate.",
            "percentunit",
            Query(
                f"sum by (host) ({rate(RECEIVED, HOSTS)}) / max by (host) ({LINE_RATE}{{{HOSTS}}})",
                "{{host}}",
            ),
        ),
        lines(
            "Retransmitted packets",
            "The share of retransmitted packets on the data connections of each link. Shows the "
            "ten links with the largest share.",
            "percentunit",
            Query(
                f"topk(10, sum by (host, peer_host) ({rate(RETRANSMITS, HOSTS)}) "
                f"/ (sum by (host, peer_host) ({rate(PACKETS, HOSTS)}) > 0))",
                "{{host}} to {{peer_host}}",
            ),
        ),
        lines(
            "Round trips to peers",
            "The longest round-trip time among the data connections of each link, as measured by "
            "the system, including queueing. Shows the ten slowest links.",
            "s",
            Query(
                f"topk(10, max by (host, peer_host) ({PEER_ROUND_TRIP}{{{HOSTS}}}))",
                "{{host}} to {{peer_host}}",
            ),
        ),
        lines(
            "Sent by host",
            "Bytes that each host sends to its peers' data planes.",
            "Bps",
            Query(f"sum by (host) ({rate(SENT, HOSTS)})", "{{host}}"),
        ),
        lines(
            "Received by host",
            "Bytes that each host receives from its peers' data planes.",
            "Bps",
            Query(f"sum by (host) ({rate(RECEIVED, HOSTS)})", "{{host}}"),
        ),
        matrix(
            "Sent from host to host",
            "Bytes per second from the row's host to the column's host.",
            "Bps",
            Query(f"sum by (host, peer_host) ({rate(SENT, HOSTS)}) > 0"),
            row="host",
            column="peer_host",
        ),
        lines(
            "Busiest links",
            "The ten host pairs with the highest traffic in one direction.",
            "Bps",
            Query(
                f"topk(10, sum by (host, peer_host) ({rate(SENT, HOSTS)}))",
                "{{host}} to {{peer_host}}",
            ),
        ),
        lines(
            "Bytes sent for each byte of an operation",
            "Bytes sent by a host per byte of its operations. It depends on the algorithm and the "
            "number of nodes: a ring of many nodes sends each byte twice.",
            "none",
            Query(
                f"sum by (host) ({rate(SENT, HOSTS)}) "
                f"/ (sum by (host) ({rate(PUBLISHED, HOSTS)}) > 0)",
                "{{host}}",
            ),
        ),
        lines(
            "Round trip of heartbeats by host",
            "Mean time from a daemon to the coordinator and back, without the time for which the "
            "coordinator held the heartbeat. A host far above the others has a slow link.",
            "s",
            Query(mean, "{{host}}"),
        ),
        times(
            "Round trips of heartbeats",
            "The distribution of the selected hosts' heartbeat round trips.",
            ROUND_TRIP,
            HOSTS,
        ),
        lines(
            "Clock offset by host",
            "How far the clock of each host is ahead of the coordinator's.",
            "s",
            Query(f"max by (host) (gradwire_daemon_clock_offset_seconds{{{HOSTS}}})", "{{host}}"),
            signed=True,
        ),
        lines(
            "Error of the clock offset by host",
            "The maximum error of the clock offset.",
            "s",
            Query(
                f"max by (host) (gradwire_daemon_clock_offset_error_seconds{{{HOSTS}}})",
                "{{host}}",
            ),
        ),
        lines(
            "Rejected connections by reason",
            "Connections that failed their handshake.",
            "cps",
            Query(
                f"sum by (host, reason) ({rate(REJECTED, HOSTS)})",
                "{{host}}: {{reason}}",
            ),
        ),
    ]
    for panel in panels:
        made.with_panel(panel)
    return made


def node() -> Dashboard:
    """The activity of each host's daemon."""
    about = "The activity of the daemons on the selected hosts."
    made = dashboard("gradwire-node", "Gradwire / Node", about, with_ranks=False)
    panels = [
        number(
            "Attached ranks",
            "Local ranks attached to the daemons.",
            "none",
            Query(f"sum(gradwire_daemon_workers{{{HOSTS}}})"),
        ),
        number(
            "Shared memory",
            "Shared memory that local ranks have handed over.",
            "bytes",
            Query(f"sum(gradwire_daemon_shared_memory_bytes{{{HOSTS}}})"),
        ),
        number(
            "Tensors under way",
            "Tensors that local ranks have submitted and that are not done.",
            "none",
            Query(f"sum(gradwire_daemon_queued_tensors{{{HOSTS}}})"),
        ),
        number(
            "Process sets",
            "Process sets, including the one of all ranks.",
            "none",
            Query(f"max(gradwire_daemon_process_sets{{{HOSTS}}})"),
        ),
        number(
            "Failures",
            "Failures that ended tensors or the job, over the time range.",
            "none",
            Query(f"sum({increase(FAILURES, HOSTS)})"),
            bad_from=0.5,
        ),
        number(
            "Reachable daemons",
            "Daemons whose metrics Prometheus can read.",
            "none",
            Query(f"sum(up{{{HOSTS}}})"),
        ),
        lines(
            "Operations by host",
            "Operations (pieces) completed on each node.",
            "ops",
            Query(f"sum by (host) ({rate(OPERATIONS, HOSTS)})", "{{host}}"),
        ),
        lines(
            "Data of operations by host",
            "Bytes of the operations completed on each node.",
            "Bps",
            Query(f"sum by (host) ({rate(PUBLISHED, HOSTS)})", "{{host}}"),
        ),
        lines(
            "Bytes of an operation by host",
            "Mean size of an operation. Many small operations mean that little is fused; the "
            "maximum is negotiation.piece_bytes.",
            "bytes",
            Query(
                f"sum by (host) ({rate(PUBLISHED, HOSTS)}) "
                f"/ (sum by (host) ({rate(OPERATIONS, HOSTS)}) > 0)",
                "{{host}}",
            ),
        ),
        lines(
            "Submissions of local ranks",
            "By collective and origin. The origin is `plain` for the collective itself, otherwise "
            "the call that it is a part of.",
            "cps",
            Query(
                f"sum by (collective, origin) ({rate(SUBMISSIONS, HOSTS)})",
                "{{collective}} ({{origin}})",
            ),
        ),
        lines(
            "Contributions of ranks by memory",
            "Bytes that local ranks contribute. Tensors in shared memory are not copied; tensors "
            "in ordinary memory are copied there, and their results back.",
            "Bps",
            Query(f"sum by (memory) ({rate(CONTRIBUTED, HOSTS)})", "{{memory}}"),
        ),
        lines(
            "Time of an operation by host",
            "Time from the coordinator's order to the end of an operation.",
            "s",
            *percentiles(OPERATION, HOSTS, by="host", name="{{host}}"),
        ),
        times(
            "Times of operations",
            "The distribution of operation times on the selected hosts.",
            OPERATION,
            HOSTS,
        ),
        lines(
            "Tensors under way by host",
            "Tensors that local ranks have submitted and that are not done.",
            "none",
            Query(f"sum by (host) (gradwire_daemon_queued_tensors{{{HOSTS}}})", "{{host}}"),
        ),
        lines(
            "Shared memory by host",
            "Shared memory that local ranks have handed over.",
            "bytes",
            Query(f"sum by (host) (gradwire_daemon_shared_memory_bytes{{{HOSTS}}})", "{{host}}"),
        ),
        lines(
            "Lane activity",
            "Mean number of lanes busy with each activity; the other lanes are idle.",
            "none",
            Query(
                f"sum by (activity) ({rate(LANES, IN_USE)})",
                "{{activity}}",
            ),
        ),
        lines(
            "Busy lanes by host",
            "The share of time for which the lanes of each host are busy. Near 100 %, they are the "
            "bottleneck: more lanes may help (data.lanes).",
            "percentunit",
            Query(
                f"sum by (host) ({rate(LANES, IN_USE)}) / sum by (host) ({rate(LANES, HOSTS)})",
                "{{host}}",
            ),
        ),
        lines(
            "Processor time by thread",
            "Cores that the threads of the daemons use.",
            "none",
            Query(f"sum by (thread) ({rate(THREADS, HOSTS)})", "{{thread}}"),
        ),
        lines(
            "Processor time by host",
            "Cores that each daemon uses.",
            "none",
            Query(f"sum by (host) ({rate('process_cpu_seconds_total', HOSTS)})", "{{host}}"),
        ),
        lines(
            "Memory of the daemon by host",
            "Resident memory, including the shared memory that the daemon has used.",
            "bytes",
            Query(f"max by (host) (process_resident_memory_bytes{{{HOSTS}}})", "{{host}}"),
        ),
        lines(
            "Memory of buffers",
            "Daemons' data buffers: results of pieces, and frames that arrive early.",
            "bytes",
            Query(
                f"sum by (host, buffer) (gradwire_daemon_memory_bytes{{{HOSTS}}})",
                "{{host}}: {{buffer}}",
            ),
        ),
        lines(
            "Pieces in flight and held frames",
            "Pieces that lanes exchange with other nodes, and frames that arrived before their "
            "pieces could take them.",
            "none",
            Query(f"sum(gradwire_daemon_pieces_in_flight{{{HOSTS}}})", "pieces in flight"),
            Query(f"sum(gradwire_daemon_held_frames{{{HOSTS}}})", "held frames"),
        ),
        lines(
            "Tensors of an operation by host",
            "Mean number of tensors per operation. Above one, tensors are fused.",
            "none",
            Query(
                f"sum by (host) ({rate(TENSORS, HOSTS)}) "
                f"/ (sum by (host) ({rate(OPERATIONS, HOSTS)}) > 0)",
                "{{host}}",
            ),
        ),
        lines(
            "File descriptors by host",
            "Open descriptors of each daemon, as a share of its limit.",
            "percentunit",
            Query(
                f"max by (host) (process_open_fds{{{HOSTS}}} / process_max_fds{{{HOSTS}}})",
                "{{host}}",
            ),
        ),
        lines(
            "Failures by kind",
            "Failures that ended tensors or the job. docs/runbooks.md explains the kinds.",
            "cps",
            Query(f"sum by (host, kind) ({rate(FAILURES, HOSTS)})", "{{host}}: {{kind}}"),
        ),
        lines(
            "Allocations for results by host",
            "How often local ranks had to allocate memory for a result of unexpected size.",
            "cps",
            Query(
                f"sum by (host) ({rate('gradwire_daemon_allocation_requests_total', HOSTS)})",
                "{{host}}",
            ),
        ),
    ]
    for panel in panels:
        made.with_panel(panel)
    return made
