//! Waiting for what other nodes settle: LISTEN on a connection of its own (T5).
//!
//! Ground rules: a notification is a hint. It may be missing, if the record was in somebody's hands
//! when the wait was asked for, or while the connection was down; so who waits looks from time to
//! time. It names a hash of the identity, because every role of a database may listen.

use std::{collections::HashMap, fmt, time::Duration};

use sqlx::{
    Error,
    postgres::{PgConnectOptions, PgListener, PgPoolOptions},
};
use tokio::{sync::Notify, task::JoinHandle, time::sleep};

use crate::{
    Fingerprint, Identity, Scheme,
    sync::{Arc, Mutex},
};

/// How long after a failure the connection is made again.
const PAUSE: Duration = Duration::from_secs(1);

/// What a notification says, as hexadecimal digits.
pub(super) type Name = u128;

/// A hash of `id`, the same on every node.
pub(super) fn name(id: Identity<'_>) -> Name {
    let parts = [id.account(), id.endpoint(), id.key()].into_iter();
    let hash = Fingerprint::builder(Scheme::named("oncekey-settled-1"));
    let hash = parts.fold(hash, |hash, part| hash.part(part)).finish();
    hash.digest().iter().take(16).fold(0, |name, byte| (name << 8) | Name::from(*byte))
}

pub(super) struct Listener {
    waits: Arc<Waits>,
    task: JoinHandle<()>,
}

impl Listener {
    /// Listens to `channel` from before it returns until it is dropped.
    pub(super) async fn start(options: PgConnectOptions, channel: String) -> Result<Self, Error> {
        let listener = listen(&options, &channel).await?;
        let waits = Arc::<Waits>::default();
        let task = tokio::spawn(hear(options, channel, listener, Arc::clone(&waits)));
        Ok(Self { waits, task })
    }

    /// A place for whoever waits for `name`. It is told of what is notified from here on.
    pub(super) fn wait(&self, name: Name) -> Waiting<'_> {
        let notify = Arc::clone(self.waits.0.lock().entry(name).or_default());
        Waiting { waits: &self.waits, name, notify }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("waits", &self.waits.0.lock().len()).finish()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Who is told, by what is said.
#[derive(Default)]
struct Waits(Mutex<HashMap<Name, Arc<Notify>>>);

impl Waits {
    fn tell(&self, payload: &str) {
        let Ok(name) = Name::from_str_radix(payload, 16) else { return };
        if let Some(notify) = self.0.lock().get(&name) {
            notify.notify_waiters();
        }
    }

    fn tell_all(&self) {
        self.0.lock().values().for_each(|notify| notify.notify_waiters());
    }
}

pub(super) struct Waiting<'a> {
    waits: &'a Waits,
    name: Name,
    pub(super) notify: Arc<Notify>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut waits = self.waits.0.lock();
        // The map's and this one: nobody else waits for it, and nobody begins to under the lock.
        if Arc::strong_count(&self.notify) == 2 {
            waits.remove(&self.name);
        }
    }
}

async fn listen(options: &PgConnectOptions, channel: &str) -> Result<PgListener, Error> {
    // One connection, which is not given up for its age.
    let pool = PgPoolOptions::new().max_connections(1).max_lifetime(None).idle_timeout(None);
    let mut listener = PgListener::connect_with(&pool.connect_lazy_with(options.clone())).await?;
    listener.ignore_pool_close_event(true);
    listener.eager_reconnect(false);
    listener.listen(channel).await?;
    Ok(listener)
}

async fn hear(
    options: PgConnectOptions,
    channel: String,
    mut listener: PgListener,
    waits: Arc<Waits>,
) {
    loop {
        match listener.try_recv().await {
            Ok(Some(notification)) => waits.tell(notification.payload()),
            Ok(None) | Err(_) => {
                drop(listener);
                listener = loop {
                    match listen(&options, &channel).await {
                        Ok(listener) => break listener,
                        Err(_) => sleep(PAUSE).await,
                    }
                };
                // What was said meanwhile is gone: all are to look.
                waits.tell_all();
            }
        }
    }
}
