//! The example payment service as a process of its own.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is for tests")]

use std::{
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    process::{Child, Command, Stdio},
};

use crate::program::program;

/// It ends with its value.
pub struct Payments {
    child: Child,
    pub address: SocketAddr,
}

impl Payments {
    pub fn start(flags: &[&str]) -> Self {
        let mut child = Command::new(program("payments"))
            .args(["serve", "--listen", "127.0.0.1:0"])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim_end().strip_prefix("listening on http://").unwrap();
        Self { child, address: address.parse().unwrap() }
    }

    /// A number of `GET /stats`.
    pub async fn stat(&self, name: &str) -> u64 {
        let stats = reqwest::get(format!("http://{}/stats", self.address)).await.unwrap();
        let stats: serde_json::Value =
            serde_json::from_slice(&stats.bytes().await.unwrap()).unwrap();
        stats[name].as_u64().unwrap()
    }

    /// Waits until a number of `GET /stats` is as it should be. Under a watchdog only.
    pub async fn until_stat(&self, name: &str, is_it: impl Fn(u64) -> bool) {
        while !is_it(self.stat(name).await) {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Payments {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
