//! Every collective on every element type, started like by a user.

use std::time::Duration;

use gradwire_tests::launched::{Launch, programs};

fn conforms(launch: Launch, ranks: usize) {
    let program = programs::beside("gradwire-conformance").display().to_string();
    // Thousands of calls, which take a minute on both processors.
    let report = launch.program(&[&program]).within(Duration::from_secs(200)).run();
    report.assert_code(0);
    let conform = report.lines.iter().filter(|line| line.text.ends_with("conforms")).count();
    assert_eq!(conform, ranks, "{}", report.all());
    let collectives = report.lines.iter().filter(|line| line.text.starts_with("[0]")).count();
    assert!(collectives > 10, "{}", report.all());
}

#[test]
fn four_ranks_of_one_node_conform() {
    conforms(Launch::new().ranks(4), 4);
}

#[test]
fn three_ranks_of_two_nodes_conform() {
    // Ranks and daemons spin while they wait, as with a core for each of them.
    let launch = Launch::new().ranks(3).hosts("127.0.0.1:2,127.0.0.2:1");
    conforms(launch.set("worker.spin_us=50"), 3);
}

#[test]
fn five_ranks_conform_with_bf16_compression() {
    let launch = Launch::new().ranks(5).hosts("127.0.0.1:2,127.0.0.2:1,127.0.0.3:2");
    conforms(launch.set("data.compression=bf16"), 5);
}
