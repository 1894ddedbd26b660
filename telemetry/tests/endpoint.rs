//! The endpoint over real sockets.

use std::{net::SocketAddr, time::Duration};

use gradwire_telemetry::{Endpoint, EndpointConfig, Readiness};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::watch,
    time::timeout,
};

fn config(listen: &str, ready: watch::Receiver<Readiness>) -> EndpointConfig {
    EndpointConfig {
        service: "test",
        version: "1.2.3",
        listen: listen.parse().unwrap(),
        setting: "metrics.listen",
        ready,
    }
}

async fn get(address: SocketAddr, path: &str) -> String {
    let ask = async {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    timeout(Duration::from_secs(20), ask).await.expect("an answer")
}

#[tokio::test]
async fn metrics_health_and_readiness_are_served() {
    let (tell, ready) = watch::channel(Readiness::NotReady("2 of 3 nodes have joined".into()));
    let endpoint = Endpoint::start(config("127.0.0.1:0", ready)).await.unwrap();
    let address = endpoint.address();

    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
    let answer = get(address, "/readyz").await;
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(answer.ends_with("not ready: 2 of 3 nodes have joined\n"), "{answer}");
    tell.send_replace(Readiness::Ready);
    assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));

    metrics::histogram!("gradwire_test_wait_seconds").record(0.002);
    metrics::histogram!("gradwire_test_piece_bytes").record(5000.0);
    let answer = get(address, "/metrics").await;
    for line in [
        r#"gradwire_build_info{service="test",version="1.2.3"} 1"#,
        r#"gradwire_test_wait_seconds_bucket{le="0.0025"} 1"#,
        r#"gradwire_test_piece_bytes_bucket{le="16384"} 1"#,
    ] {
        assert!(answer.lines().any(|l| l == line), "no {line} in:\n{answer}");
    }
    assert!(get(address, "/nothing").await.starts_with("HTTP/1.1 404"));

    // CLEAN: after `stop` the port is free again.
    timeout(Duration::from_secs(20), endpoint.stop()).await.unwrap();
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_port_in_use_is_named_with_its_setting() {
    let (_tell, ready) = watch::channel(Readiness::Ready);
    let first = Endpoint::start(config("127.0.0.1:0", ready.clone())).await.unwrap();
    let taken = first.address();
    let error = Endpoint::start(config(&taken.to_string(), ready.clone())).await.unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with(&format!("can't serve metrics on {taken} (metrics.listen): ")),
        "{text}"
    );
    assert!(text.ends_with("choose another port, or 0 for any free one"), "{text}");
    let error = Endpoint::start(config("192.0.2.1:0", ready)).await.unwrap_err().to_string();
    assert!(error.ends_with("not one of this machine"), "{error}");
    first.stop().await;
}
