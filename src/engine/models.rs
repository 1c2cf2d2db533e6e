//! The races of the engine, each walked through in all its interleavings.
//!
//! Run by `RUSTFLAGS="--cfg oncekey_loom" cargo test --release --lib loom_`, one process for each
//! test. Sizes are tiny there: a bucket of two slots, a table of one bucket, blocks of four cells,
//! slabs of two records. Time stands still within a model; what happens at a time is told.

use std::sync::atomic::{AtomicU64 as Dial, Ordering::Relaxed};

use loom::thread;

use super::*;

/// Preemptions in one execution, where a model does not ask for another number.
const BOUND: usize = 2;

/// A clock that a model sets before its threads start.
struct Hand(Arc<Dial>);

impl Clock for Hand {
    fn now(&self) -> Duration {
        Duration::from_millis(self.0.load(Relaxed))
    }
}

const LEASE: u64 = 10;
const RETENTION: u64 = 100;

/// A store, and the dial of its clock.
#[derive(Clone)]
struct World {
    engine: Arc<Engine>,
    dial: Arc<Dial>,
}

impl World {
    fn new(on_lapse: Lapse) -> Self {
        let settings = Settings {
            retention: Millis(RETENTION),
            lease: Millis(LEASE),
            max_run: Millis(LEASE),
            tick: Millis(1),
            reserve: 0,
            on_abandon: Abandon::Hold,
            on_lapse,
        };
        let dial = Arc::new(Dial::new(0));
        let room = Room::new(1, 1_000, 1 << 20, None);
        let waiters = Waiters::new(8, 8);
        let clock = Box::new(Hand(Arc::clone(&dial)));
        Self { engine: Arc::new(Engine::new(settings, clock, 1_000, room, waiters)), dial }
    }

    fn at(&self, now: u64) {
        self.dial.store(now, Relaxed);
    }

    fn met(&self, key: &str, seated: bool) -> Met {
        let frame = frame(key);
        let own = fingerprint();
        let mut translate = |_| None;
        let mut asked = Asked::new(own, &mut translate);
        let engine = &self.engine;
        let hash = engine.hash(&frame);
        match engine.claim(engine.lane(0), hash, &frame, &mut asked, seated) {
            Ok(met) => met,
            Err(error) => panic!("{error}"),
        }
    }

    fn claim(&self, key: &str) -> Met {
        self.met(key, false)
    }

    fn win(&self, key: &str) -> Owned {
        match self.claim(key) {
            Met::Won(owned, _) => owned,
            _ => panic!("{key} is not new"),
        }
    }

    fn observe(&self, key: &str) -> Option<Met> {
        let frame = frame(key);
        let mut translate = |_| None;
        let mut asked = Asked::new(fingerprint(), &mut translate);
        let engine = &self.engine;
        engine.observe(engine.lane(0), engine.hash(&frame), &frame, &mut asked)
    }

    fn complete(&self, owned: &Owned, body: &'static str) -> bool {
        let engine = &self.engine;
        let guard = reclaim::pin();
        let answer = Some(Outcome::new(200).body(body));
        engine.complete(engine.lane(0), owned.cell(), By::Owner, answer, &guard).is_ok()
    }

    fn release(&self, owned: &Owned) -> bool {
        self.engine.release(self.engine.lane(0), owned, None).is_ok()
    }

    /// Completed, so that it stands in the index as a record.
    fn fill(&self, key: &str) {
        let owned = self.win(key);
        assert!(self.complete(&owned, "filled"));
    }

    /// What is true at the end of every model.
    fn settle(self) {
        let in_flight = self.engine.in_flight();
        assert!(in_flight <= 3, "{in_flight} in flight");
        drop(self);
        reclaim::free_all();
    }
}

fn frame(key: &str) -> Frame {
    match Identity::new("a", "e", key) {
        Ok(identity) => identity.frame(),
        Err(error) => panic!("{error}"),
    }
}

fn fingerprint() -> Fingerprint {
    Fingerprint::from_parts(Scheme::REQUEST_1, [7; 32])
}

fn body(outcome: &Outcome) -> &[u8] {
    outcome.bytes()
}

fn model(bound: usize, run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(bound);
    builder.max_branches = 100_000;
    let executions = Arc::new(Dial::new(0));
    let counted = Arc::clone(&executions);
    builder.check(move || {
        counted.fetch_add(1, Relaxed);
        run();
    });
    // A model that was cut off shows by its number.
    println!("{} executions at {bound} preemptions", executions.load(Relaxed));
}

fn won(met: &Met) -> usize {
    usize::from(matches!(met, Met::Won(..)))
}

/// Runs `first` on this thread and the others beside it, and answers with what they met.
fn race<const N: usize>(
    world: &World,
    others: [fn(&World) -> Met; N],
    first: fn(&World) -> Met,
) -> Vec<Met> {
    let others = others.map(|run| {
        let world = world.clone();
        thread::spawn(move || run(&world))
    });
    let mut met = vec![first(world)];
    met.extend(others.into_iter().map(|it| match it.join() {
        Ok(met) => met,
        Err(_) => panic!("a thread of the model has panicked"),
    }));
    met
}

#[test]
fn loom_two_claims_of_one_fresh_identity() {
    model(3, || {
        let world = World::new(Lapse::TakeOver);
        let met = race(&world, [|it| it.claim("a")], |it| it.claim("a"));
        assert_eq!(met.iter().map(won).sum::<usize>(), 1);
        world.settle();
    });
}

#[test]
fn loom_claim_against_growth() {
    model(BOUND, || {
        let world = World::new(Lapse::TakeOver);
        world.fill("a");
        world.fill("b");
        // Its bucket is full: a claim of the third grows the table.
        let met = race(&world, [|it| it.claim("c")], |it| it.claim("c"));
        assert_eq!(met.iter().map(won).sum::<usize>(), 1);
        for key in ["a", "b"] {
            assert!(matches!(world.observe(key), Some(Met::Replay(_))), "{key} is lost");
        }
        world.settle();
    });
}

#[test]
fn loom_three_claims_against_growth() {
    model(1, || {
        let world = World::new(Lapse::TakeOver);
        world.fill("a");
        world.fill("b");
        let met = race(&world, [|it| it.claim("c"), |it| it.claim("c")], |it| it.claim("d"));
        assert_eq!(met.iter().map(won).sum::<usize>(), 2);
        for key in ["a", "b"] {
            assert!(matches!(world.observe(key), Some(Met::Replay(_))), "{key} is lost");
        }
        world.settle();
    });
}

#[test]
fn loom_two_helpers_of_one_bucket_and_a_claim() {
    model(BOUND, || {
        let world = World::new(Lapse::TakeOver);
        world.fill("a");
        world.fill("b");
        world.fill("c");
        // The table grows: whoever claims moves the bucket first.
        let met = race(&world, [|it| it.claim("d"), |it| it.claim("d")], |it| it.claim("d"));
        assert_eq!(met.iter().map(won).sum::<usize>(), 1);
        for key in ["a", "b", "c"] {
            assert!(matches!(world.observe(key), Some(Met::Replay(_))), "{key} is lost");
        }
        world.settle();
    });
}

#[test]
fn loom_claim_against_rebuild_with_tombstones() {
    model(BOUND, || {
        let world = World::new(Lapse::TakeOver);
        let first = world.win("a");
        let second = world.win("b");
        assert!(world.release(&first) && world.release(&second));
        // Both slots are tombstones: a claim makes an overflow bucket, and a new table.
        let met = race(&world, [|it| it.claim("a")], |it| it.claim("a"));
        assert_eq!(met.iter().map(won).sum::<usize>(), 1);
        assert_eq!(won(&world.claim("b")), 1);
        world.settle();
    });
}

#[test]
fn loom_claim_against_expiry_of_the_same_identity() {
    model(BOUND, || {
        let world = World::new(Lapse::TakeOver);
        world.fill("a");
        world.at(RETENTION + 1);
        let sweep = |it: &World| {
            it.engine.sweep_step();
            it.claim("a")
        };
        let met = race(&world, [sweep], |it| it.claim("a"));
        assert_eq!(met.iter().map(won).sum::<usize>(), 1);
        world.settle();
    });
}

#[test]
fn loom_claim_of_an_old_place_against_slab_death() {
    // One claim has seen the record before its slab is gone and replaces it, the other comes after.
    model(3, || {
        let world = World::new(Lapse::TakeOver);
        world.fill("a");
        world.at(RETENTION + 1);
        let swept = {
            let world = world.clone();
            thread::spawn(move || world.engine.sweep_step().reaped)
        };
        let met = race(&world, [|it| it.claim("a")], |it| it.claim("a"));
        let Ok(reaped) = swept.join() else { panic!("the sweep has panicked") };
        assert!(reaped <= 1);
        assert_eq!(met.iter().map(won).sum::<usize>(), 1);
        assert_eq!(world.engine.room.used().0, 1);
        world.settle();
    });
}

#[test]
fn loom_complete_against_wait_registration() {
    model(3, || {
        let world = World::new(Lapse::TakeOver);
        let owned = world.win("a");
        let waiter = {
            let world = world.clone();
            thread::spawn(move || world.met("a", true))
        };
        assert!(world.complete(&owned, "done"));
        match waiter.join() {
            Ok(Met::Replay(answer)) => assert_eq!(body(&answer.outcome), b"done"),
            Ok(Met::Seated(ticket)) => {
                let gift = world.engine.waiters.leave(&ticket);
                assert!(matches!(gift, Some(Gift::Completed { .. })), "nobody woke the waiter");
            }
            _ => panic!("neither"),
        }
        world.settle();
    });
}

#[test]
fn loom_complete_against_a_waiter_that_gives_up() {
    model(3, || {
        let world = World::new(Lapse::TakeOver);
        let owned = world.win("a");
        let Met::Seated(ticket) = world.met("a", true) else { panic!("no seat") };
        let waiter = {
            let world = world.clone();
            thread::spawn(move || world.engine.waiters.leave(&ticket))
        };
        assert!(world.complete(&owned, "done"));
        let Ok(gift) = waiter.join() else { panic!("the waiter has panicked") };
        assert!(matches!(gift, None | Some(Gift::Completed { .. })));
        assert_eq!(world.engine.waiters.total(), 0);
        world.settle();
    });
}

#[test]
fn loom_release_against_two_waiters() {
    model(BOUND, || {
        let world = World::new(Lapse::TakeOver);
        let owned = world.win("a");
        let waiters = [(), ()].map(|()| {
            let world = world.clone();
            thread::spawn(move || world.met("a", true))
        });
        assert!(world.release(&owned));
        let mut owners = 0;
        for waiter in waiters {
            match waiter.join() {
                Ok(Met::Won(..)) => owners += 1,
                Ok(Met::Seated(ticket)) => match world.engine.waiters.leave(&ticket) {
                    Some(Gift::Permit(..)) => owners += 1,
                    Some(Gift::LookAgain) | None => {}
                    Some(_) => panic!("a gift of another kind"),
                },
                _ => panic!("neither owner nor waiter"),
            }
        }
        assert_eq!(owners, 1);
        world.settle();
    });
}

#[test]
fn loom_release_against_an_heir_that_gives_up() {
    model(3, || {
        let world = World::new(Lapse::TakeOver);
        let owned = world.win("a");
        let Met::Seated(first) = world.met("a", true) else { panic!("no seat") };
        let Met::Seated(second) = world.met("a", true) else { panic!("no seat") };
        let leaver = {
            let world = world.clone();
            thread::spawn(move || {
                if let Some(Gift::Permit(owned, _)) = world.engine.waiters.leave(&first) {
                    assert!(world.release(&owned));
                }
            })
        };
        assert!(world.release(&owned));
        assert!(leaver.join().is_ok());
        let gift = world.engine.waiters.leave(&second);
        assert!(matches!(gift, Some(Gift::Permit(..))), "the permit is lost");
        world.settle();
    });
}

#[test]
fn loom_complete_against_takeover() {
    for owner_first in [true, false] {
        model(3, move || {
            let world = World::new(Lapse::TakeOver);
            let owned = world.win("a");
            world.at(LEASE);
            let complete = move |world: &World| usize::from(world.complete(&owned, "late"));
            let claim = |world: &World| won(&world.claim("a"));
            let other = world.clone();
            let sum = if owner_first {
                let thread = thread::spawn(move || claim(&other));
                complete(&world) + thread.join().unwrap_or(9)
            } else {
                let thread = thread::spawn(move || complete(&other));
                claim(&world) + thread.join().unwrap_or(9)
            };
            assert_eq!(sum, 1, "both or neither");
            world.settle();
        });
    }
}

#[test]
fn loom_two_takeovers_and_a_completion() {
    model(BOUND, || {
        let world = World::new(Lapse::TakeOver);
        let owned = world.win("a");
        world.at(LEASE);
        let owner = {
            let world = world.clone();
            thread::spawn(move || usize::from(world.complete(&owned, "late")))
        };
        let met = race(&world, [|it| it.claim("a")], |it| it.claim("a"));
        let sum = met.iter().map(won).sum::<usize>() + owner.join().unwrap_or(9);
        assert_eq!(sum, 1);
        world.settle();
    });
}

#[test]
fn loom_renew_against_takeover() {
    model(3, || {
        let world = World::new(Lapse::TakeOver);
        let owned = world.win("a");
        world.at(LEASE);
        let claim = {
            let world = world.clone();
            thread::spawn(move || won(&world.claim("a")))
        };
        let renewed = world.engine.renew(world.engine.lane(0), &owned).is_ok();
        assert_eq!(usize::from(renewed) + claim.join().unwrap_or(9), 1);
        world.settle();
    });
}

#[test]
fn loom_drop_of_a_permit_against_the_end_of_the_claim() {
    for on_lapse in [Lapse::TakeOver, Lapse::Hold] {
        model(3, move || {
            let world = World::new(on_lapse);
            let owned = world.win("a");
            world.at(LEASE + RETENTION);
            let sweep = {
                let world = world.clone();
                thread::spawn(move || {
                    world.engine.sweep_step();
                    world.engine.sweep_step();
                })
            };
            // Lost or not: afterwards nothing is in flight and the cell is retired once.
            let _ = world.engine.hold(world.engine.lane(0), &owned);
            assert!(sweep.join().is_ok());
            assert_eq!(world.engine.in_flight(), 0);
            world.at(2 * (LEASE + RETENTION) + 1);
            world.engine.sweep_step();
            world.engine.sweep_step();
            assert_eq!(world.engine.room.used().0, 0);
            world.settle();
        });
    }
}

#[test]
fn loom_observe_against_complete() {
    for observer_first in [true, false] {
        model(3, move || {
            let world = World::new(Lapse::TakeOver);
            let owned = world.win("a");
            let other = world.clone();
            let observe = |world: &World| match world.observe("a") {
                Some(Met::InFlight(_)) => {}
                Some(Met::Replay(answer)) => assert_eq!(body(&answer.outcome), b"whole"),
                _ => panic!("neither in flight nor whole"),
            };
            let complete = move |world: &World| assert!(world.complete(&owned, "whole"));
            if observer_first {
                let thread = thread::spawn(move || complete(&other));
                observe(&world);
                assert!(thread.join().is_ok());
            } else {
                let thread = thread::spawn(move || observe(&other));
                complete(&world);
                // Never older than one's own completion.
                assert!(matches!(world.observe("a"), Some(Met::Replay(_))));
                assert!(thread.join().is_ok());
            }
            world.settle();
        });
    }
}

#[test]
fn loom_observe_against_complete_while_the_bucket_moves() {
    model(BOUND, || {
        let world = World::new(Lapse::TakeOver);
        let owned = world.win("a");
        world.fill("b");
        world.fill("c");
        let helper = {
            let world = world.clone();
            thread::spawn(move || won(&world.claim("d")))
        };
        assert!(world.complete(&owned, "whole"));
        match world.observe("a") {
            Some(Met::Replay(answer)) => assert_eq!(body(&answer.outcome), b"whole"),
            _ => panic!("older than the own completion"),
        }
        assert_eq!(helper.join().unwrap_or(9), 1);
        assert!(matches!(world.claim("a"), Met::Replay(_)));
        world.settle();
    });
}

#[test]
fn loom_release_against_two_claims() {
    model(BOUND, || {
        let world = World::new(Lapse::TakeOver);
        let owned = world.win("a");
        let owner = {
            let world = world.clone();
            thread::spawn(move || world.release(&owned))
        };
        let met = race(&world, [|it| it.claim("a")], |it| it.claim("a"));
        assert!(matches!(owner.join(), Ok(true)));
        assert!(met.iter().map(won).sum::<usize>() <= 1);
        assert_eq!(world.engine.in_flight(), met.iter().map(won).sum::<usize>());
        world.settle();
    });
}

#[test]
fn loom_forget_against_claim() {
    model(3, || {
        let world = World::new(Lapse::TakeOver);
        world.fill("a");
        let forget = {
            let world = world.clone();
            thread::spawn(move || world.engine.forget(&frame("a"), false))
        };
        let met = world.claim("a");
        // Forgotten before, or met as it was; or the new claim is what was met, and busy.
        match forget.join() {
            Ok(Ok(true)) => {}
            _ => panic!("nothing was forgotten"),
        }
        assert!(matches!(met, Met::Won(..) | Met::Replay(_)));
        assert_eq!(world.engine.room.used().0, won(&met));
        world.settle();
    });
}

#[test]
fn loom_forced_forget_against_complete_and_claim() {
    model(BOUND, || {
        let world = World::new(Lapse::TakeOver);
        let owned = world.win("a");
        let forget = {
            let world = world.clone();
            thread::spawn(move || world.engine.forget(&frame("a"), true))
        };
        let claim = {
            let world = world.clone();
            thread::spawn(move || won(&world.claim("a")))
        };
        let completed = world.complete(&owned, "done");
        let (Ok(Ok(forgotten)), Ok(won)) = (forget.join(), claim.join()) else {
            panic!("a thread has panicked");
        };
        assert!(completed || forgotten);
        let keys = world.engine.room.used().0;
        assert!(keys <= 1 && keys >= usize::from(won == 1 && !forgotten), "{keys} keys");
        world.settle();
    });
}

#[test]
fn loom_sweep_against_late_completion() {
    model(3, || {
        let world = World::new(Lapse::Hold);
        let owned = world.win("a");
        world.at(LEASE);
        let sweep = {
            let world = world.clone();
            thread::spawn(move || world.engine.sweep_step().reaped)
        };
        assert!(world.complete(&owned, "late"), "a lapse alone makes no token stale");
        assert!(matches!(sweep.join(), Ok(0)));
        assert!(matches!(world.observe("a"), Some(Met::Replay(_))));
        assert_eq!((world.engine.in_flight(), world.engine.room.used().0), (0, 1));
        world.settle();
    });
}

#[test]
fn loom_slab_death_against_completion() {
    // A slab of two records whose last one dies while another completion is let in.
    model(BOUND, || {
        let world = World::new(Lapse::TakeOver);
        world.fill("a");
        world.at(RETENTION + 1);
        let owned = world.win("b");
        let sweep = {
            let world = world.clone();
            thread::spawn(move || world.engine.sweep_step().reaped)
        };
        assert!(world.complete(&owned, "young"));
        assert!(matches!(sweep.join(), Ok(1)));
        match world.observe("b") {
            Some(Met::Replay(answer)) => assert_eq!(body(&answer.outcome), b"young"),
            _ => panic!("the record is lost"),
        }
        assert_eq!(world.engine.room.used().0, 1);
        world.settle();
    });
}

#[test]
fn loom_drain_against_claims() {
    model(3, || {
        let world = World::new(Lapse::TakeOver);
        let claim = {
            let world = world.clone();
            thread::spawn(move || {
                let frame = frame("a");
                let mut translate = |_| None;
                let mut asked = Asked::new(fingerprint(), &mut translate);
                let engine = &world.engine;
                let hash = engine.hash(&frame);
                engine.claim(engine.lane(0), hash, &frame, &mut asked, false).is_ok()
            })
        };
        world.engine.drain();
        let drained = world.engine.in_flight() == 0;
        let won = matches!(claim.join(), Ok(true));
        assert_eq!(world.engine.in_flight(), usize::from(won));
        let _ = drained;
        world.settle();
    });
}
