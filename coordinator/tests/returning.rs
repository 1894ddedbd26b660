//! Nodes whose streams to the coordinator break, with raw clients over real connections.

#[path = "sessions/client.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod client;

use std::time::Duration;

use client::{Node, Served, by_name};
use gradwire_proto::{
    Ending, FailureKind,
    pb::{self, coordinator_message::Message, node_message::Message as Say},
};
use tokio::time::sleep;
use tonic::Code;

async fn served(nodes: u32, limit: Duration) -> Served {
    Served::start(nodes, |config| config.engine.return_timeout = Some(limit)).await
}

/// A time limit that is not reached.
const LONG: Duration = Duration::from_secs(3600);

async fn submit(node: &Node, name: &str, rank: u32) {
    node.announce(vec![by_name(name, &[rank], 4)]).await;
}

/// Says that a node has `received` N messages.
async fn confirm(node: &Node, received: u64) {
    node.say(Say::Heartbeat(pb::Heartbeat { received, ..pb::Heartbeat::default() })).await;
}

fn kind(failure: &pb::Failure) -> FailureKind {
    gradwire_proto::Failure::from(failure.clone()).kind
}

/// ONE: what was lost with the stream comes again, and nothing comes twice.
#[tokio::test]
async fn a_node_continues_with_the_next_message() {
    let served = served(2, LONG).await;
    let mut nodes = served.world(2).await;
    for (rank, node) in (0..).zip(&nodes) {
        submit(node, "a", rank).await;
        submit(node, "b", rank).await;
    }
    let first = nodes[0].execute().await;
    nodes.pop().unwrap().breaks();
    // It has received only the world. It does not know whether its messages have arrived.
    let (mut node, count) = served.returned(1, 1, 1).await.unwrap();
    assert!(count <= 2, "{count}");
    for name in ["a", "b"].into_iter().skip(count as usize) {
        submit(&node, name, 1).await;
    }
    let again = node.execute().await;
    assert_eq!(again, first);
    let names = |execute: &pb::Execute| execute.registrations.len();
    let mut registered = names(&again);
    while registered < 2 {
        registered += names(&node.execute().await);
    }
    nodes[0].say(Say::Leave(pb::Leave { ranks: vec![0], absent: false })).await;
    node.say(Say::Leave(pb::Leave { ranks: vec![1], absent: false })).await;
    assert!(matches!(node.next().await, Message::Shutdown(_)));
    drop((node, nodes));
    assert_eq!(served.outcome().await, Ending::Finished);
}

#[tokio::test]
async fn a_node_returns_while_others_join() {
    let served = served(2, LONG).await;
    served.joined(1, 1).await.breaks();
    let (mut second, count) = served.returned(1, 1, 0).await.unwrap();
    assert_eq!(count, 0);
    let mut first = served.joined(0, 1).await;
    first.welcomed(&served.secret).await;
    // The world comes again, if it was lost.
    assert!(matches!(second.next().await, Message::World(_)));
    second.breaks();
    let (mut second, _) = served.returned(1, 2, 0).await.unwrap();
    assert!(matches!(second.next().await, Message::World(_)));
}

/// TRUST: the others go on.
#[tokio::test]
async fn other_streams_can_not_continue() {
    let served = served(2, LONG).await;
    let mut nodes = served.world(2).await;
    nodes.pop().unwrap().breaks();
    let (mut current, _) = served.returned(1, 3, 1).await.unwrap();
    for attempt in [1, 2, 3] {
        let status = served.returned(1, attempt, 1).await.err().unwrap();
        assert_eq!(status.code(), Code::AlreadyExists);
        let why = format!("stream {attempt} of node 1 (host host1) comes too late: stream 3 has");
        assert!(status.message().contains(&why), "{status}");
    }
    let change = async |change: &dyn Fn(&mut pb::Join)| {
        let mut node = served.open().await.unwrap();
        let mut join = pb::Join { attempt: 4, received: 1, ..served.join(&node, 1, 1) };
        change(&mut join);
        node.say(Say::Join(served.proven(&node, join))).await;
        node.receive().await.err().unwrap()
    };
    let status = change(&|join| join.epoch = 7).await;
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(status.message().contains("epoch 7"), "{status}");
    let status = change(&|join| join.host = "elsewhere".into()).await;
    assert!(status.message().contains("only the daemon that has joined may"), "{status}");
    let status = change(&|join| join.data_address = "127.0.0.1:7000".into()).await;
    let why = "nodes 'host0' and 'host1' have the same data address 127.0.0.1:7000";
    assert!(status.message().contains(why), "{status}");
    // The proof covers the counts.
    let mut node = served.open().await.unwrap();
    let join = pb::Join { attempt: 5, ..served.join(&node, 1, 1) };
    node.say(Say::Join(join)).await;
    assert_eq!(node.receive().await.err().unwrap().code(), Code::Unauthenticated);
    submit(&nodes[0], "w", 0).await;
    submit(&current, "w", 1).await;
    assert_eq!(current.execute().await, nodes[0].execute().await);
}

/// TELL: all nodes get one cause.
#[tokio::test]
async fn an_impossible_count_ends_the_job() {
    for returns in [true, false] {
        let served = served(2, LONG).await;
        let mut nodes = served.world(2).await;
        let mut wrong = nodes.pop().unwrap();
        if returns {
            wrong.breaks();
            wrong = served.returned(1, 1, 1000).await.unwrap().0;
        } else {
            confirm(&wrong, 1000).await;
        }
        for node in [&mut wrong, &mut nodes[0]] {
            let failure = node.aborted().await;
            assert_eq!(kind(&failure), FailureKind::Protocol);
            assert_eq!(failure.host, "host1");
            let what = "it counts 1000 received messages, but must have ";
            assert!(failure.what.contains(what), "{failure:?}");
        }
    }
}

#[tokio::test]
async fn a_node_that_stays_away_is_lost() {
    let served = served(2, Duration::from_millis(300)).await;
    let mut nodes = served.world(2).await;
    submit(&nodes[0], "w", 0).await;
    nodes.pop().unwrap().breaks();
    let failure = nodes[0].aborted().await;
    assert_eq!(kind(&failure), FailureKind::NodeLost);
    assert_eq!((failure.host.as_str(), failure.tensor.as_str()), ("host1", "w"));
    assert!(failure.what.contains("node 1 (rank 1) is lost"), "{failure:?}");
    assert!(failure.what.contains("was not made again within 300 ms"), "{failure:?}");
}

/// TELL: a stream that breaks at the end of the job.
#[tokio::test]
async fn a_node_gets_its_last_message_again() {
    let served = served(2, LONG).await;
    let mut nodes = served.world(2).await;
    let second = nodes.pop().unwrap();
    second.say(Say::Leave(pb::Leave { ranks: vec![1], absent: false })).await;
    nodes[0].say(Say::Leave(pb::Leave { ranks: vec![0], absent: false })).await;
    assert!(matches!(nodes[0].next().await, Message::Shutdown(_)));
    sleep(Duration::from_millis(100)).await;
    second.breaks();
    let (mut second, count) = served.returned(1, 1, 1).await.unwrap();
    assert_eq!(count, 1);
    assert!(matches!(second.next().await, Message::Shutdown(_)));
    drop((second, nodes));
    assert_eq!(served.outcome().await, Ending::Finished);
}

/// The coordinator tells its count before a node has kept too many messages.
#[tokio::test]
async fn counts_are_told_in_time() {
    let served = Served::start(1, |config| {
        config.engine.return_timeout = Some(LONG);
        config.engine.heartbeat_interval = Duration::from_secs(1000);
        config.engine.heartbeat_timeout = Duration::from_secs(3000);
    })
    .await;
    let mut node = served.world(1).await.pop().unwrap();
    for _ in 0..600 {
        confirm(&node, 1).await;
    }
    let mut told = Vec::new();
    while told.len() < 2 {
        if let Message::Heartbeat(heartbeat) = node.receive().await.unwrap() {
            told.push(heartbeat.received);
        }
    }
    assert_eq!(told, [256, 512]);
}
