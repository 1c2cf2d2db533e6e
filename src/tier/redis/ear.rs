//! Hears what is settled: one connection of the process that subscribes to the records that somebody
//! waits for.
//!
//! Ground rules:
//!
//! 1. Nobody depends on it: who waits looks from time to time all the same. While it has no
//!    connection, waiting goes on and the ear tries again.
//! 2. A seat is taken before the record is looked at, and the look comes after the server has
//!    confirmed the subscription, so nothing is missed in between (R14). What may have been said
//!    while the connection was down wakes all who sat there before.
//! 3. A seat that is dropped only removes itself (R15); the last of a channel ends its subscription.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ::redis::{
    AsyncConnectionConfig, Client, PushInfo, PushKind, Value, aio::MultiplexedConnection,
};
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time::sleep,
};

/// Pauses between two attempts to connect: from, to.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

pub(super) struct Ear {
    channels: Arc<Channels>,
    /// The servers that can be listened to: any node of a cluster hears what is said at all others.
    clients: Vec<Client>,
    config: AsyncConnectionConfig,
    listener: Mutex<Option<Listener>>,
    /// Connections lost or refused so far.
    failed: Arc<AtomicU64>,
}

struct Listener {
    events: mpsc::UnboundedSender<Event>,
    task: JoinHandle<()>,
}

enum Event {
    /// Somebody came or went.
    Changed,
    /// The connection with this number was told something.
    Told(u64, PushInfo),
}

#[derive(Default)]
struct Channels {
    by_name: Mutex<HashMap<Vec<u8>, Channel>>,
    /// Names that are to be subscribed to, or are not needed any more.
    changed: Mutex<Vec<Vec<u8>>>,
}

struct Channel {
    seats: usize,
    /// Whether it has been subscribed to over an earlier connection.
    was_heard: bool,
    heard: watch::Sender<Heard>,
}

#[derive(Clone, Copy, Default)]
struct Heard {
    is_subscribed: bool,
    rings: u64,
}

/// Somebody who waits for a record.
pub(super) struct Seat {
    channels: Arc<Channels>,
    events: mpsc::UnboundedSender<Event>,
    name: Vec<u8>,
    heard: watch::Receiver<Heard>,
    /// Rings before the seat was taken.
    rings: u64,
}

impl Ear {
    pub(super) fn new(clients: Vec<Client>, within: Duration) -> Self {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(within))
            .set_response_timeout(Some(within));
        Self {
            channels: Arc::default(),
            clients,
            config,
            listener: Mutex::default(),
            failed: Arc::default(),
        }
    }

    /// Takes a seat at the channel of this name. Within a runtime only.
    pub(super) fn sit(&self, name: Vec<u8>) -> Seat {
        let heard = {
            let mut by_name = self.channels.by_name.lock();
            let channel = by_name.entry(name.clone()).or_insert_with(|| {
                self.channels.changed.lock().push(name.clone());
                Channel { seats: 0, was_heard: false, heard: watch::Sender::default() }
            });
            channel.seats += 1;
            channel.heard.subscribe()
        };
        let events = self.listen();
        let _ = events.send(Event::Changed);
        let rings = heard.borrow().rings;
        Seat { channels: Arc::clone(&self.channels), events, name, heard, rings }
    }

    /// How often a connection was lost or refused.
    pub(super) fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// The listener's queue; one that has ended with its runtime is replaced.
    fn listen(&self) -> mpsc::UnboundedSender<Event> {
        let mut listener = self.listener.lock();
        if let Some(listener) = &*listener
            && !listener.task.is_finished()
        {
            return listener.events.clone();
        }
        let (events, told) = mpsc::unbounded_channel();
        let listening = Listening {
            channels: Arc::clone(&self.channels),
            clients: self.clients.clone(),
            config: self.config.clone(),
            failed: Arc::clone(&self.failed),
            // Not strong: the queue ends with the ear and its seats.
            events: events.downgrade(),
        };
        let task = tokio::spawn(listening.run(told));
        *listener = Some(Listener { events: events.clone(), task });
        events
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        if let Some(listener) = self.listener.get_mut() {
            listener.task.abort();
        }
    }
}

impl Seat {
    /// Ends when the server has confirmed that we listen; it may end later, or never.
    pub(super) async fn listens(&mut self) {
        let rings = self.rings;
        self.wait(|heard| heard.is_subscribed || heard.rings != rings).await;
    }

    /// Ends when something was said since the seat was taken.
    pub(super) async fn rings(&mut self) {
        let rings = self.rings;
        self.wait(|heard| heard.rings != rings).await;
    }

    async fn wait(&mut self, until: impl FnMut(&Heard) -> bool) {
        if self.heard.wait_for(until).await.is_err() {
            // The channel lives as long as its seats; if not, nothing will be said any more.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut by_name = self.channels.by_name.lock();
        let Some(channel) = by_name.get_mut(&self.name) else { return };
        channel.seats -= 1;
        if channel.seats == 0 {
            by_name.remove(&self.name);
            self.channels.changed.lock().push(std::mem::take(&mut self.name));
            let _ = self.events.send(Event::Changed);
        }
    }
}

/// What the listener works with.
struct Listening {
    channels: Arc<Channels>,
    clients: Vec<Client>,
    config: AsyncConnectionConfig,
    failed: Arc<AtomicU64>,
    events: mpsc::WeakUnboundedSender<Event>,
}

impl Listening {
    async fn run(self, mut told: mpsc::UnboundedReceiver<Event>) {
        let mut pause = PAUSES.0;
        for nth in 0.. {
            self.channels.deafen();
            if self.hear(nth, &mut told, &mut pause).await.is_none() {
                return;
            }
            self.failed.fetch_add(1, Ordering::Relaxed);
            sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Listens over one connection, until that ends; `None` if nobody is left to listen for.
    async fn hear(
        &self,
        nth: u64,
        told: &mut mpsc::UnboundedReceiver<Event>,
        pause: &mut Duration,
    ) -> Option<()> {
        let events = self.events.clone();
        let config = self.config.clone().set_push_sender(move |push: PushInfo| {
            let events = events.upgrade().ok_or(::redis::aio::SendError)?;
            events.send(Event::Told(nth, push)).map_err(|_| ::redis::aio::SendError)
        });
        let client = &self.clients[nth as usize % self.clients.len()];
        let Ok(mut connection) = client.get_multiplexed_async_connection_with_config(&config).await
        else {
            return Some(());
        };
        while self.channels.attend(&mut connection).await {
            *pause = PAUSES.0;
            match told.recv().await? {
                Event::Told(by, push) if by == nth => match push.kind {
                    PushKind::Disconnection => break,
                    PushKind::Message => self.channels.ring(&push),
                    _ => {}
                },
                Event::Told(..) | Event::Changed => {}
            }
        }
        Some(())
    }
}

impl Channels {
    /// There is no connection: all that somebody sits at has to be subscribed to anew.
    fn deafen(&self) {
        let mut by_name = self.by_name.lock();
        for channel in by_name.values_mut() {
            channel.heard.send_modify(|heard| {
                channel.was_heard |= heard.is_subscribed;
                heard.is_subscribed = false;
            });
        }
        *self.changed.lock() = by_name.keys().cloned().collect();
    }

    /// Subscribes to what came, and unsubscribes from what went. Whether the connection still works.
    async fn attend(&self, connection: &mut MultiplexedConnection) -> bool {
        let (came, went): (Vec<_>, Vec<_>) = {
            let by_name = self.by_name.lock();
            let changed = std::mem::take(&mut *self.changed.lock());
            changed.into_iter().partition(|name| by_name.contains_key(name))
        };
        if !went.is_empty() && connection.unsubscribe(&went).await.is_err() {
            return false;
        }
        if came.is_empty() {
            return true;
        }
        if connection.subscribe(&came).await.is_err() {
            return false;
        }
        let mut by_name = self.by_name.lock();
        for name in &came {
            if let Some(channel) = by_name.get_mut(name) {
                let missed = u64::from(std::mem::take(&mut channel.was_heard));
                channel.heard.send_modify(|heard| {
                    heard.is_subscribed = true;
                    heard.rings += missed;
                });
            }
        }
        true
    }

    fn ring(&self, push: &PushInfo) {
        let Some(Value::BulkString(name)) = push.data.first() else { return };
        if let Some(channel) = self.by_name.lock().get(name) {
            channel.heard.send_modify(|heard| heard.rings += 1);
        }
    }
}
