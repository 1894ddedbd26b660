//! A coordinator as a process of its own.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
};

use gradwire_tests::place::{Place, finish, kill, wait};

#[test]
fn a_coordinator_serves_status_and_readiness() {
    let place = Place::new();
    let mut command = place.program(env!("CARGO_BIN_EXE_gradwire-lab"), &["coordinator"]);
    command.env("GRADWIRE_JOB", "j1").env("GRADWIRE_SECRET", "ab".repeat(32));
    command.env("GRADWIRE_NODES", "2").env("GRADWIRE_RANKS", "4").env("GRADWIRE_BIND", "127.0.0.1");
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let serving: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(serving["event"], "serving");

    let output = place.run(&["status", serving["grpc"].as_str().unwrap()]);
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.stdout.starts_with("job j1 (0.1.0), epoch 1, forming: "), "{output:?}");
    let output = place.run(&["explain", serving["grpc"].as_str().unwrap()]);
    assert!(output.stdout.starts_with("Choices of job j1:"), "{output:?}");
    let metrics = serving["metrics"].as_str().unwrap();
    let output = place.run(&["explain", metrics]);
    let said = format!("error: the service at {metrics} is not a coordinator: ");
    assert!(output.stderr.starts_with(&said) && output.code == Some(1), "{output:?}");
    let get = |path: &str| {
        let mut stream = TcpStream::connect(serving["metrics"].as_str().unwrap()).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(get("/healthz").starts_with("HTTP/1.1 200"));
    let ready = get("/readyz");
    assert!(ready.starts_with("HTTP/1.1 503") && ready.contains("not ready: forming: "), "{ready}");
    let metrics = get("/metrics");
    for label in ["gradwire_job=\"j1\"", "host=\"127.0.0.1\"", "service=\"coordinator\""] {
        let is_it = |line: &str| line.starts_with("gradwire_build_info{") && line.contains(label);
        assert!(metrics.lines().any(is_it), "no {label} in {metrics}");
    }
    let address = serving["grpc"].as_str().unwrap();
    assert!(get("/coordinator").ends_with(&format!("\r\n\r\ncoordinator {address}\n")));

    kill("TERM", child.id());
    assert!(wait(&mut child).success());
    let output = finish(
        place.program(env!("CARGO_BIN_EXE_gradwire-lab"), &["coordinator"]).spawn().unwrap(),
    );
    assert_eq!(
        (output.code, output.stderr.split(';').next()),
        (Some(2), Some("error: GRADWIRE_JOB is not set"))
    );
}
