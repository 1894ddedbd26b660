//! The properties of each host, and differences between hosts.

use std::{
    fs,
    net::{TcpListener, UdpSocket},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use gradwire_tests::launched::{Launch, programs};

use super::{HERE, checked, with_node_4};

#[test]
fn settings_that_a_host_cannot_meet_are_named() {
    let set = |settings: &[&str]| {
        let launch = Launch::new().doctor().hosts(HERE).words(&["--json"]);
        checked(settings.iter().fold(launch, |launch, setting| launch.set(setting)))
    };
    let found = set(&["data.congestion_control=zonk", "data.socket_buffer_bytes=1GiB"]);
    found.assert("congestion_control", "127.0.0.2", "fail", &["zonk", "modprobe tcp_zonk"]);
    found.assert("socket_buffers", "127.0.0.1", "warn", &["net.core.rmem_max"]);
    let found = set(&["data.listen=192.0.2.7:0", "coordinator.listen=127.0.0.1:1"]);
    found.assert("ports", "127.0.0.1", "fail", &["192.0.2.7:0", "Cannot assign", "data.listen"]);
    let found = set(&["launch.gradwired=/zonk/gradwired"]);
    found.assert("versions", "127.0.0.1", "fail", &["/zonk/gradwired", "launch.gradwired"]);
    let free = fs::read_to_string("/proc/sys/vm/nr_hugepages").unwrap_or_default();
    if free.trim() == "0" {
        let found = set(&["worker.huge_pages=require"]);
        found.assert("huge_pages", "127.0.0.1", "fail", &["vm.nr_hugepages"]);
    } else {
        println!("skipped: this machine has huge pages");
    }
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let launch = Launch::new().doctor().words(&["--json"]);
    let launch = launch.set(&format!("data.listen=127.0.0.1:{port}"));
    let found = checked(launch.set(&format!("metrics.listen=127.0.0.1:{port}")));
    found.assert("ports", "localhost", "fail", &["Address already in use", "data.listen"]);
    let launch = Launch::new().doctor().words(&["--json"]);
    let found = checked(launch.set(&format!("metrics.listen=127.0.0.1:{port}")));
    found.assert("ports", "localhost", "fail", &["metrics.listen"]);
    // Free for TCP, and below the ports that other tests' connections get by chance.
    let taken = (20_000..30_000).find_map(|port| {
        let udp = UdpSocket::bind(("127.0.0.1", port)).ok()?;
        TcpListener::bind(("127.0.0.1", port)).is_ok().then_some(udp)
    });
    let taken = taken.unwrap();
    let address = taken.local_addr().unwrap();
    let launch = Launch::new().doctor().words(&["--json"]);
    let found = checked(launch.set(&format!("coordinator.listen={address}")));
    found.assert("ports", "localhost", "warn", &["for UDP: Address already in use"]);
}

/// More ranks than any machine has cores and memory for.
#[test]
fn too_many_ranks_for_a_host_are_reported() {
    let launch = Launch::new().doctor().hosts("127.0.0.1:4000").words(&["--json"]);
    let found = checked(launch.set("worker.arena_segment_bytes=1GiB"));
    found.assert("cores", "127.0.0.1", "warn", &["ranks: 4000", "fewer ranks"]);
    found.assert("memory", "127.0.0.1", "fail", &["worker.arena_segment_bytes"]);
    found.assert("memfd", "127.0.0.1", "pass", &[]);
}

#[test]
fn limits_of_a_host_are_found() {
    let limits = "set -- prlimit --nofile=64:64 --memlock=65536:65536 --fsize=1000:1000 \"$@\"";
    let found = checked(with_node_4(limits));
    found.assert("open_files", "node-4", "fail", &["64 (up to 64)", "ulimit -Hn"]);
    found.assert("memlock", "node-4", "warn", &["64 KiB", "ulimit -l"]);
    found.assert("memfd", "node-4", "fail", &["file size limit", "ulimit -f"]);
    found.assert_others_are_well("node-3");
}

/// A copy of the program in its own folder, with nothing next to it.
fn copied(folder: &Path) -> PathBuf {
    let path = folder.join("gradwire");
    fs::copy(programs::gradwire(), &path).unwrap();
    path
}

#[test]
fn another_release_on_a_host_is_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let own = gradwire_proto::VERSION;
    let other: String = own.chars().map(|c| if c.is_ascii_digit() { '9' } else { c }).collect();
    // Any release answers with these fields.
    let hello = format!(r#"{{"report":"hello","version":"{other}","address":null}}"#);
    let found = checked(with_node_4(&format!("read begin; echo '{hello}'; exit 0")));
    let says = format!("has gradwire {other}");
    found.assert("versions", "node-4", "fail", &[&says, "the same release"]);
    found.assert_others_are_well("node-3");
    // Only the daemon is of another release.
    let program = copied(folder.path());
    let launch = with_node_4(&format!("shift; set -- {} \"$@\"", program.display()));
    let daemon = launch.script("gradwired", &format!("#!/bin/sh\necho gradwired {other}\n"));
    fs::rename(daemon, folder.path().join("gradwired")).unwrap();
    let says = format!("gradwired is {other}, but gradwire is ");
    checked(launch).assert("versions", "node-4", "fail", &[&says, "the same release"]);
    // A release without `doctor`.
    let wrong = "echo \"error: unrecognized subcommand 'doctor-agent'\" >&2; exit 2";
    let found = checked(with_node_4(wrong));
    found.assert("versions", "node-4", "fail", &["unrecognized subcommand", "the same release"]);
}

/// A library that shifts the clock for the programs of a host.
fn wrong_clock(folder: &Path) -> PathBuf {
    const SOURCE: &str = "
        #define _GNU_SOURCE
        #include <sys/syscall.h>
        #include <time.h>
        #include <unistd.h>
        int clock_gettime(clockid_t clock, struct timespec *now) {
            long failed = syscall(SYS_clock_gettime, clock, now);
            if (!failed && clock == CLOCK_REALTIME) now->tv_sec -= 3600;
            return failed;
        }";
    let (source, library) = (folder.join("clock.c"), folder.join("clock.so"));
    fs::write(&source, SOURCE).unwrap();
    let mut linker = Command::new("cc");
    let status = linker.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    assert!(status.expect("the linker of Rust programs").success());
    library
}

#[test]
fn a_wrong_clock_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let library = wrong_clock(folder.path()).display().to_string();
    let found = checked(with_node_4(&format!("export LD_PRELOAD={library}")));
    found.report.assert_code(0);
    found.assert("clock", "node-4", "warn", &["ms from node-3", "NTP"]);
    // The offset is as exact as its round trip, so it may be a fraction of a millisecond less.
    let clock = found.findings.iter().find(|f| f["check"] == "clock" && f["host"] == "node-4");
    let offset = clock.and_then(|f| f["value"].as_f64()).expect("a measured offset");
    assert!((offset + 3_600_000.0).abs() < 1000.0, "{offset}");
    found.assert_others_are_well("node-3");
}

/// A processor of 2010, emulated by a program.
#[test]
fn another_processor_is_named() {
    let emulator = "qemu-x86_64";
    if Command::new(emulator).arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("skipped: {emulator} is missing (Debian's package qemu-user)");
        return;
    }
    let launch = with_node_4(&format!("set -- {emulator} -cpu Westmere \"$@\""));
    let found = checked(launch);
    found.assert("cpu_level", "node-4", "warn", &["baseline", "AVX2"]);
    found.assert("cpu_level", "", "warn", &["hosts differ", "baseline on node-4"]);
}

#[test]
fn hosts_with_different_packages_are_named() {
    let launch = with_node_4("true");
    let python = "#!/bin/sh\nif [ \"$FAKE_HOST\" = node-4 ]; then echo 2.1.0; else echo 2.2.0; fi\n\
                  echo 0.0.1\n";
    launch.script("python3", python);
    let path = format!("{}:{}", launch.folder().display(), std::env::var("PATH").unwrap());
    let found = checked(launch.variable("PATH", path));
    found.report.assert_code(0);
    found.assert("torch", "", "warn", &["2.1.0 on node-4; 2.2.0 on node-3"]);
    found.assert("versions", "node-3", "warn", &["the Python package is 0.0.1"]);
}

/// Whether a host can have its own files.
fn has_mounts() -> bool {
    let trial = Command::new("unshare").args(["-m", "true"]).stderr(Stdio::null()).status();
    let can = trial.is_ok_and(|status| status.success());
    if !can {
        println!("skipped: no mount namespaces here");
    }
    can
}

/// The files of NVIDIA's driver, on one of two hosts.
#[test]
fn hosts_with_different_gpus_are_named() {
    if !has_mounts() {
        return;
    }
    let mount = "export RUN=\"$*\"; exec unshare -m sh -c \
                 'mount -t tmpfs none /proc/driver && mkdir -p /proc/driver/nvidia/gpus/0 && \
                 echo \"Model:  H100\" > /proc/driver/nvidia/gpus/0/information && \
                 exec sh -c \"$RUN\"'";
    let found = checked(with_node_4(mount));
    found.assert("gpus", "node-4", "pass", &["1 × H100"]);
    found.assert("gpus", "", "warn", &["1 × H100 on node-4", "none on node-3"]);
}

/// A folder of PCI devices with a GPU, but no driver for it.
#[test]
fn a_gpu_without_a_driver_is_named() {
    if !has_mounts() {
        return;
    }
    let devices = tempfile::tempdir().unwrap();
    let device = devices.path().join("0000:00:01.0");
    fs::create_dir(&device).unwrap();
    fs::write(device.join("vendor"), "0x10de\n").unwrap();
    fs::write(device.join("class"), "0x030200\n").unwrap();
    let folder = devices.path().display();
    let mount = format!(
        "export RUN=\"$*\"; exec unshare -m sh -c \
         'mount --bind {folder} /sys/bus/pci/devices && exec sh -c \"$RUN\"'"
    );
    let found = checked(with_node_4(&mount));
    found.assert("gpus", "node-4", "warn", &["1 in the machine, without a driver"]);
    found.assert("gpus", "node-3", "pass", &["none"]);
}

/// An address that the host does not have, because ssh's address is translated on the way.
#[test]
fn an_address_missing_on_the_host_is_named() {
    let wrong = "export SSH_CONNECTION='127.0.0.1 1 192.0.2.9 22'";
    let found = checked(with_node_4(wrong));
    found.assert("address", "node-4", "warn", &["192.0.2.9 is not an address of this host"]);
    found.assert("ports", "node-4", "fail", &["can't listen on 192.0.2.9:0"]);
}
