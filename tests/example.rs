//! The example as its users meet it: a program with arguments, sockets and signals.
#![cfg(all(feature = "axum", unix))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "common/program.rs"]
mod program;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use program::program;

const ORDER: &str = r#"{"amount_cents":1999,"currency":"usd","source":"pm_card"}"#;
const EDITED: &str = r#"{"amount_cents":2999,"currency":"usd","source":"pm_card"}"#;
/// Nothing takes that long: a watchdog.
const LONG: Duration = Duration::from_secs(120);

#[test]
fn the_default_run_keeps_every_promise() {
    let output = run(&[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}{:?}", output.stderr);
    assert!(text.trim_end().ends_with("promises kept."), "{text}");
    assert!(text.contains("3 intents, 3 charges"), "{text}");
    assert!(!text.contains("BROKEN"), "{text}");
    assert!(text.is_ascii() && text.lines().all(|line| line.len() <= 100), "{text}");
}

#[test]
fn wrong_arguments_end_with_status_2_and_name_the_mistake() {
    for (arguments, named) in [
        (&["run"][..], "run"),
        (&["--listen", "127.0.0.1:0"], "--listen"),
        (&["serve", "extra"], "extra"),
        (&["serve", "--bogus"], "unknown flag --bogus"),
        (&["serve", "--bogus=1"], "unknown flag --bogus"),
        (&["serve", "--wait-ms"], "--wait-ms wants a value"),
        (&["serve", "--wait-ms", "-1"], "--wait-ms"),
        (&["serve", "--wait-ms=1.5"], "--wait-ms"),
        (&["serve", "--listen", "nonsense"], "--listen"),
        (&["serve", "--max-keys", "18446744073709551616"], "--max-keys"),
        (&["serve", "--on-abandon", "maybe"], "--on-abandon"),
        (&["serve", "--listen", "127.0.0.1:0", "--retention-ms", "0"], "retention"),
        (&["serve", "--listen", "127.0.0.1:0", "--lease-ms", "0"], "lease"),
        (&["serve", "--listen", "127.0.0.1:0", "--max-keys", "0"], "max_keys"),
    ] {
        let output = run(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(named), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn an_address_in_use_ends_with_status_1() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = run(&["serve", "--listen", &address]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains(&address));
}

#[test]
fn a_charge_is_made_once_and_belongs_to_its_account() {
    let service = Service::start(&[]);
    let slow = "/charges?delay_ms=300";

    let left = service.open("POST", slow, ACME_K1, ORDER);
    service.until_executions(1);
    drop(left);
    let first = service.post(slow, ACME_K1, ORDER);
    assert_eq!((first.status, first.header("idempotent-replayed")), (201, Some("true")));
    let again = service.post(slow, ACME_K1, ORDER);
    assert_eq!((again.status, &again.body), (201, &first.body));
    assert_eq!(service.post(slow, ACME_K1, EDITED).status, 422);
    assert_eq!(service.executions(), 1);

    let location = first.header("location").unwrap();
    let id = location.strip_prefix("/charges/").unwrap();
    assert_eq!(first.body, format!(r#"{{"id":"{id}","amount_cents":1999,"currency":"usd"}}"#));
    assert!(id.starts_with("ch_"));
    assert_eq!(service.get(location, ACME).body, first.body);
    assert_eq!(service.get(location, "Authorization: Bearer other").status, 404);
    assert_eq!(service.get("/charges/ch_0", ACME).status, 404);

    // The key belongs to the account: the same one of somebody else is another intent.
    let other = service.post(slow, "Authorization: Bearer other\r\nIdempotency-Key: k1", ORDER);
    assert_eq!((other.status, other.header("idempotent-replayed")), (201, None));
    assert_ne!(other.body, first.body);
}

#[test]
fn who_says_not_who_they_are_gets_401() {
    let service = Service::start(&[]);
    for head in [
        "Idempotency-Key: k1",
        "Idempotency-Key: k1\r\nAuthorization: Bearer",
        "Idempotency-Key: k1\r\nAuthorization: Bearer   ",
        "Idempotency-Key: k1\r\nAuthorization: Basic YTpi",
        "Idempotency-Key: k1\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b",
    ] {
        let answer = service.post("/charges", head, ORDER);
        assert_eq!((answer.status, answer.header("www-authenticate")), (401, Some("Bearer")));
    }
    assert_eq!(service.get("/charges/ch_1", "Accept: */*").status, 401);
    assert_eq!(service.executions(), 0);
}

#[test]
fn a_refused_body_leaves_the_key_free_for_the_corrected_one() {
    let service = Service::start(&[]);
    let body = |amount: &str, currency: &str, source: &str| {
        format!(r#"{{"amount_cents":{amount},"currency":{currency},"source":{source}}}"#)
    };
    let mut bad = vec![String::new(), "{".into(), "[]".into(), "null".into(), "\"x\"".into()];
    bad.push(ORDER.replace(r#","source":"pm_card""#, ""));
    for amount in ["0", "-1", "1.5", "1e3", "1.0", "\"5\"", "null", "true", "[1]"] {
        bad.push(body(amount, "\"usd\"", "\"pm_card\""));
    }
    bad.push(body("9223372036854775808", "\"usd\"", "\"pm_card\""));
    bad.push(body("99999999999999999999999", "\"usd\"", "\"pm_card\""));
    for currency in ["\"USD\"", "\"us\"", "\"usdd\"", "\"u-d\"", "1", "null"] {
        bad.push(body("1", currency, "\"pm_card\""));
    }
    for source in ["\"card\"", "\"PM_card\"", "\"\"", "1", "null"] {
        bad.push(body("1", "\"usd\"", source));
    }
    for bad in bad {
        let answer = service.post("/charges", ACME_K1, &bad);
        assert_eq!(answer.status, 400, "{bad}");
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
    }
    assert_eq!(service.executions(), 0);
    let answer = service.post("/charges", ACME_K1, ORDER);
    assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, None));
}

#[test]
fn a_bad_query_is_a_400_that_charges_nobody() {
    let service = Service::start(&[]);
    for query in [
        "delay_ms=-1",
        "delay_ms=x",
        "delay_ms=",
        "delay_ms=99999999999999999999",
        "respond=99",
        "respond=101",
        "respond=600",
        "respond=ok",
        "fault=nap",
        "body_bytes=-1",
        "body_bytes=1e3",
        "stream=yes",
    ] {
        assert_eq!(
            service.post(&format!("/charges?{query}"), ACME_K1, ORDER).status,
            400,
            "{query}"
        );
    }
    assert_eq!(service.executions(), 0);
}

#[test]
fn statuses_without_a_body_are_legal_http_and_replay() {
    let service = Service::start(&[]);
    for status in [204, 205, 304] {
        let head = format!("Authorization: Bearer acme\r\nIdempotency-Key: k{status}");
        let path = format!("/charges?respond={status}");
        for replayed in [None, Some("true")] {
            // Another request behind it on the same connection shows that the framing holds.
            let mut socket = service.open_keep_alive("POST", &path, &head, ORDER);
            let rest = "Host: x\r\nConnection: close\r\n\r\n";
            write!(socket, "GET /stats HTTP/1.1\r\n{rest}").unwrap();
            let bytes = read_all(socket);
            let (first, second) = bytes.split_once("\r\n\r\n").unwrap();
            let first = Answer::parse(&format!("{first}\r\n\r\n"));
            assert_eq!((first.status, first.header("idempotent-replayed")), (status, replayed));
            assert_eq!(Answer::parse(second).status, 200, "{bytes}");
        }
    }
    assert_eq!(service.executions(), 3);
}

#[test]
fn an_answer_is_padded_to_the_byte() {
    let service = Service::start(&[]);
    for (i, bytes) in [500, 70_000, 1 << 20].into_iter().enumerate() {
        let head = format!("Authorization: Bearer acme\r\nIdempotency-Key: k{i}");
        let answer = service.post(&format!("/charges?body_bytes={bytes}"), &head, ORDER);
        assert_eq!((answer.status, answer.body.len()), (201, bytes));
        let json: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
        assert_eq!(json["amount_cents"], 1999);
        assert!(json["pad"].is_string());
    }
}

#[test]
fn after_a_panic_a_retry_is_told_that_nobody_knows_or_runs_as_it_was_set() {
    for (flags, retry, executions) in [(&[][..], 409, 1), (&["--on-abandon", "release"], 500, 2)] {
        let service = Service::start(flags);
        let path = "/charges?fault=panic";
        assert_eq!(service.post(path, ACME_K1, ORDER).status, 500);
        let again = service.post(path, ACME_K1, ORDER);
        assert_eq!((again.status, again.header("retry-after")), (retry, None), "{flags:?}");
        assert_eq!(service.executions(), executions);
    }
}

#[test]
fn a_duplicate_waits_no_longer_than_it_was_set() {
    let service = Service::start(&["--wait-ms", "0"]);
    let path = "/charges?pause=1";
    let owner = service.open("POST", path, ACME_K1, ORDER);
    service.until_executions(1);
    let hasty = service.post(path, ACME_K1, ORDER);
    assert_eq!(hasty.status, 409);
    assert!(hasty.header("retry-after").is_some());
    service.resume();
    let owner = Answer::parse(&read_all(owner));
    assert_eq!((owner.status, owner.header("idempotent-replayed")), (201, None));
}

#[test]
fn an_answer_ends_with_its_retention() {
    let service = Service::start(&["--retention-ms", "300"]);
    let first = service.post("/charges", ACME_K1, ORDER);
    let end = Instant::now() + LONG;
    let mut fresh = service.post("/charges", ACME_K1, ORDER);
    while fresh.header("idempotent-replayed").is_some() && Instant::now() < end {
        thread::sleep(Duration::from_millis(50));
        fresh = service.post("/charges", ACME_K1, ORDER);
    }
    assert_eq!(fresh.status, 201);
    assert_ne!(fresh.body, first.body);
}

#[test]
fn a_full_store_refuses_before_it_runs() {
    let service = Service::start(&["--max-keys", "2"]);
    let statuses = ["k1", "k2", "k3", "k1"].map(|key| {
        let head = format!("Authorization: Bearer acme\r\nIdempotency-Key: {key}");
        service.post("/charges", &head, ORDER).status
    });
    assert_eq!(statuses, [201, 201, 503, 201]);
    assert_eq!(service.executions(), 2);
}

#[test]
fn a_stop_lets_a_charge_end_whose_client_has_left() {
    let service = Service::start(&[]);
    let left = service.open("POST", "/charges?delay_ms=1000", ACME_K1, ORDER);
    service.until_executions(1);
    drop(left);
    let (status, said) = service.stop();
    assert_eq!(status, Some(0), "{said}");
    assert_eq!(said.trim(), "stopped; charges run: 1, answers stored: 1, in flight: 0");
}

#[test]
fn a_stop_takes_no_new_clients_and_answers_those_who_wait() {
    let service = Service::start(&[]);
    let path = "/charges?pause=1";
    let left = service.open("POST", path, ACME_K1, ORDER);
    service.until_executions(1);
    drop(left);
    let waits = service.open("POST", path, ACME_K1, ORDER);
    service.until(r#""waiters":1"#);
    // The service is at this request already when it stops; with its body the charge may end.
    let mut resume = service.begin("/resume", 1);
    service.signal("TERM");
    service.until_closed();
    resume.write_all(b"x").unwrap();
    let answer = Answer::parse(&read_all(waits));
    assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, Some("true")));
    let (status, said) = service.wait();
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("charges run: 1, answers stored: 1, in flight: 0"), "{said}");
}

#[test]
fn a_stop_ends_endless_streams() {
    let service = Service::start(&[]);
    let mut stream = BufReader::new(service.open("POST", "/charges?stream=1", ACME_K1, ORDER));
    let mut line = String::new();
    for _ in 0..2 {
        line.clear();
        while !line.starts_with("data: ") {
            line.clear();
            assert_ne!(stream.read_line(&mut line).unwrap(), 0, "the stream ended");
        }
    }
    // It has no end, so it is not kept; the retry is told so and does not run.
    assert_eq!(service.post("/charges?stream=1", ACME_K1, ORDER).status, 409);
    assert_eq!(service.executions(), 1);

    let (status, said) = service.stop();
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("in flight: 0"), "{said}");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.ends_with("0\r\n\r\n"), "not ended by HTTP: {rest:?}");
}

#[test]
fn a_charge_that_hangs_does_not_hold_up_a_stop_for_ever() {
    let service = Service::start(&["--drain-ms", "300"]);
    let hangs = service.open("POST", "/charges?fault=hang", ACME_K1, ORDER);
    service.until_executions(1);
    drop(hangs);
    service.signal("TERM");
    // Less than it would wait if it had not been told otherwise.
    let (status, said) = service.wait_for(Duration::from_secs(20));
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("in flight: 1 (given up after 300 ms)"), "{said}");
}

#[test]
fn a_second_signal_does_not_wait() {
    let service = Service::start(&[]);
    let _hangs = service.open("POST", "/charges?fault=hang", ACME_K1, ORDER);
    service.until_executions(1);
    service.signal("INT");
    // Two signals at once are one: the second goes out when the first has come.
    service.until_closed();
    service.signal("INT");
    let (status, said) = service.wait();
    assert_eq!(status, Some(1), "{said}");
}

#[test]
fn both_versions_of_http_are_spoken_on_the_one_port() {
    let service = Service::start(&[]);
    let first = service.post("/charges", ACME_K1, ORDER);

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (status, replayed, body) = runtime.block_on(async {
        let socket = tokio::net::TcpStream::connect(service.address).await.unwrap();
        let (client, connection) = h2::client::handshake(socket).await.unwrap();
        let connection = tokio::spawn(connection);
        let request = axum::http::Request::post(format!("http://{}/charges", service.address))
            .header("authorization", "Bearer acme")
            .header("idempotency-key", "k1")
            .body(())
            .unwrap();
        let mut client = client.ready().await.unwrap();
        let (answer, mut body) = client.send_request(request, false).unwrap();
        body.send_data(ORDER.into(), true).unwrap();
        let answer = answer.await.unwrap();
        let replayed = answer.headers().get("idempotent-replayed").cloned();
        let (status, mut stream) = (answer.status().as_u16(), answer.into_body());
        let mut body = Vec::new();
        while let Some(bytes) = stream.data().await {
            body.extend_from_slice(&bytes.unwrap());
        }
        connection.abort();
        (status, replayed.unwrap(), body)
    });
    assert_eq!((status, replayed.as_bytes()), (201, &b"true"[..]));
    assert_eq!(body, first.body.as_bytes());
}

#[test]
fn the_smoke_test_passes_against_the_example() {
    if !curl_is_installed() {
        return;
    }
    for flags in [&[][..], &["--wait-ms", "0"]] {
        let service = Service::start(flags);
        let (status, said) = smoke_resumed(&service);
        assert_eq!(status, Some(0), "{said}");
        assert!(said.contains("cut off"), "{said}");
        assert_eq!(service.executions(), 1);

        // A service that is faster than the cut.
        let output = smoke(&service.address, &["/charges"]);
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(0), "{said}{:?}", output.stderr);
        assert!(said.contains("answered before the cut"), "{said}");
        assert_eq!(service.executions(), 2);

        // What cannot be judged is neither passed nor failed.
        let output = smoke(&service.address, &["/nowhere"]);
        assert_eq!(output.status.code(), Some(2));
    }
}

#[test]
fn the_smoke_test_fails_against_a_service_that_runs_twice() {
    if !curl_is_installed() {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for (i, socket) in listener.incoming().enumerate() {
            let mut socket = BufReader::new(socket.unwrap());
            let (mut line, mut length) = (String::new(), 0);
            while line != "\r\n" {
                line.clear();
                socket.read_line(&mut line).unwrap();
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
            }
            socket.read_exact(&mut vec![0; length]).unwrap();
            let head = "HTTP/1.1 201 Created\r\nConnection: close\r\nContent-Length: 8\r\n\r\n";
            write!(socket.get_mut(), "{head}{i:8}").unwrap();
        }
    });
    let output = smoke(&address, &["/charges"]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(said.matches("FAIL  ").count(), 3, "{said}"); // no mark, other bytes, no 422
}

const ACME: &str = "Authorization: Bearer acme";
const ACME_K1: &str = "Authorization: Bearer acme\r\nIdempotency-Key: k1";

fn run(arguments: &[&str]) -> Output {
    Command::new(program("payments")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Against a service that is faster than the cut, which is out of reach.
fn smoke(address: &SocketAddr, path: &[&str]) -> Output {
    smoke_cut(address, path, LONG.as_secs()).output().unwrap()
}

/// Against a service that is at work until the first attempt was cut off.
fn smoke_resumed(service: &Service) -> (Option<i32>, String) {
    let mut smoke = smoke_cut(&service.address, &["/charges?pause=1"], 1);
    let mut smoke = smoke.stdout(Stdio::piped()).spawn().unwrap();
    let (mut said, mut out) = (String::new(), BufReader::new(smoke.stdout.take().unwrap()));
    while out.read_line(&mut said).unwrap() > 0 {
        if said.lines().last().is_some_and(|line| line.starts_with("2. The retry")) {
            service.resume();
        }
    }
    (smoke.wait().unwrap().code(), said)
}

fn smoke_cut(address: &SocketAddr, path: &[&str], cut: u64) -> Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/smoke.sh");
    let url = format!("http://{address}");
    let mut smoke = Command::new("bash");
    smoke.arg(script).args([&url, "acme"]).args(path).env("CUT", cut.to_string());
    smoke
}

fn curl_is_installed() -> bool {
    let found = Command::new("curl").arg("--version").output().is_ok();
    assert!(found || std::env::var_os("CI").is_none(), "CI must have curl");
    if !found {
        println!("skipped: curl is not installed");
    }
    found
}

/// The example in serve mode; killed when dropped.
struct Service {
    child: Child,
    out: BufReader<ChildStdout>,
    address: SocketAddr,
}

impl Service {
    fn start(flags: &[&str]) -> Self {
        let mut child = Command::new(program("payments"))
            .args(["serve", "--listen", "127.0.0.1:0"])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let address = line.trim_end().strip_prefix("listening on http://").unwrap();
        let address = address.parse().unwrap();
        Self { child, out, address }
    }

    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// SIGTERM, then as `wait`.
    fn stop(self) -> (Option<i32>, String) {
        self.signal("TERM");
        self.wait()
    }

    /// As `wait_for`, as long as it takes.
    fn wait(self) -> (Option<i32>, String) {
        self.wait_for(LONG)
    }

    /// The exit status and what was printed after the address. The limit is a watchdog.
    fn wait_for(mut self, limit: Duration) -> (Option<i32>, String) {
        let end = Instant::now() + limit;
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status.code(),
                None if Instant::now() > end => panic!("it does not stop"),
                None => thread::sleep(Duration::from_millis(10)),
            }
        };
        let mut said = String::new();
        self.out.read_to_string(&mut said).unwrap();
        (status, said)
    }

    fn open(&self, method: &str, path: &str, head: &str, body: &str) -> TcpStream {
        self.open_keep_alive(method, path, &format!("{head}\r\nConnection: close"), body)
    }

    fn open_keep_alive(&self, method: &str, path: &str, head: &str, body: &str) -> TcpStream {
        let mut socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\n{head}", self.address);
        let request = format!("{head}\r\nContent-Length: {length}\r\n\r\n{body}");
        socket.write_all(request.as_bytes()).unwrap();
        socket
    }

    /// A `POST` of which all but the body of `length` bytes is sent, once the service is at it.
    fn begin(&self, path: &str, length: usize) -> TcpStream {
        let mut socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nHost: {}\r\n{ACME}", self.address);
        let rest = format!("Expect: 100-continue\r\nContent-Length: {length}\r\n\r\n");
        socket.write_all(format!("{head}\r\n{rest}").as_bytes()).unwrap();
        let told = "HTTP/1.1 100 Continue\r\n\r\n";
        let mut bytes = vec![0; told.len()];
        socket.read_exact(&mut bytes).unwrap();
        assert_eq!(String::from_utf8_lossy(&bytes), told);
        socket
    }

    /// Lets a charge with `pause=1` go on.
    fn resume(&self) {
        assert_eq!(self.post("/resume", ACME, "").status, 204);
    }

    fn post(&self, path: &str, head: &str, body: &str) -> Answer {
        Answer::parse(&read_all(self.open("POST", path, head, body)))
    }

    fn get(&self, path: &str, head: &str) -> Answer {
        Answer::parse(&read_all(self.open("GET", path, head, "")))
    }

    fn executions(&self) -> u64 {
        let stats = self.get("/stats", ACME);
        let stats: serde_json::Value = serde_json::from_str(&stats.body).unwrap();
        stats["executions"].as_u64().unwrap()
    }

    /// Until it takes no new clients.
    fn until_closed(&self) {
        let end = Instant::now() + LONG;
        while TcpStream::connect(self.address).is_ok() {
            assert!(Instant::now() < end, "it still takes new clients");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn until_executions(&self, count: u64) {
        self.until(&format!(r#""executions":{count}"#));
    }

    /// Until the stats show this member.
    fn until(&self, member: &str) {
        let end = Instant::now() + LONG;
        let mut stats = String::new();
        while Instant::now() < end {
            stats = self.get("/stats", ACME).body;
            if stats.contains(&format!("{member},")) || stats.contains(&format!("{member}}}")) {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        panic!("{member} never came: {stats}");
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_all(mut socket: TcpStream) -> String {
    let mut bytes = Vec::new();
    socket.read_to_end(&mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
        let status = head.get(9..12).unwrap().parse().unwrap();
        let answer = Self { status, head: head.to_owned(), body: body.to_owned() };
        if let Some(length) = answer.header("content-length") {
            assert_eq!(length, body.len().to_string(), "{text}");
        }
        answer
    }

    fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }
}
