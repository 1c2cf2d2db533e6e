//! A careless client, a bad network, and what they may rely on.

use std::io::{self, IsTerminal as _};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::arguments::Settings;
use crate::server::Running;
use crate::{Failure, say};

const ORDER: &str = r#"{"amount_cents":1999,"currency":"usd","source":"pm_card"}"#;
const EDITED: &str = r#"{"amount_cents":2999,"currency":"usd","source":"pm_card"}"#;

/// Makes the calls of the promise; an error if one was broken.
pub(crate) async fn make_good() -> Result<(), Failure> {
    let service = Running::start(&Settings::new(SocketAddr::from(([127, 0, 0, 1], 0)))).await?;
    let paint = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    Promises { service, paint, steps: 0, requests: 0, kept: 0, broken: 0 }.run().await
}

/// One request as the client sends it.
#[derive(Clone, Copy)]
struct Call {
    path: &'static str,
    key: Option<&'static str>,
    prefer: Option<&'static str>,
    body: &'static str,
}

/// One answer as it came over the wire.
struct Answer {
    status: String,
    headers: Vec<(String, String)>,
    body: String,
    took: Duration,
}

impl Call {
    fn head(&self) -> Vec<String> {
        let mut head = vec![format!("POST {} HTTP/1.1", self.path)];
        head.push("Authorization: Bearer acme".to_owned());
        head.extend(self.key.map(|key| format!("Idempotency-Key: \"{key}\"")));
        head.extend(self.prefer.map(|prefer| format!("Prefer: {prefer}")));
        head
    }

    async fn write(&self, to: SocketAddr) -> io::Result<TcpStream> {
        let mut socket = TcpStream::connect(to).await?;
        let head = self.head().join("\r\n");
        let (body, length) = (self.body, self.body.len());
        let rest = format!("Host: {to}\r\nConnection: close\r\nContent-Length: {length}");
        socket.write_all(format!("{head}\r\n{rest}\r\n\r\n{body}").as_bytes()).await?;
        Ok(socket)
    }

    /// Sends it on a connection of its own and reads to the end.
    async fn send(self, to: SocketAddr) -> io::Result<Answer> {
        let start = Instant::now();
        let exchange = async {
            let mut bytes = Vec::new();
            self.write(to).await?.read_to_end(&mut bytes).await?;
            Ok::<_, io::Error>(bytes)
        };
        let bytes = timeout(Duration::from_secs(30), exchange).await??;
        Answer::parse(&bytes, start.elapsed())
            .ok_or_else(|| io::Error::other("the answer is no whole HTTP answer"))
    }
}

impl Answer {
    fn parse(bytes: &[u8], took: Duration) -> Option<Self> {
        let (head, body) = str::from_utf8(bytes).ok()?.split_once("\r\n\r\n")?;
        let mut lines = head.lines();
        let status = lines.next()?.strip_prefix("HTTP/1.1 ")?.to_owned();
        let headers = lines
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
            .collect();
        let answer = Self { status, headers, body: body.to_owned(), took };
        let length: usize = answer.header("content-length")?.parse().ok()?;
        (body.len() == length).then_some(answer)
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    fn is(&self, status: u16) -> bool {
        self.status.starts_with(&status.to_string())
    }

    fn replayed(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }
}

/// Makes the calls, prints them, and counts what was kept.
struct Promises {
    service: Running,
    paint: bool,
    steps: u32,
    requests: u32,
    kept: u32,
    broken: u32,
}

impl Promises {
    async fn run(mut self) -> Result<(), Failure> {
        say(&format!(
            "A payment service listens on http://{}. Its POST /charges takes a while; it knows\n\
             nothing of retries. The layer in front of it does. Each call is a socket of its own.",
            self.service.address
        ));

        self.step("The client gives up while its charge is running");
        let slow =
            Call { path: "/charges?delay_ms=800", key: Some("order-1"), prefer: None, body: ORDER };
        self.show_call(&slow, "");
        let started = Instant::now();
        let socket = slow.write(self.service.address).await?;
        sleep(Duration::from_millis(200)).await;
        self.until_running(1).await;
        socket.set_zero_linger()?; // closing it now is a reset
        drop(socket);
        self.note("x", &format!("reset by the client after {} ms", started.elapsed().as_millis()));
        self.promise("the charge has begun", self.executions() == 1);

        self.step("It asks again with the same key, and waits for the charge it did not see end");
        let first = self.call(&slow).await?;
        self.promise("201, and it is the charge of the first attempt", {
            let id = self.service.payments.first_charge();
            first.is(201) && first.replayed() && id.is_some_and(|id| first.body.contains(&id))
        });
        self.promise("the handler did not run again", self.executions() == 1);

        self.step("And again, later: the stored answer, at once");
        let again = self.call(&slow).await?;
        self.promise("201 once more, marked as a replay", again.is(201) && again.replayed());
        self.promise("the same bytes", again.body == first.body);
        self.promise("the same Location", again.header("location") == first.header("location"));

        self.step("The same key with another amount");
        let reused = self.call(&Call { body: EDITED, ..slow }).await?;
        self.promise("422: a key names one intent", reused.is(422));
        self.promise("nobody was charged", self.executions() == 1);

        self.step("50 impatient clients send one new intent at the same moment");
        let storm = Call { path: "/charges?delay_ms=300", key: Some("order-2"), ..slow };
        let answers = self.storm(storm, 50).await?;
        self.promise("one charge", self.executions() == 2);
        self.promise("50 times 201 with the same bytes", {
            answers.iter().all(|answer| answer.is(201) && answer.body == answers[0].body)
        });
        self.promise("49 of them marked as replays", {
            answers.iter().filter(|answer| answer.replayed()).count() == 49
        });

        self.step("A duplicate that does not want to wait");
        let owner = Call { path: "/charges?pause=1", key: Some("order-3"), ..slow };
        let running = tokio::spawn(owner.send(self.service.address));
        self.requests += 1;
        self.note(".", "a first attempt with order-3 is running");
        self.until_running(3).await;
        let hasty = self.call(&Call { prefer: Some("wait=0"), ..owner }).await?;
        let after = hasty.header("retry-after").and_then(|after| after.parse::<u32>().ok());
        self.promise("409, and a time to come back", hasty.is(409) && after >= Some(1));
        self.service.payments.resume();
        let owner = running.await.map_err(io::Error::other)??;
        self.note(".", "and the first attempt gets");
        self.show_answer(&owner);
        self.promise("the first attempt is not disturbed", owner.is(201) && !owner.replayed());

        self.step("A request without a key");
        let bare = self.call(&Call { key: None, ..slow }).await?;
        self.promise("400: it could not be retried safely", bare.is(400));
        self.finish().await
    }

    async fn finish(self) -> Result<(), Failure> {
        let charges = self.executions();
        let charged = if charges == 3 { "as often as it should" } else { "NOT once each" };
        say(&format!("\n{} requests, 3 intents, {charges} charges: {charged}.", self.requests));
        let all = self.kept + self.broken;
        self.service.stop().await;
        if self.broken > 0 || charges != 3 {
            return Err(Failure::Run(format!("{} of {all} promises broken", self.broken)));
        }
        say(&format!("All {all} promises kept."));
        Ok(())
    }

    async fn call(&mut self, call: &Call) -> io::Result<Answer> {
        self.show_call(call, "");
        let answer = call.send(self.service.address).await?;
        self.show_answer(&answer);
        Ok(answer)
    }

    async fn storm(&mut self, call: Call, clients: u32) -> io::Result<Vec<Answer>> {
        self.show_call(&call, &format!("   ({clients} times at once)"));
        self.requests += clients - 1;
        let mut tasks: JoinSet<_> = (0..clients).map(|_| call.send(self.service.address)).collect();
        let mut answers = Vec::new();
        while let Some(answer) = tasks.join_next().await {
            answers.push(answer.map_err(io::Error::other)??);
        }
        if let Some(answer) = answers.first() {
            self.show_answer(answer);
        }
        Ok(answers)
    }

    fn executions(&self) -> u64 {
        self.service.payments.executions()
    }

    /// Waits until the handler has begun `count` charges; the promises will tell if it does not.
    async fn until_running(&self, count: u64) {
        for _ in 0..6000 {
            if self.executions() >= count {
                return;
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    fn step(&mut self, title: &str) {
        self.steps += 1;
        say(&self.paint("1", format!("\n{}. {title}", self.steps)));
    }

    fn show_call(&mut self, call: &Call, remark: &str) {
        self.requests += 1;
        for (i, line) in call.head().iter().enumerate() {
            let line = line.trim_end_matches(" HTTP/1.1");
            self.note(">", &format!("{line}{}", if i == 0 { remark } else { "" }));
        }
        self.note(">", call.body);
    }

    fn show_answer(&self, answer: &Answer) {
        self.note("<", &format!("{}   (after {} ms)", answer.status, answer.took.as_millis()));
        for name in ["Location", "Idempotent-Replayed", "Retry-After"] {
            if let Some(value) = answer.header(&name.to_ascii_lowercase()) {
                self.note("<", &format!("{name}: {value}"));
            }
        }
        for line in folded(&answer.body) {
            self.note("<", line.trim_end());
        }
    }

    fn note(&self, mark: &str, text: &str) {
        say(&format!("   {} {text}", self.paint("2", mark.to_owned())));
    }

    fn promise(&mut self, text: &str, kept: bool) {
        if kept {
            self.kept += 1;
            say(&format!("   {} {text}", self.paint("32", "kept  ".to_owned())));
        } else {
            self.broken += 1;
            say(&format!("   {} {text}", self.paint("1;31", "BROKEN".to_owned())));
        }
    }

    fn paint(&self, colour: &str, text: String) -> String {
        if self.paint { format!("\x1b[{colour}m{text}\x1b[0m") } else { text }
    }
}

/// JSON in lines that fit a terminal: broken before a member, and in a long one between words.
fn folded(json: &str) -> Vec<String> {
    const WIDTH: usize = 92;
    let mut lines = vec![String::new()];
    for member in json.replace(",\"", ",\n\"").lines() {
        let fits = lines.last().is_some_and(|line| line.len() + member.len() <= WIDTH);
        if !fits {
            lines.push(" ".to_owned());
        }
        for word in member.split_inclusive(' ') {
            match lines.last_mut() {
                Some(line) if line.len() + word.len() <= WIDTH => line.push_str(word),
                _ => lines.push(format!("  {word}")),
            }
        }
    }
    lines
}
