//! Two hosts on one machine: network namespaces joined by a cable (a veth pair) that can be cut,
//! narrowed, and made to lose what it carries. For root only.
//!
//! Addresses are private to the namespaces, so many pairs can be up at once; names carry the
//! process id, and all of it goes when the pair is dropped.

use std::{
    process::{Command, Output},
    sync::atomic::{AtomicU32, Ordering},
};

/// A pair of hosts.
#[derive(Debug)]
pub struct Pair {
    names: [String; 2],
    cables: [String; 2],
}

static PAIRS: AtomicU32 = AtomicU32::new(0);

fn run(words: &[&str]) -> Result<Output, String> {
    let output = Command::new(words[0]).args(&words[1..]).output();
    let output = output.map_err(|error| format!("{}: {error}", words[0]))?;
    if output.status.success() {
        return Ok(output);
    }
    Err(format!("{}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

#[track_caller]
fn must(words: &[&str]) {
    run(words).expect("a command that changes the network");
}

impl Pair {
    /// The hosts' addresses, which are also their names.
    pub const HOSTS: [&str; 2] = ["10.213.0.1", "10.213.0.2"];

    /// Two ranks on each of the hosts.
    pub const TWO_EACH: &str = "10.213.0.1:2,10.213.0.2:2";

    /// Makes the hosts; `None`, with the reason printed, where that is not allowed here.
    pub fn new() -> Option<Self> {
        if !rustix::process::getuid().is_root() {
            println!("skipped: only root can make network namespaces");
            return None;
        }
        let unique = format!("{}-{}", std::process::id(), PAIRS.fetch_add(1, Ordering::Relaxed));
        let pair = Self {
            names: ["a", "b"].map(|end| format!("gwtest-{unique}-{end}")),
            // An interface's name has 15 characters at most.
            cables: ["a", "b"].map(|end| format!("gw{unique}{end}")),
        };
        if let Err(why) = pair.set_up() {
            println!("skipped: no network namespaces here: {why}");
            return None;
        }
        Some(pair)
    }

    fn set_up(&self) -> Result<(), String> {
        let [a, b] = [&self.names[0], &self.names[1]];
        let [cable_a, cable_b] = [&self.cables[0], &self.cables[1]];
        run(&["ip", "netns", "add", a])?;
        run(&["ip", "netns", "add", b])?;
        run(&[
            "ip", "link", "add", cable_a, "netns", a, "type", "veth", "peer", "name", cable_b,
            "netns", b,
        ])?;
        for end in 0..2 {
            let (name, cable) = (&self.names[end], &self.cables[end]);
            let address = format!("{}/24", Self::HOSTS[end]);
            run(&["ip", "-n", name, "addr", "add", &address, "dev", cable])?;
            run(&["ip", "-n", name, "link", "set", "lo", "up"])?;
            run(&["ip", "-n", name, "link", "set", cable, "up"])?;
        }
        Ok(())
    }

    /// The namespace of the first host, where the launcher belongs.
    pub fn first(&self) -> &str {
        &self.names[0]
    }

    /// What a stand-in for ssh does to reach the second host: not over the cable.
    pub fn ssh(&self) -> String {
        format!("exec ip netns exec {} sh -c \"$*\"", self.names[1])
    }

    /// Cuts the cable: nothing arrives any more, and nobody is told.
    pub fn cut(&self) {
        // The other end would lose its carrier, which its system could tell.
        let address = format!("{}/32", Self::HOSTS[0]);
        must(&["ip", "-n", &self.names[1], "route", "add", "blackhole", &address]);
        must(&["ip", "-n", &self.names[0], "link", "set", &self.cables[0], "down"]);
    }

    /// Loses one in so many packets, in both directions. `None`, with the reason printed, where
    /// that can't be done.
    pub fn lose_one_in(&self, packets: u32) -> Option<()> {
        for name in &self.names {
            let rules = format!(
                "add table inet gw; add chain inet gw in {{ type filter hook input priority 0; }}; \
                 add rule inet gw in numgen random mod {packets} == 0 drop"
            );
            if let Err(why) = run(&["ip", "netns", "exec", name, "nft", &rules]) {
                println!("skipped: packets can't be lost here: {why}");
                return None;
            }
        }
        Some(())
    }

    /// Lets so many Mbit/s through, in both directions. `None`, with the reason printed, where that
    /// can't be done.
    pub fn narrow(&self, mbit: u32) -> Option<()> {
        for (name, cable) in self.names.iter().zip(&self.cables) {
            let rate = format!("{mbit}mbit");
            let words = [
                "tc", "-n", name, "qdisc", "add", "dev", cable, "root", "tbf", "rate", &rate,
                "burst", "64kb", "latency", "50ms",
            ];
            if let Err(why) = run(&words) {
                println!("skipped: the cable can't be narrowed here: {why}");
                return None;
            }
        }
        Some(())
    }

    /// Swallows what is sent to or from a TCP port of the second host.
    pub fn swallow_port(&self, port: u16) {
        let port = port.to_string();
        for (end, of) in [(0, "dport"), (1, "sport")] {
            let words = ["rule", "add", "to", Self::HOSTS[1 - end], "ipproto", "tcp", of, &port];
            must(&[&["ip", "-n", &self.names[end]][..], &words, &["blackhole"]].concat());
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for name in &self.names {
            // The cable goes with its ends. A namespace that was never made is no matter.
            let _ = run(&["ip", "netns", "del", name]);
        }
    }
}
