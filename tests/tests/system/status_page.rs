//! The status page and its API, over HTTP. python/tests/test_status_page.py tests the page in a
//! browser.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    thread,
    time::Duration,
};

use gradwire_tests::launched::{Job, Launch, processes::Role};
use rustix::process::Signal;
use serde_json::Value;
use socket2::{Domain, Socket, Type};

use super::viewers::{checked, slow_rank_3};

/// The longest wait for a byte.
const LIMIT: Duration = Duration::from_secs(60);

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// An answer over HTTP.
#[derive(Debug)]
struct Answer {
    code: u16,
    /// The status line and the headers.
    head: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        assert!(self.head.contains("\r\ncontent-type: application/json\r\n"), "{self:?}");
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The error and the hint.
    fn error(&self) -> (String, String) {
        let json = self.json();
        let text = |key: &str| json[key].as_str().unwrap_or_else(|| panic!("{json}")).to_owned();
        assert_eq!(json.as_object().unwrap().len(), 2, "{json}");
        (text("error"), text("hint"))
    }
}

fn ask(address: &str, request: &str, headers: &[(&str, &str)]) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    send(stream, address, request, headers)
}

fn send(
    mut stream: TcpStream,
    address: &str,
    request: &str,
    headers: &[(&str, &str)],
) -> TcpStream {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut text = format!("{request} HTTP/1.1\r\n");
    if !headers.iter().any(|(name, _)| *name == "Host") {
        text += &format!("Host: {address}\r\n");
    }
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    write!(stream, "{text}Connection: close\r\n\r\n").unwrap();
    stream
}

fn answer(address: &str, request: &str, headers: &[(&str, &str)]) -> Answer {
    let mut text = String::new();
    ask(address, request, headers).read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { code, head: format!("{head}\r\n"), body: body.to_owned() }
}

fn get(address: &str, path: &str) -> Answer {
    answer(address, &format!("GET {path}"), &[])
}

/// The server-sent events of a path: their names and data.
struct Events {
    lines: std::io::Lines<BufReader<TcpStream>>,
}

impl Events {
    fn open(address: &str) -> Self {
        Self::of(ask(address, "GET /api/v1/watch", &[]))
    }

    fn of(stream: TcpStream) -> Self {
        let mut lines = BufReader::new(stream).lines();
        let first = lines.next().unwrap().unwrap();
        assert!(first.contains(" 200 "), "{first}");
        Self { lines }
    }
}

impl Iterator for Events {
    type Item = (String, String);

    fn next(&mut self) -> Option<Self::Item> {
        let mut name = String::new();
        for line in self.lines.by_ref().map_while(Result::ok) {
            if let Some(event) = line.strip_prefix("event: ") {
                name = event.to_owned();
            } else if let Some(data) = line.strip_prefix("data: ") {
                return Some((name, data.to_owned()));
            }
        }
        None
    }
}

fn pages(job: &Job) -> Vec<String> {
    job.served("metrics")
}

#[test]
fn the_page_and_its_api_only_show_the_job() {
    let mut job = slow_rank_3();
    let [first, other] = <[String; 2]>::try_from(pages(&job)).unwrap();

    let page = get(&first, "/");
    assert_eq!(page.code, 200);
    for header in [
        "content-type: text/html",
        "content-security-policy: default-src 'none'; ",
        "x-content-type-options: nosniff",
        "referrer-policy: no-referrer",
        "cache-control: no-store",
    ] {
        assert!(page.head.contains(&format!("\r\n{header}")), "{}", page.head);
    }
    // Everything that the page and its scripts refer to exists, at the same address.
    let mut names = vec![page.body];
    let mut seen = Vec::new();
    while let Some(text) = names.pop() {
        for quoted in text.split('"').filter(|text| !text.contains(char::is_whitespace)) {
            assert!(!quoted.contains("//"), "something from elsewhere: {quoted}");
            let path = match quoted.strip_prefix("./") {
                Some(name) if name.ends_with(".js") => format!("/assets/{name}"),
                _ => quoted.to_owned(),
            };
            if path.starts_with("/assets/") && !seen.contains(&path) {
                let asset = get(&first, &path);
                assert_eq!(asset.code, 200, "{path}");
                assert!(asset.body.len() > 100, "{path}");
                if path.ends_with(".js") {
                    names.push(asset.body);
                }
                seen.push(path);
            }
        }
    }
    assert!(seen.len() >= 7, "{seen:?}");

    let status = job.wait_for("the straggler", || {
        let status = checked(&get(&first, "/api/v1/status").body);
        (status["straggler"] == 3).then_some(status)
    });
    assert_eq!(status["page"], format!("http://{first}/"));
    // Every step takes as long as that of rank 3, which computes for 50 ms.
    let of_steps = |line: &&str| line.starts_with("gradwire_daemon_rank_step_seconds{");
    let seconds = |line: &str| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap();
    job.wait_for("the times of steps", || {
        let metrics = get(&first, "/metrics").body;
        let steps: Vec<f64> = metrics.lines().filter(of_steps).map(seconds).collect();
        (steps.len() == 2 && steps.iter().all(|seconds| *seconds >= 0.05)).then_some(())
    });
    let schema: Value = get(&first, "/api/v1/schema").json();
    assert!(schema["properties"]["straggler"].is_object());
    for path in get(&first, "/api/v1/").json()["paths"].as_object().unwrap().keys() {
        assert!(path.starts_with("/api/v1/"), "{path}");
    }
    let mut uptimes = Events::open(&first).take(3).map(|(name, data)| {
        assert_eq!(name, "status");
        checked(&data)["uptime_seconds"].as_f64().unwrap()
    });
    let [one, two, three] = [(); 3].map(|()| uptimes.next().unwrap());
    assert!(one < two && two < three);

    over_time(&job, &first);
    // Stacks are for those with a token, and everybody on this host can see this page.
    let seen = get(&first, "/api/v1/ranks/3").json();
    assert_eq!((&seen["rank"], &seen["host"]), (&3.into(), &"127.0.0.2".into()), "{seen:#}");
    assert!(seen["pid"].as_u64() > Some(1) && seen["submitted"].as_u64() > Some(0), "{seen:#}");
    assert!(!seen["operations"].as_array().unwrap().is_empty(), "{seen:#}");
    assert!(seen["stacks"].is_null(), "TRUST: {seen:#}");
    for unknown in ["4", "-1", "x", "99999999999"] {
        let none = get(&first, &format!("/api/v1/ranks/{unknown}"));
        assert_eq!(none.code, 404, "{unknown}");
        assert!(none.error().0.contains("no rank"), "{none:?}");
    }

    // Only GET, no other path, no other host's name.
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
        for path in ["/", "/api/v1/status", "/api/v1/watch"] {
            let refused = answer(&first, &format!("{method} {path}"), &[]);
            assert_eq!(refused.code, 405, "{path}");
            assert!(refused.error().1.contains("use GET"), "{refused:?}");
        }
    }
    let none = get(&first, "/api/v2/status");
    assert_eq!(none.code, 404);
    assert!(none.error().1.contains("/api/v1/status"), "{none:?}");
    for path in ["/", "/api/v1/status", "/api/v1/watch", "/assets/page.js"] {
        let foreign = answer(&first, &format!("GET {path}"), &[("Host", "evil.example")]);
        assert_eq!(foreign.code, 421, "{path}");
        assert!(foreign.body.contains("another host name"), "{foreign:?}");
    }
    // Prometheus may use any name.
    assert_eq!(answer(&first, "GET /metrics", &[("Host", "evil.example")]).code, 200);

    let elsewhere = get(&other, "/");
    assert_eq!(elsewhere.code, 404);
    assert!(elsewhere.body.contains("`gradwire status` prints its address"), "{elsewhere:?}");
    job.allow("end");
    job.finish().assert_code(0);
}

/// The history of a job in which the others wait for rank 3, once it has a point.
fn over_time(job: &Job, page: &str) {
    let history = job.wait_for("a point", || {
        let history = get(page, "/api/v1/history").json();
        let points = history["seconds"].as_array().unwrap().len();
        (points > 0 && history["step_seconds"][points - 1].is_f64()).then_some(history)
    });
    let points = history["seconds"].as_array().unwrap().len();
    let last = |list: &Value| {
        let list = list.as_array().unwrap();
        assert_eq!(list.len(), points, "{history:#}");
        list[points - 1].as_f64().unwrap()
    };
    assert!(last(&history["step_seconds"]) >= 0.05, "{history:#}");
    assert!(last(&history["operations_per_second"]) > 0.0, "{history:#}");
    assert!(last(&history["resident_bytes"]) > 1e6, "{history:#}");
    let blocked = last(&history["blocked"]);
    assert!((0.0..=1.0).contains(&blocked), "{history:#}");
    assert_eq!(history["ranks"][0]["rank"], 3, "{history:#}");
    assert!(last(&history["ranks"][0]["waited"]) > 0.1, "{history:#}");
    assert_eq!(history["links"].as_array().unwrap().len(), 2, "{history:#}");
    assert!(last(&history["links"][1]["bytes_per_second"]) > 0.0, "{history:#}");
}

#[test]
fn viewers_learn_why_the_job_failed() {
    let mut job = slow_rank_3();
    let page = pages(&job).remove(0);
    let mut events = Events::open(&page);
    let has_reports = |(_, data): &(String, String)| {
        let nodes = &checked(data)["nodes"];
        (0..2).all(|node| nodes[node]["report"].is_object())
    };
    events.find(has_reports).unwrap();
    job.signal(Role::Rank(2), Signal::KILL);
    let events: Vec<_> = events.collect();
    let [.., (_, last), (name, reason)] = &events[..] else { panic!("{events:?}") };
    assert_eq!((name.as_str(), reason.as_str()), ("end", r#"{"reason":"the job is over"}"#));
    let last = checked(last);
    let failure = &last["failure"];
    assert_eq!((&failure["rank"], &failure["host"]), (&2.into(), &"127.0.0.2".into()), "{last:#}");
    assert!(failure["what"].as_str().unwrap().contains("killed"), "{last:#}");
    assert_eq!(last["phase"], "failed");
    // The cause is there once, and its host is marked.
    let health = [0, 1].map(|node| last["nodes"][node]["health"] == "failed");
    assert_eq!(health, [false, true], "{last:#}");
    for log in ["events", "decisions"] {
        let entries = last[log].as_array().unwrap();
        let tells = |entry: &Value| entry["text"].as_str().unwrap().contains("killed");
        assert!(!entries.iter().any(tells), "{log}: {last:#}");
    }
    // The last reports of the nodes are still there.
    assert!(last["nodes"][0]["report"].is_object(), "{last:#}");
    job.finish();
}

#[test]
fn the_number_of_viewers_is_limited() {
    let mut job = slow_rank_3();
    let page = pages(&job).remove(0);
    let mut viewers: Vec<_> = (0..32).map(|_| Events::open(&page)).collect();
    let refused = get(&page, "/api/v1/watch");
    assert_eq!(refused.code, 429);
    assert!(refused.error().0.contains("32 viewers"), "BOUND: {refused:?}");
    // Others are served meanwhile.
    assert_eq!(get(&page, "/metrics").code, 200);
    viewers.pop();
    job.wait_for("a free place", || {
        let stream = ask(&page, "GET /api/v1/watch", &[]);
        let first = BufReader::new(stream).lines().next()?.ok()?;
        first.contains(" 200 ").then_some(())
    });
    for viewer in &mut viewers {
        assert_eq!(viewer.next().unwrap().0, "status");
    }
    job.allow("end");
    for viewer in viewers {
        assert_eq!(viewer.last().unwrap().0, "end");
    }
    job.finish().assert_code(0);
}

/// A viewer with small socket buffers on both sides.
fn narrow(address: &str) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(2048).unwrap();
    socket.set_tcp_mss(536).unwrap();
    socket.connect(&address.parse::<SocketAddr>().unwrap().into()).unwrap();
    send(socket.into(), address, "GET /api/v1/watch", &[])
}

#[test]
fn viewers_that_do_not_read_are_disconnected() {
    let mut job = slow_rank_3();
    let page = pages(&job).remove(0);
    let events = Events::open(&page);
    let good = thread::spawn(|| events.last().map(|(name, _)| name));
    let slow: Vec<_> = (0..31).map(|_| narrow(&page)).collect();
    // Each may have to wait until the server has handled those before.
    let watch = || {
        let mut stream = BufReader::new(ask(&page, "GET /api/v1/watch", &[]));
        let mut first = String::new();
        stream.read_line(&mut first).is_ok().then_some((stream, first))
    };
    job.wait_for("all places taken", || watch()?.1.contains(" 429 ").then_some(()));
    // A viewer that is not disconnected yet would become a good one as soon as it is read.
    let mut others = Vec::new();
    job.wait_for("all places free again", || {
        let (stream, first) = watch()?;
        if first.contains(" 200 ") {
            others.push(stream);
        }
        (others.len() == slow.len()).then_some(())
    });
    drop(others);
    for stream in slow {
        // The server may have closed it meanwhile, because it accepted nothing.
        if let Some((name, reason)) = Events::of(stream).last()
            && name == "end"
        {
            assert!(reason.contains("does not read"), "BOUND: {reason}");
        }
    }
    job.allow("end");
    assert_eq!(good.join().unwrap().as_deref(), Some("end"));
    job.finish().assert_code(0);
}

#[test]
fn remote_access_needs_a_token() {
    let start = |launch: Launch| {
        let launch = launch.ranks(2).words(&["--verbose"]).set("metrics.listen=0.0.0.0:0");
        let job = launch.rank(&["attach", "loop:1:1000", "until:end", "leave"]).start();
        job.until_said("looped", 2);
        let port = pages(&job).remove(0).rsplit_once(':').unwrap().1.to_owned();
        (job, format!("127.0.0.1:{port}"))
    };
    let (mut job, page) = start(Launch::new());
    let refused = get(&page, "/api/v1/status");
    assert_eq!(refused.code, 403);
    assert!(refused.error().1.contains("metrics.token_file"), "{refused:?}");
    let refused = get(&page, "/");
    assert_eq!(refused.code, 403);
    assert!(refused.body.contains("metrics.token_file"), "{refused:?}");
    assert_eq!(get(&page, "/metrics").code, 200);
    job.allow("end");
    job.finish().assert_code(0);

    let launch = Launch::new();
    let file = launch.folder().join("token");
    fs::write(&file, format!("{TOKEN}\n")).unwrap();
    let setting = format!("metrics.token_file={}", file.display());
    let (mut job, page) = start(launch.set(&setting));
    for headers in [&[][..], &[("Authorization", "Bearer 0123456789abcdef")]] {
        let refused = answer(&page, "GET /api/v1/status", headers);
        assert_eq!(refused.code, 401);
        assert!(refused.head.contains("\r\nwww-authenticate: Bearer\r\n"), "{refused:?}");
        assert!(refused.error().1.contains("Authorization: Bearer"), "{refused:?}");
        // A browser gets a page that asks for the token and contains nothing about the job.
        let headers = [headers, &[("Accept", "text/html")]].concat();
        let asked = answer(&page, "GET /", &headers);
        assert_eq!(asked.code, 401);
        assert!(asked.body.contains("A token is required"), "{asked:?}");
    }
    let bearer = format!("Bearer {TOKEN}");
    let headers = [("Authorization", bearer.as_str())];
    checked(&answer(&page, "GET /api/v1/status", &headers).body);
    assert_eq!(answer(&page, "GET /", &headers).code, 200);
    job.allow("end");
    job.finish().assert_code(0);
}

#[test]
fn a_wrong_token_file_is_reported_at_first() {
    let empty = tempfile::NamedTempFile::new().unwrap();
    let launch = Launch::new().ranks(1).set("metrics.token_file=token");
    let report = launch.rank(&["attach", "leave"]).run();
    report.assert_code(2);
    assert!(report.all().contains("metrics.token_file = token must be an absolute path"));
    for (file, says) in
        [("/does/not/exist", "No such file"), (empty.path().to_str().unwrap(), "contains no token")]
    {
        let launch = Launch::new().ranks(1).set(&format!("metrics.token_file={file}"));
        let report = launch.rank(&["attach", "leave"]).run();
        report.assert_code(1);
        let text = report.all();
        assert!(text.contains(&format!("metrics.token_file = \"{file}\"")), "{text}");
        assert!(text.contains(says), "{text}");
    }
}
