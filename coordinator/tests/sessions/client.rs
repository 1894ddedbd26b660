//! A node as the coordinator sees it: a raw gRPC client that can also behave badly.

use std::{
    io::ErrorKind,
    net::{Shutdown, SocketAddr},
    time::Duration,
};

use gradwire_coordinator::{CoordinatorConfig, CoordinatorError, run};
use gradwire_proto::{
    DType, Ending, JobId, PROTOCOL, ReduceOp, Request, Secret, Shape, VERSION,
    auth::{Claim, nonce},
    pb::{self, coordinator_message::Message, node_message::Message as Say, tensor_ref::Tensor},
};
use gradwire_services::coordinator_client::CoordinatorClient;
use gradwire_settings::{ProbeEnabled, Settings};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinHandle,
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{
    Status, Streaming,
    transport::{Channel, Endpoint},
};
use tower::service_fn;

/// The time limit of every wait.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A coordinator on a free port of this machine.
pub(crate) struct Served {
    pub(crate) address: SocketAddr,
    pub(crate) secret: Secret,
    pub(crate) cancel: CancellationToken,
    running: JoinHandle<Result<Ending, CoordinatorError>>,
}

impl Served {
    pub(crate) async fn start(nodes: u32, change: impl FnOnce(&mut CoordinatorConfig)) -> Self {
        let secret = Secret::generate();
        let job = JobId::new("job").unwrap();
        let mut settings = Settings::default();
        settings.probe.enabled = ProbeEnabled::False;
        let mut config =
            CoordinatorConfig::new(job, secret.clone(), (nodes, 0), &settings).unwrap();
        // A raw stream does not come back.
        config.engine.return_timeout = None;
        change(&mut config);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let cancel = CancellationToken::new();
        let running = tokio::spawn(run(config, listener, cancel.clone()));
        Self { address, secret, cancel, running }
    }

    /// How the job ended.
    pub(crate) async fn outcome(self) -> Ending {
        timeout(LIMIT, self.running).await.expect("run returns").unwrap().unwrap()
    }

    fn endpoint(&self) -> Endpoint {
        let endpoint = Channel::from_shared(format!("http://{}", self.address)).unwrap();
        endpoint.initial_stream_window_size(65_535)
    }

    pub(crate) async fn channel(&self) -> Channel {
        self.endpoint().connect().await.unwrap()
    }

    /// Opens a stream and reads the challenge.
    pub(crate) async fn open(&self) -> Result<Node, Status> {
        let (send, messages) = mpsc::channel(64);
        let socket = std::net::TcpStream::connect(self.address).unwrap();
        let mut once = Some(socket.try_clone().unwrap());
        let connector = service_fn(move |_| {
            let socket = once.take().ok_or(ErrorKind::NotConnected);
            async {
                let socket = socket?;
                socket.set_nonblocking(true)?;
                std::io::Result::Ok(TokioIo::new(TcpStream::from_std(socket)?))
            }
        });
        let channel = self.endpoint().connect_with_connector(connector).await.unwrap();
        let mut client = CoordinatorClient::new(channel);
        let receive = client.session(ReceiverStream::new(messages)).await?.into_inner();
        let mut node = Node { send, receive, nonce: nonce(), challenge: Vec::new(), socket };
        match node.receive().await? {
            Message::Challenge(challenge) => {
                assert_eq!((challenge.protocol, challenge.version.as_str()), (PROTOCOL, VERSION));
                node.challenge = challenge.nonce;
                Ok(node)
            }
            other => panic!("{other:?} instead of a challenge"),
        }
    }

    /// The join message of node `order` with `slots` slots.
    pub(crate) fn join(&self, node: &Node, order: u32, slots: u32) -> pb::Join {
        let join = pb::Join {
            protocol: PROTOCOL,
            version: VERSION.to_owned(),
            job: "job".to_owned(),
            host: format!("host{order}"),
            data_address: format!("127.0.0.1:{}", 7000 + order),
            slots,
            order,
            rack: "r".to_owned(),
            line_mbit: 0,
            epoch: 0,
            attempt: 0,
            received: 0,
            metrics_address: format!("127.0.0.1:{}", 9401 + order),
            nonce: node.nonce.to_vec(),
            proof: Vec::new(),
        };
        self.proven(node, join)
    }

    /// The message with the proof for it.
    pub(crate) fn proven(&self, node: &Node, mut join: pb::Join) -> pb::Join {
        let claim = Claim::Join {
            challenge: &node.challenge,
            nonce: &join.nonce,
            job: &join.job,
            host: &join.host,
            data_address: &join.data_address,
            slots: join.slots,
            order: join.order,
            rack: &join.rack,
            metrics_address: &join.metrics_address,
            line_mbit: join.line_mbit,
            epoch: join.epoch,
            attempt: join.attempt,
            received: join.received,
        };
        join.proof = self.secret.prove(&claim).to_vec();
        join
    }

    /// Opens a stream and joins.
    pub(crate) async fn joined(&self, order: u32, slots: u32) -> Node {
        let node = self.open().await.unwrap();
        let join = self.join(&node, order, slots);
        node.say(Say::Join(join)).await;
        node
    }

    /// Opens another stream for a node that has joined and `received` N messages. Reads the count
    /// of the coordinator; `Err` if it refuses.
    pub(crate) async fn returned(
        &self,
        order: u32,
        attempt: u32,
        received: u64,
    ) -> Result<(Node, u64), Status> {
        let mut node = self.open().await?;
        let join = pb::Join { attempt, received, ..self.join(&node, order, 1) };
        node.say(Say::Join(self.proven(&node, join))).await;
        match node.receive().await? {
            Message::Resumed(pb::Resumed { received, proof }) => {
                let claim = Claim::Resumed { nonce: &node.nonce, job: "job", epoch: 1, received };
                assert!(self.secret.verify(&claim, &proof));
                Ok((node, received))
            }
            other => panic!("{other:?} instead of the coordinator's count"),
        }
    }

    /// A complete world of nodes with one slot each.
    pub(crate) async fn world(&self, nodes: u32) -> Vec<Node> {
        let mut all = Vec::new();
        for order in 0..nodes {
            all.push(self.joined(order, 1).await);
        }
        for node in &mut all {
            node.welcomed(&self.secret).await;
        }
        all
    }
}

/// One stream.
pub(crate) struct Node {
    pub(crate) send: mpsc::Sender<pb::NodeMessage>,
    pub(crate) receive: Streaming<pb::CoordinatorMessage>,
    nonce: [u8; 32],
    challenge: Vec<u8>,
    socket: std::net::TcpStream,
}

impl Node {
    /// Breaks the connection, without the end of the stream.
    pub(crate) fn breaks(self) {
        self.socket.shutdown(Shutdown::Both).unwrap();
    }

    pub(crate) async fn say(&self, message: Say) {
        self.send.send(pb::NodeMessage { message: Some(message) }).await.unwrap();
    }

    /// The next message; `Err` if the stream ended with an error.
    pub(crate) async fn receive(&mut self) -> Result<Message, Status> {
        let message = timeout(LIMIT, self.receive.message()).await.expect("a message in time")?;
        Ok(message.expect("the stream is open").message.expect("a message"))
    }

    /// The next message that is not a heartbeat.
    pub(crate) async fn next(&mut self) -> Message {
        loop {
            match self.receive().await.unwrap() {
                Message::Heartbeat(_) => {}
                message => return message,
            }
        }
    }

    /// Reads the world and checks that the coordinator knows the secret.
    pub(crate) async fn welcomed(&mut self, secret: &Secret) -> pb::World {
        match self.next().await {
            Message::World(world) => {
                let claim = Claim::World { nonce: &self.nonce, job: "job", epoch: world.epoch };
                assert!(secret.verify(&claim, &world.proof));
                world
            }
            other => panic!("{other:?} instead of the world"),
        }
    }

    pub(crate) async fn execute(&mut self) -> pb::Execute {
        match self.next().await {
            Message::Execute(execute) => execute,
            other => panic!("{other:?} instead of operations"),
        }
    }

    pub(crate) async fn aborted(&mut self) -> pb::Failure {
        match self.next().await {
            Message::Abort(abort) => abort.failure.expect("a failure"),
            other => panic!("{other:?} instead of an abort"),
        }
    }

    pub(crate) async fn announce(&self, announcements: Vec<pb::Announcement>) {
        self.say(Say::Ready(pb::Ready { announcements })).await;
    }

    pub(crate) async fn done(&self, execute: &pb::Execute) {
        let sequences = execute.operations.iter().map(|operation| operation.sequence).collect();
        self.say(Say::Done(pb::Done { sequences })).await;
    }

    /// Checks that the stream ends (TELL).
    pub(crate) async fn ended(mut self) {
        let end = timeout(LIMIT, self.receive.message()).await.expect("the stream ends");
        assert_eq!(end.unwrap(), None);
    }
}

/// A tensor of `elements` f32, submitted by these ranks.
pub(crate) fn by_name(name: &str, ranks: &[u32], elements: u64) -> pb::Announcement {
    let shape = Shape::new(&[elements]).unwrap();
    let request = Request::allreduce(DType::F32, shape, ReduceOp::Sum);
    pb::Announcement {
        process_set: 0,
        tensor: Some(pb::TensorRef { tensor: Some(Tensor::Name(name.to_owned())) }),
        submitted: vec![pb::Submitted {
            ranks: ranks.to_vec(),
            request: Some(pb::Request::from(&request)),
            priority: 0,
            duplicate: false,
            sites: Vec::new(),
        }],
        latest: None,
    }
}

pub(crate) fn by_id(id: u32) -> pb::Announcement {
    let tensor = Some(pb::TensorRef { tensor: Some(Tensor::Id(id)) });
    pb::Announcement { process_set: 0, tensor, submitted: Vec::new(), latest: None }
}
