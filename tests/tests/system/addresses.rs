//! Hosts that get other addresses while a job runs. This needs root and `ip`. If something is
//! missing, a test prints that and passes.

use std::{thread::sleep, time::Duration};

use gradwire_tests::launched::{
    Job, Launch, Report,
    network::{CABLE, Pair},
};

/// What a daemon logs about a host with another address.
const MOVED: &str = "moving: a host has got another address";

/// The addresses of the second host, one after the other.
const SECOND: [&str; 4] = ["10.213.0.2", "10.213.0.7", "10.213.0.8", "10.213.0.9"];

/// A job that has used each connection, and continues with `steps` when allowed.
fn begun(launch: Launch, steps: &[&str]) -> Job {
    let before = ["deaf", "attach", "loop:4:1000", "say:begun", "until:go"];
    let job = launch.words(&["--verbose"]).rank(&[&before, steps].concat()).start();
    job.until_said("said", 4);
    job
}

/// How often the daemons have noticed another address.
fn moves(report: &Report) -> usize {
    report.all().matches(MOVED).count()
}

#[test]
fn an_idle_host_may_get_another_address() {
    let Some(pair) = Pair::new() else { return };
    let mut job = begun(pair.launch(), &["loop:50:100000", "leave"]);
    pair.readdress(1, CABLE, SECOND[0], SECOND[1]);
    job.allow("go");
    let report = job.finish();
    assert_eq!(report.said("looped").len(), 8, "{}", report.all());
    report.assert_code(0);
    let told = "node 1 (ranks 2-3) on host 10.213.0.2 has another stream after ";
    assert!(report.all().contains(told), "{}", report.all());
    assert!(report.all().contains(", and is at 10.213.0.7:"), "{}", report.all());
    println!("{}", report.all());
}

/// Large tensors on a narrow line, and small ones one after the other.
#[test]
fn a_busy_host_may_get_other_addresses() {
    let Some(pair) = Pair::new() else { return };
    if pair.narrow(200).is_none() {
        return;
    }
    for (steps, times) in [(["submit:24:2000000", "leave"], 4), (["loop:8000:1000", "leave"], 8)] {
        let mut job = begun(pair.launch().within(Duration::from_secs(200)), &steps);
        job.allow("go");
        for step in SECOND.windows(2) {
            sleep(Duration::from_millis(1500));
            pair.readdress(1, CABLE, step[0], step[1]);
        }
        let report = job.finish();
        report.assert_code(0);
        let word = if times == 4 { "done" } else { "looped" };
        assert_eq!(report.said(word).len(), times, "{}", report.all());
        // Three, on both daemons.
        assert_eq!(moves(&report), 6, "{}", report.all());
        pair.readdress(1, CABLE, SECOND[3], SECOND[0]);
    }
}

/// The stream to the coordinator goes over another network, which works.
#[test]
fn the_data_network_may_get_another_address() {
    let Some(pair) = Pair::new() else { return };
    pair.add_network("fast0");
    let launch = pair.launch().set("data.interface=fast0");
    let mut job = begun(launch, &["submit:20:2000000", "leave"]);
    job.allow("go");
    pair.readdress(1, "fast0", "10.214.0.2", "10.214.0.9");
    let report = job.finish();
    report.assert_code(0);
    assert_eq!((report.said("done").len(), moves(&report)), (4, 2), "{}", report.all());
}
