//! Outcomes as they lie in the store: encrypted, redacted, or as the handler made them.
//!
//! Ground rule: a sealed outcome carries a mark, its first line, whose name no header can have. So
//! an outcome that was not sealed (an operator's, or one from before sealing was set) is handed
//! back as it is, and a sealed one is never handed back unopened.

use std::{fmt, sync::Arc};

use super::attempt::Caller;
use crate::{Identity, Outcome};

/// The name of the line that marks a sealed outcome. The colon keeps it out of the header lines.
const MARK: &[u8] = b"::";

/// What is done to an outcome before it is kept and before it is handed back: encryption, or
/// leaving out what must not lie in memory for a day.
///
/// The first client gets the response as the handler made it. Everything that goes to the store,
/// also what is left to waiters only, is sealed; replays, waiters' answers included, are opened.
///
/// Both functions run in the way of a request: they must not block. Bind what you encrypt to the
/// identity, as associated data, so that a stored outcome is good for no other key.
///
/// ```
/// use oncekey::{Identity, Outcome, http::Sealing};
///
/// /// Card numbers are for the first client only.
/// struct Redacted;
///
/// impl Sealing for Redacted {
///     fn seal(&self, _: Identity<'_>, outcome: Outcome) -> Option<Outcome> {
///         let text = std::str::from_utf8(outcome.bytes()).ok()?;
///         let text = text.replace("4111111111111111", "************1111");
///         Some(outcome.body(text))
///     }
/// }
/// # let id = Identity::new("a", "POST /x", "k").unwrap();
/// # let sealed = Redacted.seal(id, Outcome::new(200).body("4111111111111111")).unwrap();
/// # assert_eq!(&Redacted.open(id, sealed).unwrap().bytes()[..], b"************1111");
/// ```
pub trait Sealing: Send + Sync + 'static {
    /// Makes what is kept of `outcome`. `None`: nothing is kept, and retries are told that the
    /// response was not kept (R20).
    fn seal(&self, of: Identity<'_>, outcome: Outcome) -> Option<Outcome>;

    /// Makes what is handed back of what [`seal`](Self::seal) has made. `None`, as for bytes that
    /// cannot be decrypted any more: the client is told that the response was not kept. By default
    /// what was kept.
    fn open(&self, of: Identity<'_>, sealed: Outcome) -> Option<Outcome> {
        let _ = of;
        Some(sealed)
    }
}

impl<S: Sealing + ?Sized> Sealing for Arc<S> {
    fn seal(&self, of: Identity<'_>, outcome: Outcome) -> Option<Outcome> {
        S::seal(self, of, outcome)
    }

    fn open(&self, of: Identity<'_>, sealed: Outcome) -> Option<Outcome> {
        S::open(self, of, sealed)
    }
}

/// The setting: a hook, or none.
#[derive(Clone, Default)]
pub(crate) struct Seal(Option<Arc<dyn Sealing>>);

impl Seal {
    pub(crate) fn by(sealing: impl Sealing) -> Self {
        Self(Some(Arc::new(sealing)))
    }

    /// What is kept of `outcome`.
    pub(crate) fn seal(&self, caller: &Caller, outcome: Outcome) -> Option<Outcome> {
        let Some(sealing) = &self.0 else { return Some(outcome) };
        // The parts were measured when the request was let in.
        let sealed = sealing.seal(caller.identity().ok()?, outcome)?;
        let marked = Outcome::new(sealed.status()).header(MARK, b"");
        Some(with_lines(marked, &sealed))
    }

    /// What is handed back of `kept`.
    pub(crate) fn open(&self, caller: &Caller, kept: &Outcome) -> Option<Outcome> {
        if kept.header_lines().next().is_none_or(|(name, _)| name != MARK) {
            return Some(kept.clone());
        }
        let sealed = with_lines(Outcome::new(kept.status()), kept);
        self.0.as_ref()?.open(caller.identity().ok()?, sealed)
    }
}

/// `to` with the lines of `from`, but for the mark, and its body.
fn with_lines(to: Outcome, from: &Outcome) -> Outcome {
    let lines = from.header_lines().filter(|(name, _)| *name != MARK);
    lines.fold(to, |to, (name, value)| to.header(name, value)).body(from.bytes().clone())
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Sealing" } else { "None" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Key;

    /// Turns bytes over, and knows whose they are.
    struct Turned;

    fn turned(of: Identity<'_>, outcome: &Outcome) -> Outcome {
        let by = of.key()[0];
        let turn = |bytes: &[u8]| bytes.iter().map(|byte| byte ^ by).collect::<Vec<_>>();
        let lines = outcome.header_lines().map(|(name, value)| (turn(name), turn(value)));
        lines
            .fold(Outcome::new(outcome.status()), |made, (name, value)| made.header(name, value))
            .body(turn(outcome.bytes()))
    }

    impl Sealing for Turned {
        fn seal(&self, of: Identity<'_>, outcome: Outcome) -> Option<Outcome> {
            (outcome.status() != 299).then(|| turned(of, &outcome))
        }

        fn open(&self, of: Identity<'_>, sealed: Outcome) -> Option<Outcome> {
            Some(turned(of, &sealed))
        }
    }

    fn caller() -> Caller {
        let key = Key::new("k").unwrap();
        Caller { account: b"a".to_vec(), endpoint: "POST /x".to_owned(), key }
    }

    #[test]
    fn what_was_sealed_is_opened_and_what_was_not_is_left() {
        let (seal, caller) = (Seal::by(Arc::new(Turned)), caller());
        let outcome = Outcome::new(201).header("a", "1").header("a", "2").body("secret");
        let kept = seal.seal(&caller, outcome.clone()).unwrap();
        assert_ne!(kept.bytes(), outcome.bytes());
        assert_eq!(seal.open(&caller, &kept), Some(outcome.clone()));
        assert_eq!(seal.open(&caller, &outcome), Some(outcome.clone()));
        let bare = Outcome::new(204);
        let kept = seal.seal(&caller, bare.clone()).unwrap();
        assert_eq!(seal.open(&caller, &kept), Some(bare));
        assert_eq!(seal.seal(&caller, Outcome::new(299)), None);
    }

    #[test]
    fn what_was_sealed_is_not_handed_back_unopened() {
        let sealed = Seal::by(Turned).seal(&caller(), Outcome::new(200)).unwrap();
        assert_eq!(Seal::default().open(&caller(), &sealed), None);
    }
}
