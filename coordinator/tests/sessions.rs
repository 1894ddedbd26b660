//! The coordinator over real connections, with raw clients that follow the protocol, or don't.

#[path = "sessions/client.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod client;

use std::time::{Duration, Instant};

use client::{LIMIT, Node, Served, by_id, by_name};
use gradwire_coordinator::{Health, Phase};
use gradwire_proto::{
    DType, Ending, FailureKind, PROTOCOL, Rank, Request, Secret, Shape,
    auth::Claim,
    pb::{self, coordinator_message::Message, node_message::Message as Say},
};
use gradwire_services::inspect_client::InspectClient;
use gradwire_settings::Settings;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::watch,
    time::{sleep, timeout},
};
use tonic::{Code, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

fn kind(failure: &pb::Failure) -> FailureKind {
    gradwire_proto::Failure::from(failure.clone()).kind
}

fn failed(outcome: &Ending) -> FailureKind {
    match outcome {
        Ending::Failed(failure) => failure.kind,
        Ending::Finished => panic!("the job did not fail"),
    }
}

#[tokio::test]
async fn a_job_runs_from_join_to_shutdown() {
    let (shown, mut health) = watch::channel(Health {
        phase: Phase::Forming,
        reason: String::new(),
        daemons: std::sync::Arc::default(),
    });
    let served = Served::start(2, |config| {
        config.engine.ranks = Some(3);
        config.engine.lanes = 4;
        config.health = Some(shown);
    })
    .await;
    // The slow node is the first by order; no node gets the world before it has joined.
    let mut second = served.joined(1, 1).await;
    let early = timeout(Duration::from_millis(200), second.receive.message()).await;
    assert!(early.is_err(), "{early:?}");
    assert_eq!(health.borrow_and_update().phase, Phase::Forming);
    assert!(health.borrow().reason.contains("missing: node 0"), "{:?}", health.borrow());
    let mut first = served.joined(0, 2).await;
    let worlds = [first.welcomed(&served.secret).await, second.welcomed(&served.secret).await];
    for (node, world) in worlds.iter().enumerate() {
        assert_eq!((world.node as usize, world.epoch, world.lanes), (node, 1, 4));
        let ranks: Vec<_> = world.nodes.iter().map(|n| (n.first_rank, n.slots)).collect();
        assert_eq!(ranks, [(0, 2), (2, 1)]);
    }
    health.wait_for(|health| health.phase == Phase::Running).await.unwrap();

    first.announce(vec![by_name("w", &[0, 1], 100)]).await;
    second.announce(vec![by_name("w", &[2], 100)]).await;
    let (a, b) = (first.execute().await, second.execute().await);
    assert_eq!(a, b);
    assert_eq!(a.registrations[0].name, "w");
    assert_eq!(a.operations[0].sequence, 1);
    let id = a.registrations[0].id;
    for node in [&mut first, &mut second] {
        node.done(&a).await;
        node.announce(vec![by_id(id)]).await;
    }
    let (a, b) = (first.execute().await, second.execute().await);
    assert_eq!(a, b);
    assert!(a.registrations.is_empty());
    assert_eq!(a.operations[0].segments[0].count, 100);
    for node in [&mut first, &mut second] {
        node.done(&a).await;
    }

    let mut tools = HealthClient::new(served.channel().await);
    let service = "gradwire.v1.Coordinator".to_owned();
    let check = tools.check(HealthCheckRequest { service }).await.unwrap().into_inner();
    assert_eq!(check.status(), ServingStatus::Serving);
    let mut inspect = InspectClient::new(served.channel().await);
    let status = loop {
        let status = inspect.status(pb::StatusRequest {}).await.unwrap().into_inner();
        if status.operations_done == 2 {
            break status;
        }
    };
    assert_eq!((status.job.as_str(), status.phase.as_str()), ("job", "running"));
    assert_eq!(status.nodes[1].host, "host1");

    first.say(Say::Leave(pb::Leave { ranks: vec![0, 1], absent: false })).await;
    second.say(Say::Leave(pb::Leave { ranks: vec![2], absent: false })).await;
    for mut node in [first, second] {
        assert!(matches!(node.next().await, Message::Shutdown(_)));
        node.ended().await;
    }
    assert_eq!(served.outcome().await, Ending::Finished);
    assert_eq!(health.borrow().phase, Phase::Finished);
}

async fn refused(served: &Served, node: &mut Node, join: pb::Join) -> tonic::Status {
    node.say(Say::Join(join)).await;
    let status = node.receive().await.expect_err("the node is refused");
    assert!(!served.cancel.is_cancelled());
    status
}

#[tokio::test]
async fn refused_nodes_are_told_why() {
    let served = Served::start(1, |_| {}).await;

    let mut node = served.open().await.unwrap();
    let mut join = served.join(&node, 0, 1);
    join.proof[7] ^= 1;
    let status = refused(&served, &mut node, join).await;
    assert_eq!(status.code(), Code::Unauthenticated);
    assert!(status.message().contains("GRADWIRE_SECRET"), "{status}");

    // A proof is for one challenge: it can't be replayed.
    let other = served.open().await.unwrap();
    let overheard = served.join(&other, 0, 1);
    let mut node = served.open().await.unwrap();
    let status = refused(&served, &mut node, overheard).await;
    assert_eq!(status.code(), Code::Unauthenticated);

    // A proof covers everything that the node says about itself.
    let mut node = served.open().await.unwrap();
    let join = pb::Join { slots: 2, ..served.join(&node, 0, 1) };
    assert_eq!(refused(&served, &mut node, join).await.code(), Code::Unauthenticated);

    let mut node = served.open().await.unwrap();
    let protocol = PROTOCOL + 1;
    let join = pb::Join { protocol, version: "0.2.0".into(), ..served.join(&node, 0, 1) };
    let status = refused(&served, &mut node, join).await;
    assert_eq!(status.code(), Code::FailedPrecondition);
    let expected = format!("gradwired 0.2.0 speaks protocol {protocol}");
    assert!(status.message().contains(&expected), "{status}");

    let mut node = served.open().await.unwrap();
    node.say(Say::Heartbeat(pb::Heartbeat::default())).await;
    let status = node.receive().await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("must be Join"), "{status}");

    // None of this has disturbed the job.
    let mut node = served.joined(0, 1).await;
    node.welcomed(&served.secret).await;
    served.cancel.cancel();
    assert_eq!(kind(&node.aborted().await), FailureKind::Cancelled);
    node.ended().await;
    assert_eq!(failed(&served.outcome().await), FailureKind::Cancelled);
}

#[tokio::test]
async fn the_number_of_strangers_is_limited() {
    let served = Served::start(1, |_| {}).await;
    let mut strangers = Vec::new();
    for _ in 0..64 {
        strangers.push(served.open().await.unwrap());
    }
    let status = served.open().await.err().expect("BOUND: too many strangers");
    assert_eq!(status.code(), Code::ResourceExhausted);
    drop(strangers);
    let waited = timeout(LIMIT, async {
        while served.open().await.is_err() {
            sleep(Duration::from_millis(10)).await;
        }
    });
    waited.await.expect("there is room again");
    let mut node = served.joined(0, 1).await;
    node.welcomed(&served.secret).await;
}

/// The first bytes of an HTTP/2 client: the preface and empty settings.
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// BOUND: connections do not use up the descriptors of the daemon that hosts the coordinator.
#[tokio::test]
async fn the_number_of_connections_is_limited() {
    let served = Served::start(1, |_| {}).await;
    let mut strangers = Vec::new();
    for _ in 0..300 {
        let mut stranger = TcpStream::connect(served.address).await.unwrap();
        stranger.write_all(HTTP2).await.unwrap();
        strangers.push(stranger);
    }
    let mut turned_away = 0;
    for stranger in &mut strangers {
        // An HTTP/2 server begins with its own settings.
        let read = timeout(LIMIT, stranger.read(&mut [0; 1])).await.expect("an answer");
        turned_away += usize::from(read.unwrap_or(0) == 0);
    }
    assert_eq!(turned_away, 300 - 129);
    drop(strangers);
    let waited = timeout(LIMIT, async {
        while Channel::from_shared(format!("http://{}", served.address))
            .unwrap()
            .connect()
            .await
            .is_err()
        {
            sleep(Duration::from_millis(10)).await;
        }
    });
    waited.await.expect("there is room again");
    let mut node = served.joined(0, 1).await;
    node.welcomed(&served.secret).await;
}

#[tokio::test]
async fn strangers_that_do_not_join_are_refused() {
    let served = Served::start(1, |config| config.join_timeout = Duration::from_millis(100)).await;
    let mut stranger = served.open().await.unwrap();
    let status = stranger.receive().await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert!(status.message().contains("no Join message within 100ms"), "{status}");
    // WAIT: a stranger does not delay the end of the job.
    let stranger = served.open().await.unwrap();
    served.cancel.cancel();
    assert_eq!(failed(&served.outcome().await), FailureKind::Cancelled);
    drop(stranger);
}

#[tokio::test]
async fn invalid_messages_end_the_job() {
    let name = |name: &str| by_name(name, &[0], 1);
    let with = |change: fn(&mut pb::Request)| {
        let mut announcement = by_name("w", &[0], 1);
        change(announcement.submitted[0].request.as_mut().unwrap());
        Say::Ready(pb::Ready { announcements: vec![announcement] })
    };
    let ready = |announcement| Say::Ready(pb::Ready { announcements: vec![announcement] });
    let cases: Vec<(Option<Say>, &str)> = vec![
        (None, "the message has no message"),
        (Some(with(|r| r.dtype = 99)), "element type has the unknown number 99"),
        (Some(with(|r| r.shape = vec![u64::MAX, 2])), "shape [18446744073709551615, 2]"),
        (Some(with(|r| r.prescale = f64::NAN)), "prescale: NaN"),
        (Some(ready(name("a\nb"))), "invalid tensor name \"a\\nb\""),
        (Some(ready(name(&"x".repeat(2000)))), "1 to 1024 bytes"),
        (Some(ready(by_id(5))), "announced the tensor id 5, which is not in use"),
        (Some(ready(by_name("w", &[1], 1))), "for rank 1, which is not its own"),
        (Some(ready(by_name("w", &[], 1))), "for 0 of its 1 ranks"),
        (Some(ready(pb::Announcement { process_set: 9, ..name("w") })), "unknown process set 9"),
        (Some(ready(pb::Announcement { tensor: None, ..name("w") })), "the message has no tensor"),
        (
            Some(ready(pb::Announcement {
                latest: Some(pb::Latest { local_rank: 1, waited_us: u64::MAX }),
                ..name("w")
            })),
            "named its local rank 1 as the last to submit a tensor, but has no such rank",
        ),
        (Some(Say::Done(pb::Done { sequences: vec![3] })), "reported operation 3 as done, but"),
        (
            Some(Say::Leave(pb::Leave { ranks: vec![1], absent: false })),
            "rank 1 left, which is not its own",
        ),
        (Some(Say::Failed(pb::Failed::default())), "the message has no failure"),
        (Some(Say::Join(pb::Join::default())), "only the first message of a stream"),
    ];
    for (message, text) in cases {
        let served = Served::start(2, |_| {}).await;
        let nodes = served.world(2).await;
        nodes[0].send.send(pb::NodeMessage { message }).await.unwrap();
        for mut node in nodes {
            let failure = node.aborted().await;
            assert_eq!(kind(&failure), FailureKind::Protocol, "{failure:?}");
            assert_eq!(failure.host, "host0");
            assert!(failure.what.contains(text), "{text}: {failure:?}");
            node.ended().await;
        }
        assert_eq!(failed(&served.outcome().await), FailureKind::Protocol);
    }
}

#[tokio::test]
async fn messages_above_the_limit_are_not_read() {
    let served = Served::start(2, |_| {}).await;
    let mut nodes = served.world(2).await;
    let name = "x".repeat(gradwire_proto::MAX_CONTROL_MESSAGE);
    nodes[0].announce(vec![by_name(&name, &[0], 1)]).await;
    let failure = nodes[1].aborted().await;
    assert_eq!(kind(&failure), FailureKind::NodeLost);
    assert!(failure.what.contains("too large"), "{failure:?}");
}

#[tokio::test]
async fn a_lost_node_is_named() {
    let served = Served::start(3, |_| {}).await;
    let mut nodes = served.world(3).await;
    for (rank, node) in (0..).zip(&mut nodes).take(2) {
        node.announce(vec![by_name("w", &[rank], 4)]).await;
    }
    drop(nodes.pop());
    for node in &mut nodes {
        let failure = node.aborted().await;
        assert_eq!(kind(&failure), FailureKind::NodeLost);
        assert_eq!((failure.host.as_str(), failure.tensor.as_str()), ("host2", "w"));
        assert!(failure.what.contains("node 2 (rank 2) is lost"), "{failure:?}");
    }
    drop(nodes);
    assert_eq!(failed(&served.outcome().await), FailureKind::NodeLost);
}

#[tokio::test]
async fn a_dead_worker_outranks_broken_connections() {
    let served = Served::start(2, |config| {
        config.engine.cause_window = Duration::from_secs(30);
    })
    .await;
    let mut nodes = served.world(2).await;
    let report = |kind: pb::FailureKind, rank| {
        let what = "it is gone".to_owned();
        let failure = pb::Failure { kind: kind.into(), what, rank, ..pb::Failure::default() };
        Say::Failed(pb::Failed { failure: Some(failure), ..pb::Failed::default() })
    };
    nodes[0].say(report(pb::FailureKind::ConnectionLost, None)).await;
    sleep(Duration::from_millis(50)).await;
    nodes[1].say(report(pb::FailureKind::WorkerLost, Some(1))).await;
    for node in &mut nodes {
        let failure = node.aborted().await;
        assert_eq!(kind(&failure), FailureKind::WorkerLost);
        assert_eq!((failure.rank, failure.host.as_str()), (Some(1), "host1"));
    }
}

/// The report of the earlier failure comes later, from a node whose messages take longer.
#[tokio::test]
async fn the_failure_noticed_first_is_the_cause() {
    let served = Served::start(2, |_| {}).await;
    let mut nodes = served.world(2).await;
    // By a heartbeat, the nodes know the coordinator's clock.
    let mut clocks = Vec::new();
    for node in &mut nodes {
        let now = loop {
            if let Message::Heartbeat(beat) = node.receive().await.unwrap() {
                break (beat.sent_ns, Instant::now());
            }
        };
        clocks.push(now);
        let round_trip_ns = 500_000_000;
        let beat = pb::Heartbeat { sent_ns: 1, round_trip_ns, ..pb::Heartbeat::default() };
        node.say(Say::Heartbeat(beat)).await;
    }
    let report = |rank: u32, ago_ms: u64| {
        let (sent_ns, received) = clocks[rank as usize];
        let now_ns = sent_ns + received.elapsed().as_nanos() as u64;
        let what = "it is gone".to_owned();
        let kind = pb::FailureKind::WorkerLost.into();
        let failure = pb::Failure { kind, what, rank: Some(rank), ..pb::Failure::default() };
        let noticed_ns = now_ns - ago_ms * 1_000_000;
        Say::Failed(pb::Failed { failure: Some(failure), noticed_ns })
    };
    nodes[0].say(report(0, 100)).await;
    sleep(Duration::from_millis(10)).await;
    nodes[1].say(report(1, 800)).await;
    for node in &mut nodes {
        assert_eq!(node.aborted().await.rank, Some(1));
    }
}

#[tokio::test]
async fn a_stopped_node_is_lost_after_the_timeout() {
    let served = Served::start(2, |config| {
        config.engine.heartbeat_interval = Duration::from_millis(100);
        config.engine.heartbeat_timeout = Duration::from_millis(1000);
    })
    .await;
    let mut nodes = served.world(2).await;
    let mut silent = nodes.pop().unwrap();
    let mut alive = nodes.pop().unwrap();
    let (mut beats, mut echoed, mut held) = (0, 0, Duration::ZERO);
    let mut said = Vec::new();
    let failure = loop {
        match alive.receive().await.unwrap() {
            Message::Heartbeat(beat) => {
                if beat.echo_ns > 0 {
                    // The coordinator holds an echo until its next heartbeat is due, which is a
                    // part of the round trip.
                    let away: Duration = Instant::elapsed(&said[beat.echo_ns as usize - 1001]);
                    let held_now = Duration::from_nanos(beat.held_ns);
                    assert!(held_now <= away, "{beat:?} was away for {away:?}");
                    held = held.max(held_now);
                }
                echoed = echoed.max(beat.echo_ns);
                beats += 1;
                let beat = pb::Heartbeat {
                    sent_ns: 1000 + beats,
                    echo_ns: beat.sent_ns,
                    ..pb::Heartbeat::default()
                };
                said.push(Instant::now());
                alive.say(Say::Heartbeat(beat)).await;
            }
            Message::Abort(abort) => break abort.failure.unwrap(),
            other => panic!("{other:?}"),
        }
    };
    assert!(beats >= 3 && echoed > 1000, "{beats} beats, {echoed} echoed");
    assert!(!held.is_zero(), "every echo came back at once");
    assert_eq!(kind(&failure), FailureKind::NodeLost);
    assert_eq!(failure.host, "host1");
    assert!(failure.what.contains("it has been silent for"), "{failure:?}");
    // The stopped node is also told, once it wakes up.
    assert_eq!(kind(&silent.aborted().await), FailureKind::NodeLost);
}

#[tokio::test]
async fn a_node_that_does_not_read_is_lost() {
    let served = Served::start(2, |config| {
        config.engine.heartbeat_timeout = LIMIT;
        config.grace = Duration::from_millis(200);
    })
    .await;
    let mut nodes = served.world(2).await;
    let deaf = nodes.pop().unwrap();
    let mut alive = nodes.pop().unwrap();
    // Each of these is answered with a failure, which takes one place in the queue.
    let shape = Shape::new(&[1]).unwrap();
    let impossible = pb::Request::from(&Request::broadcast(DType::F32, shape, Rank(99)));
    let announcement = |number: u32, rank| {
        let mut announcement = by_name(&format!("{number:0>1000}"), &[rank], 1);
        announcement.submitted[0].request = Some(impossible.clone());
        Say::Ready(pb::Ready { announcements: vec![announcement] })
    };
    for number in 0.. {
        let message = Some(announcement(number, 1));
        deaf.send.send(pb::NodeMessage { message }).await.unwrap();
        alive.say(announcement(number, 0)).await;
        match alive.next().await {
            Message::Execute(execute) => assert_eq!(execute.failures.len(), 1),
            Message::Abort(abort) => {
                let failure = abort.failure.unwrap();
                assert_eq!(failure.host, "host1");
                assert!(failure.what.contains("does not read its messages"), "{failure:?}");
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    // BOUND: the end of the job does not wait for it.
    drop(alive);
    assert_eq!(failed(&served.outcome().await), FailureKind::NodeLost);
    drop(deaf);
}

#[tokio::test]
async fn a_missing_node_is_named_at_the_timeout() {
    let served =
        Served::start(2, |config| config.engine.start_timeout = Duration::from_millis(300)).await;
    let mut node = served.joined(1, 1).await;
    let failure = node.aborted().await;
    assert_eq!(kind(&failure), FailureKind::Timeout);
    assert!(failure.what.contains("missing: node 0; joined: 1 (host1)"), "{failure:?}");
    node.ended().await;
    assert_eq!(failed(&served.outcome().await), FailureKind::Timeout);
}

#[tokio::test]
async fn invalid_configurations_are_refused() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let job = gradwire_proto::JobId::new("job").unwrap();
    let config = gradwire_coordinator::CoordinatorConfig::new(
        job,
        Secret::generate(),
        (0, 0),
        &Settings::default(),
    )
    .unwrap();
    let error = gradwire_coordinator::run(config, listener, Default::default()).await.unwrap_err();
    assert!(error.to_string().contains("nodes is 0"), "{error}");
}

/// Steps with ten thousand tensors, first by name, then by id. Names are long, so that the first
/// answer does not fit in one message.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_of_ten_thousand_tensors() {
    const TENSORS: usize = 10_000;
    let served = Served::start(2, |_| {}).await;
    let mut nodes = served.world(2).await;
    let names: Vec<String> = (0..TENSORS).map(|number| format!("{number:0>500}")).collect();
    let mut ids = Vec::new();
    for step in 0..4 {
        let start = Instant::now();
        for (rank, node) in (0..).zip(&mut nodes) {
            let announcements: Vec<pb::Announcement> = match step {
                0 => names.iter().map(|name| by_name(name, &[rank], 100)).collect(),
                _ => ids.iter().map(|id| by_id(*id)).collect(),
            };
            // A node's messages are limited, too.
            for part in announcements.chunks(2500) {
                node.announce(part.to_vec()).await;
            }
        }
        let (mut messages, mut seen) = (0, [0, 0]);
        for (node, seen) in nodes.iter_mut().zip(&mut seen) {
            let mut covered = 0;
            while covered < TENSORS {
                let execute = node.execute().await;
                messages += 1;
                node.done(&execute).await;
                for operation in &execute.operations {
                    *seen += operation.segments.iter().map(|segment| segment.count).sum::<u64>();
                    covered = (*seen / 100) as usize;
                }
                if ids.len() < TENSORS {
                    ids.extend(execute.registrations.iter().map(|registration| registration.id));
                }
            }
        }
        // ONE: every element of every tensor, on every node.
        assert_eq!(seen, [100 * TENSORS as u64; 2]);
        assert_eq!(ids.len(), TENSORS);
        println!("step {step}: {messages} messages, {:?}", start.elapsed());
    }
}

/// Prints the time of a negotiation, from the announcement to the answer on every node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensors_are_answered_in_one_round_trip() {
    let served = Served::start(2, |_| {}).await;
    let mut nodes = served.world(2).await;
    let mut times = Vec::new();
    for step in 0..200 {
        let start = Instant::now();
        for (rank, node) in (0..).zip(&nodes) {
            let tensor = if step == 0 { by_name("w", &[rank], 4) } else { by_id(0) };
            node.announce(vec![tensor]).await;
        }
        for node in &mut nodes {
            let execute = node.execute().await;
            assert_eq!(execute.operations.len(), 1);
            assert_eq!(execute.registrations.len(), usize::from(step == 0));
            assert_eq!(execute.operations[0].sequence, step + 1, "ORD");
            node.done(&execute).await;
        }
        times.push(start.elapsed());
    }
    times.sort_unstable();
    println!("median {:?}, 99 % {:?}", times[100], times[198]);
}

#[tokio::test]
async fn explanations_need_the_secret_of_the_job() {
    let served = Served::start(1, |_| {}).await;
    let mut inspect = InspectClient::new(served.channel().await);
    let refused = inspect.explain(pb::ExplainRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    for (secret, is_known) in [(Secret::generate(), false), (served.secret.clone(), true)] {
        let challenge = inspect.challenge(pb::ChallengeRequest {}).await.unwrap().into_inner();
        let pb::ViewerChallenge { nonce, job } = challenge;
        let proof = secret.prove(&Claim::View { challenge: &nonce, job: &job }).to_vec();
        let request = pb::ExplainRequest { stacks: false, save: false, nonce, proof };
        let explained = inspect.explain(request.clone()).await;
        assert_eq!(explained.is_ok(), is_known, "{explained:?}");
        assert!(inspect.explain(request).await.is_err(), "a challenge serves one call");
    }
    assert!(inspect.status(pb::StatusRequest {}).await.is_ok(), "anybody may see the status");
}
