//! The face of the first core.

use std::{
    sync::{Arc, Weak},
    thread,
    time::Duration,
};

use oncekey::{Clock, Fingerprint, Identity};

use super::{
    claim::{self, Claim},
    clock::Millis,
    engine::{Engine, Limits},
    expire::{self, Sweeper},
};

/// What can be set.
pub(crate) struct Settings<C> {
    pub(crate) retention: Duration,
    pub(crate) lease: Duration,
    pub(crate) tick: Duration,
    pub(crate) max_keys: usize,
    pub(crate) max_bytes: usize,
    pub(crate) clock: C,
    /// Whether a thread of the store's own reaps; else somebody calls [`Store::sweep`].
    pub(crate) thread: bool,
}

/// The store. It ends when it is dropped.
pub(crate) struct Store {
    engine: Arc<Engine>,
}

impl Store {
    pub(crate) fn new(settings: Settings<impl Clock>) -> Self {
        let limits = Limits {
            retention: Millis::of(settings.retention),
            lease: Millis::of(settings.lease),
            tick: Millis::of(settings.tick),
            // The default of the builder it had.
            reserve: 4 << 10,
            max_keys: settings.max_keys,
            max_bytes: settings.max_bytes,
        };
        let engine = Arc::new(Engine::new(limits, Box::new(settings.clock)));
        if settings.thread {
            let alarm = Arc::clone(engine.alarm());
            expire::spawn(alarm, Background(Arc::downgrade(&engine))).expect("a thread");
        }
        Self { engine }
    }

    /// Makes the caller the owner of `id`, or tells what is there.
    pub(crate) fn claim(&self, id: &Identity<'_>, fingerprint: Fingerprint) -> Claim {
        let frame = frame(id);
        claim::answer(&self.engine, self.engine.claim(frame.bytes(), fingerprint), fingerprint)
    }

    /// Reaps what has ended by now, and says how many records it took out.
    pub(crate) fn sweep(&self) -> usize {
        let now = self.engine.now();
        let mut reaped = 0;
        loop {
            let step = self.engine.sweep_step(now);
            reaped += step.reaped;
            if !step.more {
                self.engine.trim();
                return reaped;
            }
        }
    }

    pub(crate) fn keys(&self) -> usize {
        self.engine.keys()
    }
}

/// What the sweep's thread holds of a store.
struct Background(Weak<Engine>);

impl Sweeper for Background {
    fn sweep(&self, about_to_sleep: impl Fn(Option<Millis>)) -> Option<Option<Duration>> {
        loop {
            // Not held across steps: a store that is dropped ends soon.
            let engine = self.0.upgrade()?;
            let now = engine.now();
            if engine.sweep_step(now).more {
                // Callers that wait for a lock that the step held come first.
                thread::yield_now();
                continue;
            }
            engine.trim();
            let next = engine.next_due();
            about_to_sleep(next);
            // At most a tick, because the clock may be one that is moved by hand.
            let tick = Duration::from_millis(engine.limits.tick.0);
            return Some(next.map(|at| at.since(engine.now()).min(tick)));
        }
    }
}

const MAX_FRAME: usize = 3 + 255 + 512 + 255;

/// The parts of an identity framed by their lengths, on the stack.
struct Frame {
    len: usize,
    bytes: [u8; MAX_FRAME],
}

impl Frame {
    fn push(&mut self, part: &[u8]) {
        self.bytes[self.len..][..part.len()].copy_from_slice(part);
        self.len += part.len();
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

fn frame(id: &Identity<'_>) -> Frame {
    let mut frame = Frame { len: 0, bytes: [0; MAX_FRAME] };
    // Within their types: an identity has measured its parts.
    frame.push(&[id.account().len() as u8]);
    frame.push(&(id.endpoint().len() as u16).to_be_bytes());
    frame.push(id.account());
    frame.push(id.endpoint());
    frame.push(id.key());
    frame
}
