//! Running the service, and stopping it without losing a charge.

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::ListenerExt as _;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use oncekey::Store;

use crate::arguments::Settings;
use crate::service::Payments;
use crate::{Failure, say, tiers};

/// How long a stop waits, after the drain, for clients to take their answers.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// The service at work.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) payments: Arc<Payments>,
    drain: Duration,
    close: watch::Sender<bool>,
    server: JoinHandle<io::Result<()>>,
}

impl Running {
    pub(crate) async fn start(settings: &Settings) -> Result<Self, Failure> {
        let mut store = Store::builder();
        if let Some(retention) = settings.retention {
            store = store.retention(retention);
        }
        if let Some(lease) = settings.lease {
            store = store.lease(lease);
        }
        if let Some(keys) = settings.max_keys {
            store = store.max_keys(keys);
        }
        if let Some(bytes) = settings.max_bytes {
            store = store.max_bytes(bytes);
        }
        if let Some(abandon) = settings.on_abandon {
            store = store.on_abandon(abandon);
        }
        let store = store.build().map_err(|error| Failure::Usage(error.to_string()))?;

        let listener = TcpListener::bind(&settings.listen[..]).await.map_err(|error| {
            Failure::Run(format!("cannot listen on {:?}: {error}", settings.listen))
        })?;
        let address = listener.local_addr()?;
        let (close, closing) = watch::channel(false);
        let opened = tiers::open(store.clone(), &settings.tier, settings.on_lapse).await?;
        let payments = Payments::new(store, opened, closing.clone());

        // HTTP/1.1 and HTTP/2 (with prior knowledge) on the same port.
        let listener = listener.tap_io(|connection| {
            let _ = connection.set_nodelay(true); // an answer in two packets would wait for an ACK
        });
        let router = payments.router(settings.wait);
        let server = axum::serve(listener, router).with_graceful_shutdown(closed(closing));
        let server = tokio::spawn(server.into_future());
        Ok(Self { address, payments, drain: settings.drain, close, server })
    }

    /// Stops: no new connections, and no new charges but of those who wait already. Each charge that
    /// runs comes to its end and its answer is stored, also if its client has left; those who wait
    /// get it.
    pub(crate) async fn stop(self) -> String {
        let _ = self.close.send(true);
        let drained = timeout(self.drain, self.payments.store().drain()).await.is_ok();
        let _ = timeout(CLOSE_LIMIT, self.server).await;

        let executions = self.payments.executions();
        let stats = self.payments.store().stats();
        let mut report = format!(
            "stopped; charges run: {executions}, answers stored: {}, in flight: {}",
            stats.completed, stats.in_flight,
        );
        if !drained {
            let _ = write!(report, " (given up after {} ms)", self.drain.as_millis());
        }
        report
    }
}

async fn closed(mut closing: watch::Receiver<bool>) {
    let _ = closing.wait_for(|closing| *closing).await;
}

/// `serve`: until SIGTERM or Ctrl-C, then drain; a second signal does not wait for the drain.
pub(crate) async fn serve(settings: &Settings) -> Result<(), Failure> {
    // Listened to before the address is printed: whoever reads it may stop us at once.
    let mut signals = Signals::listen()?;
    let running = Running::start(settings).await?;
    say(&format!("listening on http://{}", running.address));
    signals.next().await;
    tokio::select! {
        report = running.stop() => {
            say(&report);
            Ok(())
        }
        () = signals.next() => Err(Failure::Run("stopped by a second signal".into())),
    }
}

#[cfg(unix)]
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn listen() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn listen() -> io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending().await
        }
    }
}
