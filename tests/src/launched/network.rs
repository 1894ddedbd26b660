//! Two hosts on one machine: network namespaces connected by a switch, a third namespace with a
//! bridge. The switch can limit the rate, lose packets, or drop everything, in one direction or
//! both. This needs root, `ip` and `tc`, and `ss` for breaking connections.
//!
//! Packets are lost at the switch, as on a real network: a sender's own system would notice its own
//! drops. Addresses are private to the namespaces, so many pairs can exist at once. Names contain
//! the process id, and everything is removed when the pair is dropped.

use std::{
    fs::{File, read_to_string},
    io::{Read, Write},
    os::fd::AsFd,
    process::{Child, Command, Output, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::Launch;

/// A pair of hosts.
#[derive(Debug)]
pub struct Pair {
    /// The namespaces of the hosts and of the switch.
    names: [String; 3],
    /// A running `tc` that takes commands for the switch, so that an outage has the right length
    /// even if this machine is slow to start processes.
    control: Mutex<Option<Child>>,
    /// The replacement for the bridge.
    relay: Mutex<Option<Child>>,
}

/// The name of the interface of each host.
pub const CABLE: &str = "cable";

/// The interfaces of the switch, one for each host.
const PORTS: [&str; 2] = ["port-a", "port-b"];

/// A port that drops the packets that filters put into class 1:2.
const SOME: [&str; 4] = [
    "qdisc root handle 1: htb default 1 r2q 1000000",
    "class parent 1: classid 1:1 htb rate 10gbit",
    "class parent 1: classid 1:2 htb rate 10gbit",
    "qdisc parent 1:2 pfifo limit 0",
];

/// Passes packets between two interfaces after a delay, with the offload header for the cards
/// (`PACKET_VNET_HDR`). It ends with its standard input.
const RELAY: &str = r#"
import collections, select, socket, sys, time
first, second, by = sys.argv[1], sys.argv[2], float(sys.argv[3])
sockets = []
for name in (first, second):
    one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    one.setsockopt(263, 15, 1)
    one.bind((name, 0))
    sockets.append(one)
print("ready", flush=True)
waiting = collections.deque()
while True:
    left = max(0, waiting[0][0] - time.monotonic()) if waiting else None
    readable, _, _ = select.select([sys.stdin, *sockets], [], [], left)
    if sys.stdin in readable:
        break
    for one in readable:
        packet, source = one.recvfrom(1 << 17)
        if source[2] != 4:  # not what was sent from here
            other = sockets[1] if one is sockets[0] else sockets[0]
            waiting.append((time.monotonic() + by, other, packet))
    while waiting and waiting[0][0] <= time.monotonic():
        _, other, packet = waiting.popleft()
        try:
            other.send(packet)
        except OSError:
            pass
"#;

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

/// As [`Pair::reset_connections`], where `within` begins a command: in the network of this process
/// if it is empty.
pub fn reset_connections(within: &[&str], ports: &[u16]) -> Option<usize> {
    let mut count = 0;
    for port in ports {
        for side in ["sport", "dport"] {
            let port = format!("= :{port}");
            let words = ["ss", "-H", "-K", "-tn", "state", "established", side, &port];
            match run(&[within, &words].concat()) {
                Ok(output) => count += output.stdout.iter().filter(|b| **b == b'\n').count(),
                Err(why) => {
                    println!("skipped: connections can't be broken here: {why}");
                    return None;
                }
            }
        }
    }
    Some(count)
}

impl Pair {
    /// The hosts' addresses, which are also their names.
    pub const HOSTS: [&str; 2] = ["10.213.0.1", "10.213.0.2"];

    /// Two ranks on each host.
    pub const TWO_EACH: &str = "10.213.0.1:2,10.213.0.2:2";

    /// How addresses in [`Self::add_network`] begin.
    pub const SECOND: &str = "10.214.0.";

    /// Creates the hosts; `None`, with a printed reason, if that is not allowed here.
    pub fn new() -> Option<Self> {
        if !rustix::process::getuid().is_root() {
            println!("skipped: only root can make network namespaces");
            return None;
        }
        let unique = format!("{}-{}", std::process::id(), PAIRS.fetch_add(1, Ordering::Relaxed));
        let names = ["a", "b", "switch"].map(|end| format!("gwtest-{unique}-{end}"));
        let pair = Self { names, control: Mutex::default(), relay: Mutex::default() };
        if let Err(why) = pair.set_up() {
            println!("skipped: no network namespaces here: {why}");
            return None;
        }
        Some(pair)
    }

    fn set_up(&self) -> Result<(), String> {
        let switch = self.names[2].as_str();
        for name in &self.names {
            run(&["ip", "netns", "add", name])?;
            run(&["ip", "-n", name, "link", "set", "lo", "up"])?;
        }
        run(&["ip", "-n", switch, "link", "add", "name", "bridge", "type", "bridge"])?;
        run(&["ip", "-n", switch, "link", "set", "bridge", "up"])?;
        for ((name, port), address) in self.names.iter().zip(PORTS).zip(Self::HOSTS) {
            run(&[
                "ip", "link", "add", CABLE, "netns", name, "type", "veth", "peer", "name", port,
                "netns", switch,
            ])?;
            run(&["ip", "-n", switch, "link", "set", port, "master", "bridge"])?;
            run(&["ip", "-n", switch, "link", "set", port, "up"])?;
            let address = format!("{address}/24");
            run(&["ip", "-n", name, "addr", "add", &address, "dev", CABLE])?;
            run(&["ip", "-n", name, "link", "set", CABLE, "up"])?;
        }
        let control = Command::new("tc")
            .args(["-n", switch, "-force", "-batch", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("tc: {error}"))?;
        *self.control.lock().expect("no panic while it is held") = Some(control);
        Ok(())
    }

    /// A second network between the hosts. Its interfaces have this name, and its addresses begin
    /// with [`Self::SECOND`].
    pub fn add_network(&self, name: &str) {
        let [first, second, _] = &self.names;
        let words = ["ip", "link", "add", name, "netns", first, "type", "veth", "peer", "name"];
        must(&[&words[..], &[name, "netns", second]].concat());
        for (host, number) in [(first, 1), (second, 2)] {
            let address = format!("{}{number}/24", Self::SECOND);
            must(&["ip", "-n", host, "addr", "add", &address, "dev", name]);
            must(&["ip", "-n", host, "link", "set", name, "up"]);
        }
    }

    /// Gives a host another address instead of its own.
    pub fn readdress(&self, host: usize, interface: &str, from: &str, to: &str) {
        for (change, address) in [("del", from), ("add", to)] {
            let (name, address) = (&self.names[host], format!("{address}/24"));
            must(&["ip", "-n", name, "addr", change, &address, "dev", interface]);
        }
    }

    /// Takes a host's interface down, or up again.
    pub fn set_interface(&self, name: &str, host: usize, is_up: bool) {
        let state = if is_up { "up" } else { "down" };
        must(&["ip", "-n", &self.names[host], "link", "set", name, state]);
    }

    /// Sends commands to the switch, which executes them at once.
    fn at_once(&self, commands: &str) {
        let mut control = self.control.lock().expect("no panic while it is held");
        let pipe = control.as_mut().and_then(|control| control.stdin.as_mut()).expect("tc");
        pipe.write_all(commands.as_bytes()).and_then(|()| pipe.flush()).expect("tc reads");
    }

    /// A job with two ranks on each host. The second host is reached by a replacement for ssh.
    pub fn launch(&self) -> Launch {
        Launch::new().hosts(Self::TWO_EACH).ssh(&self.ssh()).in_network(self.first())
    }

    /// The namespace of the first host, in which the launcher runs.
    pub fn first(&self) -> &str {
        &self.names[0]
    }

    /// Calls a function whose sockets belong to a host, 0 or 1.
    pub fn within<T: Send>(&self, host: usize, call: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/run/netns/{}", self.names[host])).expect("a host");
        let call = move || {
            let network = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), network).expect("root may enter it");
            call()
        };
        // The namespace is that of a new thread only.
        thread::scope(|scope| scope.spawn(call).join()).expect("the call does not panic")
    }

    /// The rate of a host's interface in Mbit/s, as its system reports it.
    pub fn speed(&self, host: usize) -> Option<f64> {
        let file = format!("/sys/class/net/{CABLE}/speed");
        let output = run(&["ip", "netns", "exec", &self.names[host], "cat", &file]).ok()?;
        String::from_utf8_lossy(&output.stdout).trim().parse().ok().filter(|speed| *speed > 0.0)
    }

    /// The bytes that a host, 0 or 1, has received over the cable.
    pub fn received(&self, host: usize) -> u64 {
        self.received_over(CABLE, host)
    }

    /// The bytes that a host, 0 or 1, has received over an interface.
    pub fn received_over(&self, interface: &str, host: usize) -> u64 {
        // After the interface's name, the first column of `/proc/net/dev` is this number.
        let counters = self.within(host, || read_to_string("/proc/thread-self/net/dev"));
        let counters = counters.expect("the system counts");
        let line = counters.lines().find_map(|line| line.trim().strip_prefix(interface));
        let bytes = line.and_then(|line| line.trim_start_matches(':').split_whitespace().next());
        bytes.and_then(|bytes| bytes.parse().ok()).expect("the interface's counters")
    }

    /// The replacement for ssh that reaches the second host, not over the cable.
    pub fn ssh(&self) -> String {
        format!("exec ip netns exec {} sh -c \"$*\"", self.names[1])
    }

    /// Sets how a port of the switch handles outgoing packets; without commands, it passes all.
    fn set_port(&self, port: &str, commands: &[&str]) -> Result<(), String> {
        let switch = self.names[2].as_str();
        // Fails the first time, when there is nothing to remove.
        let _ = run(&["tc", "-n", switch, "qdisc", "del", "dev", port, "root"]);
        for command in commands {
            let (what, rest) = command.split_once(' ').unwrap_or((command, ""));
            run(&["sh", "-c", &format!("tc -n {switch} {what} add dev {port} {rest}")])?;
        }
        Ok(())
    }

    /// Sets both ports. `None`, with a printed reason, if that is not possible.
    fn set_ports(&self, what: &str, commands: &[&str]) -> Option<()> {
        for port in PORTS {
            if let Err(why) = self.set_port(port, commands) {
                println!("skipped: {what}: {why}");
                return None;
            }
        }
        Some(())
    }

    /// Drops everything sent to one of the hosts, 0 or 1, without notification.
    pub fn cut_towards(&self, host: usize) {
        self.at_once(&format!("qdisc replace dev {} root pfifo limit 0\n", PORTS[host]));
    }

    /// Drops everything in both directions, without notification.
    pub fn cut(&self) {
        [0, 1].into_iter().for_each(|host| self.cut_towards(host));
    }

    /// Passes everything again.
    pub fn mend(&self) {
        self.at_once(&PORTS.map(|port| format!("qdisc del dev {port} root\n")).concat());
    }

    /// Loses `of_256` packets of 256, in both directions. `None`, with a printed reason, if that is
    /// not possible.
    pub fn lose(&self, of_256: u8) -> Option<()> {
        // The program, in the form of `tc-bpf(8)`, loads a random number of the kernel for each
        // packet, keeps eight bits of it, and selects the class if they are less than `of_256`.
        let program = format!(
            "filter parent 1: protocol ip bpf bytecode \
             '5,32 0 0 4294963256,84 0 0 255,53 0 1 {of_256},6 0 0 0,6 0 0 4294967295' flowid 1:2"
        );
        let commands = [&SOME[..], &[&program]].concat();
        self.set_ports("packets can't be lost here", &commands)
    }

    /// Limits the rate to `mbit` Mbit/s, in both directions. `None`, with a printed reason, if that
    /// is not possible.
    pub fn narrow(&self, mbit: u32) -> Option<()> {
        // Room for 200 milliseconds, and for at least a few packets.
        let queue = (mbit * 25_000).max(32 << 10);
        let commands = [
            "qdisc root handle 1: htb default 1 r2q 1000".to_owned(),
            format!("class parent 1: classid 1:1 htb rate {mbit}mbit burst 16kb"),
            format!("qdisc parent 1:1 bfifo limit {queue}"),
        ];
        for name in &self.names[..2] {
            // The card sends packets of the line's size, like a real one, and no larger ones.
            let _ = run(&["ip", "-n", name, "link", "set", CABLE, "gso_max_segs", "1"]);
        }
        let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
        self.set_ports("the cable can't be narrowed here", &commands)
    }

    /// Adds a delay in each direction. `None`, with a printed reason, if that is not possible. The
    /// kernel's queue for delays (netem) is a module that many kernels lack, so a program replaces
    /// the bridge.
    pub fn lengthen(&self, by: Duration) -> Option<()> {
        for port in PORTS {
            must(&["ip", "-n", &self.names[2], "link", "set", port, "nomaster"]);
        }
        let by = by.as_secs_f64().to_string();
        let program = ["python3", "-c", RELAY, PORTS[0], PORTS[1], &by];
        let relay = Command::new("ip")
            .args(["netns", "exec", &self.names[2]])
            .args(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut relay = match relay {
            Ok(relay) => relay,
            Err(why) => {
                println!("skipped: the way can't be lengthened here: {why}");
                return None;
            }
        };
        let mut ready = [0; 6];
        let answer = relay.stdout.take().map(|mut output| output.read_exact(&mut ready));
        *self.relay.lock().expect("no panic while it is held") = Some(relay);
        if !matches!(answer, Some(Ok(()))) {
            println!("skipped: the way can't be lengthened here: python3 is missing");
            return None;
        }
        Some(())
    }

    /// Sets the congestion control for all connections of a host. `None`, with a printed reason, if
    /// that is not possible.
    pub fn set_congestion_control(&self, host: usize, name: &str) -> Option<()> {
        let write = format!("echo {name} > /proc/sys/net/ipv4/tcp_congestion_control");
        let done = run(&["ip", "netns", "exec", &self.names[host], "sh", "-c", &write]);
        done.inspect_err(|why| println!("skipped: no {name} here: {why}")).ok().map(drop)
    }

    /// Limits the size of packets, in bytes.
    pub fn set_mtu(&self, bytes: u32) {
        let bytes = bytes.to_string();
        for (name, port) in self.names.iter().zip(PORTS) {
            must(&["ip", "-n", &self.names[2], "link", "set", port, "mtu", &bytes]);
            must(&["ip", "-n", name, "link", "set", CABLE, "mtu", &bytes]);
        }
    }

    /// Silently loses packets larger than this at the switch: the hosts still use the size of their
    /// interfaces.
    pub fn lose_larger(&self, bytes: u32) {
        let bytes = bytes.to_string();
        for (name, port) in self.names.iter().zip(PORTS) {
            must(&["ip", "-n", &self.names[2], "link", "set", port, "mtu", &bytes]);
            // The card sends packets of the interface's size, and no larger ones.
            must(&["ip", "-n", name, "link", "set", CABLE, "gso_max_segs", "1"]);
        }
    }

    /// Tells the first host that the path to the second one passes only packets of this size.
    pub fn set_path_mtu(&self, bytes: u32) {
        let (bytes, to) = (bytes.to_string(), format!("{}/32", Self::HOSTS[1]));
        must(&["ip", "-n", &self.names[0], "route", "add", &to, "dev", CABLE, "mtu", &bytes]);
    }

    /// Breaks a host's TCP connections to or from these ports, like an administrator or a firewall:
    /// its peer gets a reset. Returns their number; `None`, with a printed reason, if that is not
    /// possible.
    pub fn reset_connections(&self, host: usize, ports: &[u16]) -> Option<usize> {
        reset_connections(&["ip", "netns", "exec", &self.names[host]], ports)
    }

    /// Rejects what a host sends to these TCP ports: connections to them fail immediately.
    pub fn refuse_ports(&self, host: usize, ports: &[u16]) {
        for port in ports {
            let port = port.to_string();
            let rule = ["rule", "add", "ipproto", "tcp", "dport", &port, "prohibit"];
            must(&[&["ip", "-n", &self.names[host]], &rule[..]].concat());
        }
    }

    /// Ends what [`Pair::refuse_ports`] began.
    pub fn accept_ports(&self, host: usize, ports: &[u16]) {
        for port in ports {
            let port = port.to_string();
            let rule = ["rule", "del", "ipproto", "tcp", "dport", &port, "prohibit"];
            must(&[&["ip", "-n", &self.names[host]], &rule[..]].concat());
        }
    }

    /// Drops packets to or from these TCP ports of a host.
    pub fn swallow_ports(&self, host: usize, ports: &[u16]) {
        self.swallow(host, 6, ports);
    }

    /// Drops packets to or from these UDP ports of a host.
    pub fn swallow_datagrams(&self, host: usize, ports: &[u16]) {
        self.swallow(host, 17, ports);
    }

    /// Takes or gives the interface of a host away from it.
    pub fn set_link(&self, host: usize, is_up: bool) {
        let state = if is_up { "up" } else { "down" };
        must(&["ip", "-n", &self.names[host], "link", "set", CABLE, state]);
    }

    /// Drops all packets of the connections of both hosts to these TCP ports, like a firewall that
    /// has forgotten them. Others pass. Returns their number; `None`, with a printed reason, if
    /// they can't be listed.
    pub fn forget_connections(&self, ports: &[u16]) -> Option<usize> {
        let own = [self.local_ports(0, ports)?, self.local_ports(1, ports)?];
        self.swallow_all(6, [&own[0], &own[1]]);
        Some(own[0].len() + own[1].len())
    }

    /// The ports from which a host has connected to these TCP ports.
    fn local_ports(&self, host: usize, ports: &[u16]) -> Option<Vec<u16>> {
        let mut own = Vec::new();
        for port in ports {
            let port = format!("= :{port}");
            let words = ["ss", "-H", "-tn", "state", "established", "dport", &port];
            match run(&[&["ip", "netns", "exec", &self.names[host]], &words[..]].concat()) {
                Ok(output) => {
                    let text = String::from_utf8_lossy(&output.stdout).into_owned();
                    let locals = text.lines().filter_map(|line| line.split_whitespace().nth(2));
                    own.extend(locals.filter_map(|at| at.rsplit(':').next()?.parse::<u16>().ok()));
                }
                Err(why) => {
                    println!("skipped: connections can't be listed here: {why}");
                    return None;
                }
            }
        }
        Some(own)
    }

    /// Drops packets of an IP protocol to or from these ports of a host.
    fn swallow(&self, host: usize, protocol: u8, ports: &[u16]) {
        let mut both = [&[][..]; 2];
        both[host] = ports;
        self.swallow_all(protocol, both);
    }

    /// Drops packets of an IP protocol to or from these ports of each host.
    fn swallow_all(&self, protocol: u8, ports: [&[u16]; 2]) {
        for (host, port_of_switch) in PORTS.into_iter().enumerate() {
            // The offset of the port in a packet, towards the host and away from the other one.
            let ends = [(ports[host], 22), (ports[1 - host], 20)];
            let matches = ends.iter().flat_map(|(ports, at)| ports.iter().map(move |it| (it, at)));
            let filters = matches.map(|(port, at)| {
                format!(
                    "filter parent 1: protocol ip u32 match ip protocol {protocol} 0xff \
                     match u16 {port} 0xffff at {at} flowid 1:2"
                )
            });
            let commands: Vec<String> =
                SOME.map(str::to_owned).into_iter().chain(filters).collect();
            let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
            self.set_port(port_of_switch, &commands).expect("a port that drops some");
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for child in [&mut self.control, &mut self.relay] {
            let child = child.get_mut().map(Option::take).unwrap_or_default();
            if let Some(mut child) = child {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        for name in &self.names {
            // The cables are removed with their ends. The namespace may not exist.
            let _ = run(&["ip", "netns", "del", name]);
        }
    }
}
