//! Every metric of the daemon, each declared once with its unit and meaning. Labels are bounded:
//! collectives, origins, hosts of the job, kinds of failure; never tensor names.

use std::time::Duration;

use gradwire_proto::{Collective, FailureKind, clock::Measured};
use gradwire_shm::control::Origin;
use metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

const SUBMISSIONS: &str = "gradwire_daemon_submissions_total";
const SETS: &str = "gradwire_daemon_process_sets";
const ALLOCATES: &str = "gradwire_daemon_allocate_requests_total";
const REDUCED: &str = "gradwire_daemon_published_bytes_total";
const OPERATIONS: &str = "gradwire_daemon_operations_total";
const OPERATION_SECONDS: &str = "gradwire_daemon_operation_seconds";
const QUEUE: &str = "gradwire_daemon_queued_tensors";
const WORKERS: &str = "gradwire_daemon_workers";
const SHARED: &str = "gradwire_daemon_shared_memory_bytes";
const SENT: &str = "gradwire_daemon_network_sent_bytes_total";
const RECEIVED: &str = "gradwire_daemon_network_received_bytes_total";
const REJECTED: &str = "gradwire_daemon_rejected_connections_total";
const FAILURES: &str = "gradwire_daemon_failures_total";
const ROUND_TRIP: &str = "gradwire_daemon_heartbeat_round_trip_seconds";
const CLOCK_OFFSET: &str = "gradwire_daemon_clock_offset_seconds";
const CLOCK_ERROR: &str = "gradwire_daemon_clock_offset_error_seconds";

/// Describes each metric to the recorder. Call this once, after the recorder is installed.
pub fn describe() {
    describe_counter!(
        SUBMISSIONS,
        Unit::Count,
        "Submissions of local ranks, by collective and by the larger call that they are a part of"
    );
    describe_gauge!(SETS, Unit::Count, "Process sets, that of all ranks included");
    describe_counter!(
        ALLOCATES,
        Unit::Count,
        "Times that a local rank had to make room for a result that it could not expect"
    );
    describe_counter!(REDUCED, Unit::Bytes, "Bytes of tensors that were completed on this node");
    describe_counter!(OPERATIONS, Unit::Count, "Operations (pieces) completed on this node");
    describe_histogram!(
        OPERATION_SECONDS,
        Unit::Seconds,
        "Time from the coordinator's order to the end of an operation on this node"
    );
    describe_gauge!(
        QUEUE,
        Unit::Count,
        "Tensors that local ranks have submitted and that are not done"
    );
    describe_gauge!(WORKERS, Unit::Count, "Local ranks that are attached");
    describe_gauge!(SHARED, Unit::Bytes, "Shared memory that local ranks have handed over");
    describe_counter!(SENT, Unit::Bytes, "Bytes sent to a peer's data plane, by the peer's host");
    describe_counter!(
        RECEIVED,
        Unit::Bytes,
        "Bytes received from a peer's data plane, by its host"
    );
    describe_counter!(REJECTED, Unit::Count, "Connections that did not pass their handshake");
    describe_counter!(FAILURES, Unit::Count, "Failures that ended tensors or the job, by kind");
    describe_histogram!(
        ROUND_TRIP,
        Unit::Seconds,
        "Round trip of a heartbeat to the coordinator and back, without the time at the coordinator"
    );
    describe_gauge!(
        CLOCK_OFFSET,
        Unit::Seconds,
        "How far this node's clock is ahead of the coordinator's"
    );
    describe_gauge!(CLOCK_ERROR, Unit::Seconds, "The most by which the clock offset may be wrong");
}

pub(crate) fn submission(collective: Collective, origin: Origin) {
    let collective = collective.name();
    if origin == Origin::Plain {
        counter!(SUBMISSIONS, "collective" => collective).increment(1);
    } else {
        let labels = [("collective", collective), ("origin", origin.name())];
        counter!(SUBMISSIONS, &labels).increment(1);
    }
}

pub(crate) fn process_sets(sets: usize) {
    gauge!(SETS).set(sets as f64);
}

pub(crate) fn allocate_request() {
    counter!(ALLOCATES).increment(1);
}

pub(crate) fn operation(bytes: u64, took: Duration) {
    counter!(OPERATIONS).increment(1);
    counter!(REDUCED).increment(bytes);
    histogram!(OPERATION_SECONDS).record(took.as_secs_f64());
}

pub(crate) fn queued(tensors: usize) {
    gauge!(QUEUE).set(tensors as f64);
}

pub(crate) fn workers(attached: usize, shared_bytes: u64) {
    gauge!(WORKERS).set(attached as f64);
    gauge!(SHARED).set(shared_bytes as f64);
}

pub(crate) fn moved(host: &str, sent: u64, received: u64) {
    counter!(SENT, "peer_host" => host.to_owned()).increment(sent);
    counter!(RECEIVED, "peer_host" => host.to_owned()).increment(received);
}

pub(crate) fn rejected_connection() {
    counter!(REJECTED).increment(1);
}

pub(crate) fn failure(kind: FailureKind) {
    counter!(FAILURES, "kind" => format!("{kind:?}")).increment(1);
}

/// A round trip, and the best estimate of the clock's offset.
pub(crate) fn heartbeat(round_trip: Duration, clock: Measured) {
    histogram!(ROUND_TRIP).record(round_trip.as_secs_f64());
    gauge!(CLOCK_OFFSET).set(clock.offset_ns as f64 / 1e9);
    gauge!(CLOCK_ERROR).set(clock.error.as_secs_f64());
}
