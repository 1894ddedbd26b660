//! If the result of a rank has an unexpected size, the rank may be slow to make room for it: no
//! rank on another node waits for it.

use gradwire_daemon::Ending;
use gradwire_proto::{
    Collective, DType, Request, Shape,
    pb::{self, daemon_message::Message as Reply, worker_message::Message as ToDaemon},
};
use gradwire_tests::{
    cluster::{Cluster, Plan},
    raw::{RawWorker, submission},
};
use gradwire_worker::{AllgatherOptions, AllreduceOptions, ReduceOp};

/// One piece, larger than the buffers of sockets.
const BYTES: usize = 6 << 20;

#[test]
fn peers_do_not_wait_for_a_rank_that_makes_room() {
    let plan = Plan::patient(&[1, 1]).set("negotiation.piece_bytes=16MiB");
    let cluster = Cluster::start(&plan).unwrap();
    let first = cluster.start_ranks([0], |session| {
        let own = session.tensor(&vec![7u8; BYTES], &[BYTES]).unwrap();
        let options = AllgatherOptions::default().name("rows");
        let all = session.allgather(&own, options).unwrap();
        assert_eq!((all.rows, all.tensor.as_slice().len()), (vec![BYTES, 0], BYTES));
        // A later operation continues, too.
        session
            .allreduce_slice(&mut [1i32], AllreduceOptions::named("after").op(ReduceOp::Sum))
            .unwrap();
    });
    let mut raw = RawWorker::attach(&cluster, 1).unwrap();
    raw.add_segment(4096).unwrap();
    let nothing = Request::plain(Collective::Allgather, DType::U8, Shape::new(&[0]).unwrap());
    raw.submit(&submission(1, "rows", nothing)).unwrap();
    let Some((Reply::Allocate(asked), _)) = raw.receive().unwrap() else {
        panic!("expected to be asked for room");
    };
    assert_eq!((asked.ticket, &asked.outputs[0].shape), (1, &vec![BYTES as u64]));
    let sum = Request::allreduce(DType::I32, Shape::new(&[1]).unwrap(), ReduceOp::Sum);
    raw.submit(&submission(2, "after", sum)).unwrap();
    // This is done only once the other rank has continued without this one.
    assert_eq!(raw.completed().unwrap().ticket, 2);
    let segment = raw.add_segment(BYTES as u64).unwrap();
    let places = vec![pb::Place { segment, offset: 0 }];
    raw.socket.say(ToDaemon::Allocated(pb::Allocated { ticket: 1, places }), &[]).unwrap();
    assert_eq!(raw.completed().unwrap().ticket, 1);
    first.join().unwrap();
    raw.socket.say(ToDaemon::Detach(pb::Detach {}), &[]).unwrap();
    assert!(matches!(raw.receive().unwrap(), Some((Reply::Detached(_), _))));
    drop(raw);
    for ending in cluster.finish().unwrap() {
        assert_eq!(ending, Ending::Finished);
    }
}
