//! A headless Chromium with one page, told what to do over a pipe (DevTools protocol).
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

use std::{
    path::PathBuf,
    process::Stdio,
    sync::atomic::{AtomicUsize, Ordering},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command},
};

const PROGRAMS: [&str; 3] =
    ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];

/// It ends with its value, and with the test: it does when its pipe is closed.
pub struct Chromium {
    _child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    calls: u64,
    /// Of its page.
    session: String,
    profile: PathBuf,
}

impl Chromium {
    /// A new one with an empty page; `None` where it is not installed, which it then says; with `CI` set
    /// that is a failure.
    pub async fn start() -> Option<Self> {
        let Some(program) = PROGRAMS.into_iter().find(|path| PathBuf::from(path).exists()) else {
            let how = "chromium is not installed: apt-get install --no-install-recommends chromium";
            assert!(std::env::var_os("CI").is_none(), "{how}");
            println!("skipped: {how}");
            return None;
        };
        static STARTED: AtomicUsize = AtomicUsize::new(0);
        let nth = STARTED.fetch_add(1, Ordering::SeqCst);
        let profile = format!("oncekey-chromium-{}-{nth}", std::process::id());
        let profile = std::env::temp_dir().join(profile);
        // It reads its orders from descriptor 3 and writes to 4.
        let mut child = Command::new("/bin/sh")
            .args([
                "-c",
                r#"exec "$@" 3<&0 4>&1 0</dev/null 1>/dev/null 2>/dev/null"#,
                "sh",
                program,
            ])
            .args(["--headless", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"])
            // As root, as in a container, its sandbox does not start; all it loads is the example.
            .args(["--no-sandbox", "--disable-dev-shm-usage"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (from, session) = (BufReader::new(from), String::new());
        let mut own = Self { _child: child, to, from, calls: 0, session, profile };
        let page = own.call("Target.createTarget", json!({"url": "about:blank"})).await;
        let page = json!({"targetId": page["targetId"], "flatten": true});
        let session = own.call("Target.attachToTarget", page).await;
        own.session = session["sessionId"].as_str().unwrap().to_owned();
        Some(own)
    }

    /// Calls a method of the protocol, and waits for its answer.
    async fn call(&mut self, method: &str, params: Value) -> Value {
        self.calls += 1;
        let mut call = json!({"id": self.calls, "method": method, "params": params});
        if !self.session.is_empty() {
            call["sessionId"] = self.session.clone().into();
        }
        self.to.write_all(format!("{call}\0").as_bytes()).await.unwrap();
        loop {
            let mut answer = Vec::new();
            self.from.read_until(0, &mut answer).await.unwrap();
            assert_eq!(answer.pop(), Some(0), "chromium has ended");
            let mut answer: Value = serde_json::from_slice(&answer).unwrap();
            if answer["id"] == self.calls {
                assert!(answer["error"].is_null(), "{method}: {answer}");
                return answer["result"].take();
            }
        }
    }

    pub async fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({"url": url})).await;
        self.until("document.readyState === 'complete'").await;
    }

    /// Loads the page anew, as its user would.
    pub async fn reload(&mut self) {
        self.value("window.isOld = true").await;
        self.call("Page.reload", json!({})).await;
        self.until("window.isOld === undefined && document.readyState === 'complete'").await;
    }

    /// The value of an expression, or of its promise.
    pub async fn value(&mut self, expression: &str) -> Value {
        let expression =
            json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let mut done = self.call("Runtime.evaluate", expression).await;
        assert!(done["exceptionDetails"].is_null(), "{done}");
        done["result"]["value"].take()
    }

    /// Waits until an expression is true. Under a watchdog only.
    pub async fn until(&mut self, expression: &str) {
        while self.value(expression).await != true {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    /// Presses the left button of the mouse over an element, so many times in a row.
    pub async fn press(&mut self, id: &str, times: usize) {
        let middle = format!(
            "(() => {{ const at = document.getElementById('{id}').getBoundingClientRect(); \
             return [at.x + at.width / 2, at.y + at.height / 2] }})()"
        );
        let at = self.value(&middle).await;
        for count in 1..=times {
            for kind in ["mousePressed", "mouseReleased"] {
                let event = json!({"type": kind, "x": at[0], "y": at[1], "button": "left",
                    "clickCount": count});
                self.call("Input.dispatchMouseEvent", event).await;
            }
        }
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _ = self._child.start_kill();
        let _ = std::fs::remove_dir_all(&self.profile);
    }
}
