//! The races of the engine, each walked through in all its interleavings.
//!
//! Run by `RUSTFLAGS="--cfg oncekey_loom" cargo test --release --lib loom_`, one process for each
//! test. Sizes are tiny there: a bucket of two slots, a table of one bucket, blocks of four cells,
//! slabs of two records. Time stands still within a model; what happens at a time is told.

use loom::thread;

use super::*;
use crate::sync::{Ordering::Relaxed, Tally as Dial, explore as model};

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
            lag: Millis(0),
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
        self.met_by(fingerprint(), key, seated)
    }

    /// A claim with another body than all others.
    fn claim_otherwise(&self, key: &str) -> Met {
        self.met_by(Fingerprint::from_parts(Scheme::REQUEST_1, [8; 32]), key, false)
    }

    fn met_by(&self, own: Fingerprint, key: &str, seated: bool) -> Met {
        let frame = frame(key);
        let mut translate = |_| None;
        let mut asked = Asked::new(own, &mut translate);
        let engine = &self.engine;
        let hash = engine.hash(&Identity::from_frame(&frame));
        match engine.claim(engine.lane(0), hash, &frame, &mut asked, seated, &engine.pin()) {
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
        let hash = engine.hash(&Identity::from_frame(&frame));
        engine.observe(engine.lane(0), hash, &frame, &mut asked, &engine.pin())
    }

    fn complete(&self, owned: &Owned, body: &'static str) -> bool {
        let engine = &self.engine;
        let guard = engine.pin();
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

    /// From here on the table grows: who claims moves a bucket first.
    fn grow(&self) {
        let guard = self.engine.pin();
        self.engine.index.begin_growth(0, &self.engine.slabs, &guard);
    }

    /// What is true at the end of every model.
    fn settle(&self) {
        let in_flight = self.engine.in_flight();
        assert!(in_flight <= 4, "{in_flight} in flight");
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

fn won(met: &Met) -> usize {
    usize::from(matches!(met, Met::Won(..)))
}

/// Waits for the end of a model's thread.
fn joined<T>(thread: thread::JoinHandle<T>) -> T {
    match thread.join() {
        Ok(done) => done,
        Err(_) => panic!("a thread of the model has panicked"),
    }
}

/// Runs all beside each other, and answers with what they met. Each has a thread of its own here and
/// below: what the model's first thread does before it waits, loom does not move behind what the
/// others do.
fn race<const N: usize>(world: &World, all: [fn(&World) -> Met; N]) -> Vec<Met> {
    let threads = all.map(|run| {
        let world = world.clone();
        thread::spawn(move || run(&world))
    });
    threads.into_iter().map(joined).collect()
}

/// What a role has done.
enum Did {
    Met(Met),
    Was(bool),
}

impl Did {
    fn won(&self) -> usize {
        usize::from(matches!(self, Self::Met(Met::Won(..))))
    }

    fn was(&self) -> bool {
        matches!(self, Self::Was(true))
    }
}

fn winners(dids: &[Did]) -> usize {
    dids.iter().map(Did::won).sum()
}

type Role = fn(&World, &[Owned]) -> Did;

/// Moves the first bucket of a table that grows.
fn help(world: &World, _: &[Owned]) -> Did {
    let guard = world.engine.pin();
    world.engine.index.move_bucket(0, &world.engine.slabs, &guard);
    Did::Was(true)
}

/// Whether "a" is replayed.
fn replays(world: &World, _: &[Owned]) -> Did {
    Did::Was(matches!(world.observe("a"), Some(Met::Replay(_))))
}

/// Runs roles beside each other, in a model for each rotation of them over the threads. `judge` is
/// told what each did, in the order in which they were given.
fn ring<const N: usize>(
    bound: usize,
    on_lapse: Lapse,
    prepare: fn(&World) -> Vec<Owned>,
    roles: [Role; N],
    judge: fn(&World, &[Did]),
) {
    for turn in 0..N {
        model(bound, move || {
            let world = World::new(on_lapse);
            let owned: Arc<[Owned]> = prepare(&world).into();
            let threads: Vec<_> = (0..N)
                .map(|after| {
                    let (world, owned) = (world.clone(), Arc::clone(&owned));
                    thread::spawn(move || roles[(turn + after) % N](&world, &owned))
                })
                .collect();
            let mut dids: Vec<_> = threads.into_iter().map(joined).collect();
            dids.rotate_right(turn);
            judge(&world, &dids);
            world.settle();
        });
    }
}

/// Runs two roles beside each other, in a model for each order of starting them.
fn roles<A: Send + 'static, B: Send + 'static>(
    bound: usize,
    on_lapse: Lapse,
    prepare: fn(&World) -> Vec<Owned>,
    one: fn(&World, Vec<Owned>) -> A,
    other: fn(&World) -> B,
    judge: fn(&World, A, B),
) {
    for swapped in [false, true] {
        model(bound, move || {
            let world = World::new(on_lapse);
            let owned = prepare(&world);
            let (first, second) = (world.clone(), world.clone());
            let one = move || one(&first, owned);
            let other = move || other(&second);
            let (a, b) = if swapped {
                let b = thread::spawn(other);
                (joined(thread::spawn(one)), joined(b))
            } else {
                let a = thread::spawn(one);
                let b = thread::spawn(other);
                (joined(a), joined(b))
            };
            judge(&world, a, b);
            world.settle();
        });
    }
}

#[test]
fn loom_two_claims_of_one_fresh_identity() {
    model(3, || {
        let world = World::new(Lapse::TakeOver);
        let met = race(&world, [|it| it.claim("a"), |it| it.claim("a")]);
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
        let met = race(&world, [|it| it.claim("c"), |it| it.claim("c")]);
        assert_eq!(met.iter().map(won).sum::<usize>(), 1);
        for key in ["a", "b"] {
            assert!(matches!(world.observe(key), Some(Met::Replay(_))), "{key} is lost");
        }
        world.settle();
    });
}

#[test]
fn loom_a_helper_against_a_takeover() {
    // As below, with more preemptions.
    ring(
        3,
        Lapse::TakeOver,
        lapsed_in_a_moving_bucket,
        [help, |it, _| Did::Met(it.claim("a"))],
        took_over,
    );
}

#[test]
#[cfg(not(oncekey_reclaim))]
fn loom_two_helpers_of_one_bucket_and_a_claim() {
    // What the claim puts into the new bucket stays there, however late a helper copies.
    ring(
        1,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            world.at(RETENTION);
            world.grow();
            Vec::new()
        },
        [help, help, |it, _| Did::Met(it.claim("a"))],
        took_over,
    );
}

fn lapsed_in_a_moving_bucket(world: &World) -> Vec<Owned> {
    let owned = world.win("a");
    world.at(LEASE);
    world.grow();
    vec![owned]
}

fn took_over(world: &World, dids: &[Did]) {
    assert_eq!(winners(dids), 1);
    assert!(matches!(world.claim("a"), Met::InFlight(_)), "the new claim is lost");
    assert_eq!(world.engine.room.used().0, 1);
}

#[test]
fn loom_claims_of_two_identities_while_the_bucket_moves() {
    ring(
        BOUND,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            world.grow();
            Vec::new()
        },
        [|it, _| Did::Met(it.claim("c")), |it, _| Did::Met(it.claim("d"))],
        |world, dids| {
            assert_eq!(winners(dids), 2);
            for key in ["c", "d"] {
                assert!(matches!(world.claim(key), Met::InFlight(_)), "{key} is lost");
            }
            assert!(matches!(world.observe("a"), Some(Met::Replay(_))), "a is lost");
        },
    );
}

#[test]
fn loom_a_claim_that_does_not_help_against_a_helper() {
    // One claim has looked before the table began to grow.
    ring(
        3,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            Vec::new()
        },
        [
            |it, _| Did::Met(it.claim("d")),
            |it, _| {
                it.grow();
                Did::Met(it.claim("d"))
            },
        ],
        |world, dids| {
            assert_eq!(winners(dids), 1);
            assert!(matches!(world.observe("a"), Some(Met::Replay(_))), "a is lost");
        },
    );
}

#[test]
fn loom_takeover_while_the_bucket_moves() {
    model(BOUND, || {
        let world = World::new(Lapse::TakeOver);
        let _owned = world.win("a");
        world.at(LEASE);
        world.grow();
        let met = race(&world, [|it| it.claim("a"), |it| it.claim("a")]);
        assert_eq!(met.iter().map(won).sum::<usize>(), 1);
        world.settle();
    });
}

#[test]
fn loom_claim_against_rebuild_with_ghosts() {
    model(BOUND, || {
        let world = World::new(Lapse::TakeOver);
        let first = world.win("a");
        let second = world.win("b");
        assert!(world.release(&first) && world.release(&second));
        // Both slots are ghosts. The one of "a" is used again, until the table is rebuilt.
        world.grow();
        let met = race(&world, [|it| it.claim("a"), |it| it.claim("a")]);
        assert_eq!(met.iter().map(won).sum::<usize>(), 1);
        assert_eq!(won(&world.claim("b")), 1);
        world.settle();
    });
}

#[test]
fn loom_claim_against_rebuild_with_tombstones() {
    model(BOUND, || {
        let world = World::new(Lapse::TakeOver);
        let owned = ["a", "b"].map(|key| world.win(key));
        assert!(owned.iter().all(|owned| world.release(owned)));
        world.at(LEASE);
        world.engine.sweep_step();
        // Both slots are tombstones: a claim makes an overflow bucket, and a new table.
        let met = race(&world, [|it| it.claim("a"), |it| it.claim("a")]);
        assert_eq!(met.iter().map(won).sum::<usize>(), 1);
        assert_eq!(won(&world.claim("b")), 1);
        world.settle();
    });
}

#[test]
fn loom_claim_against_expiry_of_the_same_identity() {
    ring(
        BOUND,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            world.at(RETENTION + 1);
            Vec::new()
        },
        [
            |it, _| Did::Met(it.claim("a")),
            |it, _| {
                it.engine.sweep_step();
                Did::Met(it.claim("a"))
            },
        ],
        |world, dids| {
            assert_eq!(winners(dids), 1);
            assert_eq!(world.engine.room.used().0, 1);
        },
    );
}

#[test]
fn loom_claim_against_reuse_of_a_slabs_number() {
    // The slot of "a" names a slab that is gone. The next one gets its place in the directory, and
    // its first record lies where that of "a" lay.
    ring(
        BOUND,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            world.at(RETENTION + 1);
            assert_eq!(world.engine.sweep_step().reaped, 1);
            world.engine.slabs.pass_over();
            Vec::new()
        },
        [
            |it, _| Did::Met(it.claim("a")),
            |it, _| {
                it.fill("b");
                Did::Was(matches!(it.observe("b"), Some(Met::Replay(_))))
            },
        ],
        |world, dids| {
            assert_eq!(winners(dids), 1);
            assert!(dids[1].was(), "b is lost");
            assert!(matches!(world.claim("a"), Met::InFlight(_)));
            assert_eq!(world.engine.room.used().0, 2);
        },
    );
}

#[test]
#[cfg(not(oncekey_reclaim))]
fn loom_claim_of_an_old_place_against_slab_death() {
    // One claim has seen the record before its slab is gone and replaces it, the other comes after.
    ring(
        1,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            world.at(RETENTION + 1);
            Vec::new()
        },
        [
            |it, _| Did::Was(it.engine.sweep_step().reaped <= 1),
            |it, _| Did::Met(it.claim("a")),
            |it, _| Did::Met(it.claim("a")),
        ],
        |world, dids| {
            assert!(dids[0].was());
            assert_eq!(winners(dids), 1);
            assert_eq!(world.engine.room.used().0, 1);
        },
    );
}

#[test]
#[cfg(not(oncekey_reclaim))]
fn loom_two_helpers_against_slab_death() {
    // Whether "a" is dead is judged once, by the freeze: both helpers copy the same list.
    ring(
        1,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            world.at(RETENTION + 1);
            let owned = world.win("b");
            world.grow();
            vec![owned]
        },
        [
            |it, _| Did::Was(it.engine.sweep_step().reaped == 1),
            help,
            |it, _| Did::Met(it.claim("d")),
        ],
        |world, dids| {
            assert!(dids[0].was());
            assert_eq!(winners(dids), 1);
            assert!(matches!(world.claim("b"), Met::InFlight(_)), "b is lost");
            assert_eq!(won(&world.claim("a")), 1);
        },
    );
}

#[test]
fn loom_complete_against_wait_registration() {
    roles(
        3,
        Lapse::TakeOver,
        |world| vec![world.win("a")],
        |world, owned| assert!(world.complete(&owned[0], "done")),
        |world| world.met("a", true),
        |world, (), met| match met {
            Met::Replay(answer) => assert_eq!(body(&answer.outcome), b"done"),
            Met::Seated(ticket) => {
                let gift = world.engine.waiters.leave(&ticket);
                assert!(matches!(gift, Some(Gift::Completed { .. })), "nobody woke the waiter");
            }
            _ => panic!("neither"),
        },
    );
}

#[test]
#[cfg(not(oncekey_reclaim))]
fn loom_complete_against_two_registrations() {
    ring(
        BOUND,
        Lapse::TakeOver,
        |world| vec![world.win("a")],
        [
            |it, owned| Did::Was(it.complete(&owned[0], "done")),
            |it, _| Did::Met(it.met("a", true)),
            |it, _| Did::Met(it.met("a", true)),
        ],
        |world, dids| {
            assert!(dids[0].was());
            for did in dids {
                if let Did::Met(Met::Seated(ticket)) = did {
                    let gift = world.engine.waiters.leave(ticket);
                    assert!(matches!(gift, Some(Gift::Completed { .. })), "nobody woke a waiter");
                }
            }
        },
    );
}

#[test]
fn loom_complete_against_a_waiter_that_gives_up() {
    for swapped in [false, true] {
        model(3, move || {
            let world = World::new(Lapse::TakeOver);
            let owned = world.win("a");
            let Met::Seated(ticket) = world.met("a", true) else { panic!("no seat") };
            let (first, second) = (world.clone(), world.clone());
            let owner = move || assert!(first.complete(&owned, "done"));
            let waiter = move || second.engine.waiters.leave(&ticket);
            let gift = if swapped {
                let waiter = thread::spawn(waiter);
                joined(thread::spawn(owner));
                joined(waiter)
            } else {
                let owner = thread::spawn(owner);
                let gift = joined(thread::spawn(waiter));
                joined(owner);
                gift
            };
            assert!(matches!(gift, None | Some(Gift::Completed { .. })));
            assert_eq!(world.engine.waiters.total(), 0);
            world.settle();
        });
    }
}

#[test]
#[cfg(not(oncekey_reclaim))]
fn loom_release_against_two_waiters() {
    ring(
        BOUND,
        Lapse::TakeOver,
        |world| vec![world.win("a")],
        [
            |it, owned| Did::Was(it.release(&owned[0])),
            |it, _| Did::Met(it.met("a", true)),
            |it, _| Did::Met(it.met("a", true)),
        ],
        |world, dids| {
            assert!(dids[0].was());
            let mut owners = winners(dids);
            let mut woken = 0;
            for did in &dids[1..] {
                match did {
                    Did::Met(Met::Won(..)) => {}
                    Did::Met(Met::Seated(ticket)) => match world.engine.waiters.leave(ticket) {
                        Some(Gift::Permit(..)) => owners += 1,
                        Some(Gift::LookAgain) => woken += 1,
                        // It waits for the new owner.
                        None => {}
                        Some(_) => panic!("a gift of another kind"),
                    },
                    _ => panic!("neither owner nor waiter"),
                }
            }
            // Those who are told to look again come back, and one of them wins.
            owners += usize::from(owners == 0 && woken != 0 && won(&world.claim("a")) == 1);
            assert_eq!(owners, 1);
            assert_eq!((world.engine.in_flight(), world.engine.waiters.total()), (1, 0));
        },
    );
}

#[test]
fn loom_release_against_a_registration() {
    roles(
        3,
        Lapse::TakeOver,
        |world| vec![world.win("a")],
        |world, owned| assert!(world.release(&owned[0])),
        |world| world.met("a", true),
        |world, (), met| match met {
            Met::Won(..) => {}
            Met::Seated(ticket) => {
                let gift = world.engine.waiters.leave(&ticket);
                assert!(matches!(gift, Some(Gift::Permit(..) | Gift::LookAgain)), "a sleeper");
            }
            _ => panic!("neither owner nor waiter"),
        },
    );
}

#[test]
fn loom_release_against_an_heir_that_gives_up() {
    for swapped in [false, true] {
        model(3, move || {
            let world = World::new(Lapse::TakeOver);
            let owned = world.win("a");
            let Met::Seated(first) = world.met("a", true) else { panic!("no seat") };
            let Met::Seated(second) = world.met("a", true) else { panic!("no seat") };
            let leave = move |world: &World| {
                if let Some(Gift::Permit(owned, _)) = world.engine.waiters.leave(&first) {
                    assert!(world.release(&owned));
                }
            };
            let (owner, heir) = (world.clone(), world.clone());
            let release = move || assert!(owner.release(&owned));
            let leave = move || leave(&heir);
            if swapped {
                let heir = thread::spawn(leave);
                joined(thread::spawn(release));
                joined(heir);
            } else {
                let owner = thread::spawn(release);
                joined(thread::spawn(leave));
                joined(owner);
            }
            let gift = world.engine.waiters.leave(&second);
            assert!(matches!(gift, Some(Gift::Permit(..))), "the permit is lost");
            world.settle();
        });
    }
}

#[test]
fn loom_complete_against_takeover() {
    roles(
        3,
        Lapse::TakeOver,
        lapsed,
        |world, owned| usize::from(world.complete(&owned[0], "late")),
        |world| won(&world.claim("a")),
        |world, completed, won| {
            assert_eq!(completed + won, 1, "both or neither");
            assert_eq!(world.engine.room.used().0, 1);
        },
    );
}

#[test]
#[cfg(not(oncekey_reclaim))]
fn loom_two_takeovers_and_a_completion() {
    ring(
        BOUND,
        Lapse::TakeOver,
        lapsed,
        [
            |it, owned| Did::Was(it.complete(&owned[0], "late")),
            |it, _| Did::Met(it.claim("a")),
            |it, _| Did::Met(it.claim("a")),
        ],
        |_, dids| assert_eq!(usize::from(dids[0].was()) + winners(dids), 1),
    );
}

#[test]
fn loom_takeover_against_another_body() {
    // At no moment does nothing stand there, which another body could find.
    ring(
        BOUND,
        Lapse::TakeOver,
        lapsed,
        [
            |it, owned| Did::Was(it.complete(&owned[0], "late")),
            |it, _| Did::Met(it.claim("a")),
            |it, _| Did::Met(it.claim_otherwise("a")),
        ],
        |world, dids| {
            assert!(matches!(dids[2], Did::Met(Met::Mismatch)), "another body was let in");
            assert_eq!(usize::from(dids[0].was()) + winners(dids), 1);
            assert_eq!(world.engine.room.used().0, 1);
        },
    );
}

#[test]
fn loom_takeover_against_another_body_and_a_helper() {
    // As above, where the bucket begins to move meanwhile.
    ring(
        1,
        Lapse::TakeOver,
        lapsed,
        [
            |it, owned| {
                it.grow();
                help(it, owned)
            },
            |it, _| Did::Met(it.claim("a")),
            |it, _| Did::Met(it.claim_otherwise("a")),
        ],
        |world, dids| {
            assert!(matches!(dids[2], Did::Met(Met::Mismatch)), "another body was let in");
            took_over(world, dids);
        },
    );
}

#[test]
fn loom_takeover_of_a_takeover() {
    // The second may come before the first stands in the slot; the first may be done by then.
    ring(
        3,
        Lapse::TakeOver,
        lapsed,
        [
            |it, _| match it.claim("a") {
                Met::Won(owned, token) => {
                    it.complete(&owned, "filled");
                    Did::Met(Met::Won(owned, token))
                }
                met => Did::Met(met),
            },
            |it, _| {
                it.at(2 * LEASE);
                Did::Met(it.claim("a"))
            },
        ],
        |world, dids| {
            assert!(winners(dids) >= 1);
            assert!(world.observe("a").is_some(), "a is lost");
            assert_eq!(world.engine.room.used().0, 1);
        },
    );
}

#[test]
fn loom_takeover_against_forget() {
    ring(
        BOUND,
        Lapse::TakeOver,
        lapsed,
        [
            |it, owned| Did::Was(it.complete(&owned[0], "late")),
            |it, _| Did::Met(it.claim("a")),
            |it, _| Did::Was(it.engine.forget(&frame("a"), true).is_ok_and(|done| done)),
        ],
        |world, dids| {
            assert!(dids[2].was(), "something stood there all the time");
            let left = usize::from(world.observe("a").is_some());
            assert_eq!(world.engine.room.used().0, left);
        },
    );
}

fn lapsed(world: &World) -> Vec<Owned> {
    let owned = world.win("a");
    world.at(LEASE);
    vec![owned]
}

#[test]
fn loom_renew_against_takeover() {
    roles(
        3,
        Lapse::TakeOver,
        lapsed,
        |world, owned| usize::from(world.engine.renew(world.engine.lane(0), &owned[0]).is_ok()),
        |world| won(&world.claim("a")),
        |_, renewed, won| assert_eq!(renewed + won, 1, "both or neither"),
    );
}

#[test]
fn loom_drop_of_a_permit_against_the_end_of_the_claim() {
    for on_lapse in [Lapse::TakeOver, Lapse::Hold] {
        roles(
            3,
            on_lapse,
            |world| {
                let owned = world.win("a");
                world.at(LEASE + RETENTION);
                vec![owned]
            },
            // Lost or not.
            |world, owned| drop(world.engine.hold(world.engine.lane(0), &owned[0])),
            |world| world.engine.sweep_step().reaped,
            |world, (), _| {
                assert_eq!(world.engine.in_flight(), 0);
                world.at(2 * (LEASE + RETENTION) + 1);
                world.engine.sweep_step();
                world.engine.sweep_step();
                assert_eq!(world.engine.room.used().0, 0);
            },
        );
    }
}

#[test]
fn loom_observe_against_complete() {
    roles(
        3,
        Lapse::TakeOver,
        |world| vec![world.win("a")],
        |world, owned| {
            assert!(world.complete(&owned[0], "whole"));
            // Never older than one's own completion.
            assert!(matches!(world.observe("a"), Some(Met::Replay(_))));
        },
        |world| match world.observe("a") {
            Some(Met::InFlight(_)) => {}
            Some(Met::Replay(answer)) => assert_eq!(body(&answer.outcome), b"whole"),
            _ => panic!("neither in flight nor whole"),
        },
        |_, (), ()| {},
    );
}

#[test]
fn loom_complete_while_the_bucket_moves() {
    roles(
        1,
        Lapse::TakeOver,
        |world| {
            let owned = world.win("a");
            world.fill("b");
            world.grow();
            vec![owned]
        },
        |world, owned| {
            assert!(world.complete(&owned[0], "whole"));
            match world.observe("a") {
                Some(Met::Replay(answer)) => assert_eq!(body(&answer.outcome), b"whole"),
                _ => panic!("older than the own completion"),
            }
        },
        |world| won(&world.claim("d")),
        |world, (), won| {
            assert_eq!(won, 1);
            assert!(matches!(world.claim("a"), Met::Replay(_)));
        },
    );
}

#[test]
fn loom_ghost_while_the_bucket_moves() {
    // Released before, its cell still in the slot: it is retired once, by whoever takes it out.
    ring(
        BOUND,
        Lapse::TakeOver,
        |world| {
            let owned = world.win("a");
            assert!(world.release(&owned));
            world.grow();
            Vec::new()
        },
        [|it, _| Did::Met(it.claim("a")), |it, _| Did::Met(it.claim("b"))],
        |_, dids| assert_eq!(winners(dids), 2),
    );
}

#[test]
fn loom_sweep_of_a_ghost_against_a_claim() {
    roles(
        3,
        Lapse::TakeOver,
        |world| {
            let owned = world.win("a");
            assert!(world.release(&owned));
            world.at(LEASE);
            Vec::new()
        },
        |world, _| world.engine.sweep_step().reaped,
        |world| won(&world.claim("a")),
        |world, reaped, won| {
            assert_eq!((reaped, won), (0, 1));
            assert!(matches!(world.claim("a"), Met::InFlight(_)));
        },
    );
}

#[test]
fn loom_release_while_the_bucket_moves() {
    ring(
        3,
        Lapse::TakeOver,
        |world| {
            let owned = world.win("a");
            world.grow();
            vec![owned]
        },
        [
            |it, owned| {
                assert!(it.release(&owned[0]));
                assert_eq!(won(&it.claim("a")), 1);
                let met = it.observe("a");
                assert!(matches!(met, Some(Met::InFlight(_))), "older than the own win");
                Did::Was(true)
            },
            help,
        ],
        |world, _| assert!(matches!(world.claim("a"), Met::InFlight(_)), "the own win is lost"),
    );
}

#[test]
#[cfg(not(oncekey_reclaim))]
fn loom_release_against_two_claims() {
    ring(
        BOUND,
        Lapse::TakeOver,
        |world| vec![world.win("a")],
        [
            |it, owned| Did::Was(it.release(&owned[0])),
            |it, _| Did::Met(it.claim("a")),
            |it, _| Did::Met(it.claim("a")),
        ],
        |world, dids| {
            assert!(dids[0].was());
            assert!(winners(dids) <= 1);
            assert_eq!(world.engine.in_flight(), winners(dids));
        },
    );
}

#[test]
fn loom_forget_against_claim() {
    roles(
        3,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            Vec::new()
        },
        |world, _| assert_eq!(world.engine.forget(&frame("a"), false), Ok(true)),
        |world| won(&world.claim("a")),
        |world, (), won| assert_eq!(world.engine.room.used().0, won),
    );
}

#[test]
fn loom_forced_forget_against_complete() {
    roles(
        3,
        Lapse::TakeOver,
        |world| vec![world.win("a")],
        |world, owned| world.complete(&owned[0], "done"),
        |world| world.engine.forget(&frame("a"), true),
        |world, _, forgotten| {
            assert_eq!(forgotten, Ok(true));
            assert!(world.observe("a").is_none());
            assert_eq!((world.engine.room.used().0, world.engine.in_flight()), (0, 0));
        },
    );
}

#[test]
#[cfg(not(oncekey_reclaim))]
fn loom_forced_forget_against_complete_and_claim() {
    ring(
        BOUND,
        Lapse::TakeOver,
        |world| vec![world.win("a")],
        [
            |it, _| Did::Was(it.engine.forget(&frame("a"), true) == Ok(true)),
            |it, owned| Did::Was(it.complete(&owned[0], "done")),
            |it, _| Did::Met(it.claim("a")),
        ],
        |world, dids| {
            assert!(dids[0].was() || dids[1].was());
            assert!(world.engine.room.used().0 <= 1);
        },
    );
}

#[test]
fn loom_sweep_against_late_completion() {
    roles(
        3,
        Lapse::Hold,
        lapsed,
        |world, owned| {
            assert!(world.complete(&owned[0], "late"), "a lapse alone makes no token stale");
        },
        |world| world.engine.sweep_step().reaped,
        |world, (), reaped| {
            assert_eq!(reaped, 0);
            assert!(matches!(world.observe("a"), Some(Met::Replay(_))));
            assert_eq!((world.engine.in_flight(), world.engine.room.used().0), (0, 1));
        },
    );
}

#[test]
fn loom_slab_death_against_completion() {
    // The last record of a slab dies while another completion is let in.
    roles(
        3,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            world.at(RETENTION + 1);
            vec![world.win("b")]
        },
        |world, owned| assert!(world.complete(&owned[0], "young")),
        |world| world.engine.sweep_step().reaped,
        |world, (), reaped| {
            assert_eq!(reaped, 1);
            match world.observe("b") {
                Some(Met::Replay(answer)) => assert_eq!(body(&answer.outcome), b"young"),
                _ => panic!("the record is lost"),
            }
            assert_eq!(world.engine.room.used().0, 1);
        },
    );
}

#[test]
fn loom_reaping_against_replay() {
    roles(
        3,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            Vec::new()
        },
        |world, _| {
            world.at(RETENTION);
            world.engine.sweep_step();
        },
        |world| match world.observe("a") {
            None => {}
            Some(Met::Replay(answer)) => assert_eq!(body(&answer.outcome), b"filled"),
            _ => panic!("neither gone nor whole"),
        },
        |world, (), ()| assert!(world.observe("a").is_none()),
    );
}

impl World {
    /// Takes out all that a tier still has.
    fn evict(&self) {
        self.engine.evicts.store(true, Relaxed);
        assert!(!self.engine.evict_until(|| false, &self.engine.pin()));
    }
}

#[test]
fn loom_eviction_against_replay() {
    roles(
        3,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            Vec::new()
        },
        |world, _| world.evict(),
        |world| match world.observe("a") {
            None => {}
            Some(Met::Replay(answer)) => assert_eq!(body(&answer.outcome), b"filled"),
            _ => panic!("neither gone nor whole"),
        },
        |world, (), ()| {
            assert!(world.observe("a").is_none());
            assert_eq!(world.engine.room.used().0, 0);
        },
    );
}

#[test]
fn loom_eviction_against_completion() {
    // It leaves whole or not at all, and its room with it.
    roles(
        3,
        Lapse::TakeOver,
        |world| vec![world.win("a")],
        |world, owned| assert!(world.complete(&owned[0], "done")),
        |world| world.evict(),
        |world, (), ()| {
            let is_there = match world.observe("a") {
                None => false,
                Some(Met::Replay(answer)) => body(&answer.outcome) == b"done",
                _ => panic!("neither gone nor whole"),
            };
            assert_eq!(world.engine.room.used().0, usize::from(is_there));
            assert_eq!(world.engine.in_flight(), 0);
        },
    );
}

#[test]
fn loom_eviction_against_a_claim_after_the_end() {
    // One of them gives the ended record's room back.
    roles(
        3,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            world.at(RETENTION);
            Vec::new()
        },
        |world, _| drop(world.win("a")),
        |world| world.evict(),
        |world, (), ()| {
            assert!(matches!(world.observe("a"), Some(Met::InFlight(_))));
            assert_eq!(world.engine.room.used().0, 1);
        },
    );
}

#[test]
fn loom_drain_against_claims() {
    roles(
        3,
        Lapse::TakeOver,
        |_| Vec::new(),
        |world, _| {
            world.engine.drain();
            world.engine.in_flight() == 0
        },
        |world| {
            let frame = frame("a");
            let mut translate = |_| None;
            let mut asked = Asked::new(fingerprint(), &mut translate);
            let engine = &world.engine;
            let hash = engine.hash(&Identity::from_frame(&frame));
            engine.claim(engine.lane(0), hash, &frame, &mut asked, false, &engine.pin()).is_ok()
        },
        |world, drained, won| {
            assert!(!(drained && won), "drained beside a claim");
            assert_eq!(world.engine.in_flight(), usize::from(won));
        },
    );
}

/// A closed slab with the records of "a" and "b", of which the first is forgotten: the next sweep
/// moves the second.
fn sparse(world: &World) -> Vec<Owned> {
    ["a", "b", "c"].into_iter().for_each(|key| world.fill(key));
    assert_eq!(world.engine.forget(&frame("a"), false), Ok(true));
    Vec::new()
}

#[test]
fn loom_compaction_against_replay() {
    ring(
        BOUND,
        Lapse::TakeOver,
        sparse,
        [
            |it, _| Did::Was(it.engine.sweep_step().more),
            |it, _| match it.observe("b") {
                Some(Met::Replay(answer)) => Did::Was(body(&answer.outcome) == b"filled"),
                _ => panic!("b is lost"),
            },
        ],
        |world, dids| {
            assert!(dids.iter().all(Did::was));
            assert!(matches!(world.claim("b"), Met::Replay(_)));
            assert_eq!(world.engine.room.used().0, 2);
        },
    );
}

#[test]
fn loom_compaction_against_a_claim_after_the_end() {
    // The claim kills the record, its copy, or both.
    ring(
        BOUND,
        Lapse::TakeOver,
        sparse,
        [
            |it, _| Did::Was(it.engine.sweep_step().reaped <= 2),
            |it, _| {
                it.at(RETENTION);
                Did::Met(it.claim("b"))
            },
        ],
        |world, dids| {
            assert!(dids[0].was());
            assert_eq!(winners(dids), 1);
            world.engine.sweep_step();
            world.engine.sweep_step();
            assert!(matches!(world.claim("b"), Met::InFlight(_)));
            assert_eq!(world.engine.room.used().0, 1);
        },
    );
}

#[test]
fn loom_forget_account_while_the_bucket_moves() {
    ring(
        BOUND,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            world.grow();
            Vec::new()
        },
        [|it, _| Did::Was(it.engine.forget_account(b"a") == 1), |it, _| Did::Met(it.claim("d"))],
        |world, dids| {
            assert!(dids[0].was());
            assert_eq!(winners(dids), 1);
            assert!(world.observe("a").is_none());
            assert_eq!(world.engine.room.used().0, 1);
        },
    );
}

#[test]
fn loom_growth_against_the_first_claim() {
    // Who makes a table looks at what the present one holds.
    ring(
        3,
        Lapse::TakeOver,
        |_| Vec::new(),
        [
            |it, _| {
                it.grow();
                Did::Was(true)
            },
            |it, _| Did::Met(it.claim("a")),
        ],
        |world, dids| {
            assert_eq!(winners(dids), 1);
            assert!(matches!(world.claim("a"), Met::InFlight(_)), "a is lost");
        },
    );
}

#[test]
fn loom_look_while_the_bucket_moves() {
    ring(
        3,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            world.grow();
            Vec::new()
        },
        [help, replays],
        |_, dids| assert!(dids[1].was(), "a is lost"),
    );
}

#[test]
fn loom_two_buckets_move_and_the_root() {
    // Who moves the last bucket moves the root: it leads to what others have moved before.
    ring(
        3,
        Lapse::TakeOver,
        |world| {
            world.fill("a");
            world.grow();
            help(world, &[]);
            world.grow();
            Vec::new()
        },
        [
            |it, _| {
                let guard = it.engine.pin();
                it.engine.index.move_bucket(1 << 63, &it.engine.slabs, &guard);
                drop(guard);
                replays(it, &[])
            },
            help,
        ],
        |_, dids| assert!(dids[0].was(), "a is lost"),
    );
}

/// The lane's one block of cells is used up, and "a" is new.
#[cfg(not(oncekey_reclaim))]
fn used_up(world: &World) -> Vec<Owned> {
    for _ in 0..4 {
        let owned = world.win("a");
        assert!(world.release(&owned));
    }
    Vec::new()
}

#[test]
#[cfg(not(oncekey_reclaim))]
fn loom_two_claims_and_a_new_block() {
    ring(
        BOUND,
        Lapse::TakeOver,
        used_up,
        [|it, _| Did::Met(it.claim("a")), |it, _| Did::Met(it.claim("b"))],
        |_, dids| assert_eq!(winners(dids), 2),
    );
}

#[test]
#[cfg(not(oncekey_reclaim))]
fn loom_sweep_against_a_new_block() {
    // It takes places off the end while the claim puts a block there: the next sweep sees it.
    ring(
        3,
        Lapse::Hold,
        used_up,
        [|it, _| Did::Was(it.engine.sweep_step().reaped == 0), |it, _| Did::Met(it.claim("b"))],
        |world, dids| {
            assert!(dids[0].was());
            assert_eq!(winners(dids), 1);
            world.at(LEASE);
            world.engine.sweep_step();
            assert_eq!(world.engine.in_flight(), 0, "a claim that no sweep meets");
        },
    );
}

#[test]
fn loom_sweep_against_a_claim_that_sleeps() {
    // It has a cell when its lease and its retention are over, and no slot yet.
    ring(
        BOUND,
        Lapse::TakeOver,
        |world| {
            world.fill("b");
            Vec::new()
        },
        [
            |it, _| {
                it.at(LEASE + RETENTION);
                it.engine.sweep_step();
                Did::Was(true)
            },
            |it, _| Did::Met(it.claim("a")),
        ],
        |world, dids| {
            assert_eq!(winners(dids), 1);
            assert!(world.engine.room.used().0 <= 1);
        },
    );
}

#[test]
#[cfg(not(oncekey_reclaim))]
fn loom_compaction_of_the_last_record_against_a_look() {
    // "b" is moved out of its slab, which is buried then: who finds it gone sees where "b" went.
    ring(
        BOUND,
        Lapse::TakeOver,
        |world| {
            ["a", "b", "c"].into_iter().for_each(|key| world.fill(key));
            Vec::new()
        },
        [
            |it, _| Did::Was(it.engine.forget(&frame("a"), false) == Ok(true)),
            |it, _| Did::Was(it.engine.sweep_step().reaped == 0),
            |it, _| Did::Was(matches!(it.observe("b"), Some(Met::Replay(_)))),
        ],
        |_, dids| assert!(dids.iter().all(Did::was)),
    );
}

fn two_owners(world: &World) -> Vec<Owned> {
    ["a", "b"].map(|key| world.win(key)).into()
}

/// The open slab has room for one of two.
fn two_owners_and_a_record(world: &World) -> Vec<Owned> {
    world.fill("a");
    assert_eq!(world.engine.forget(&frame("a"), false), Ok(true));
    two_owners(world)
}

#[test]
fn loom_two_completions_and_a_new_slab() {
    for prepare in [two_owners, two_owners_and_a_record] {
        ring(
            BOUND,
            Lapse::TakeOver,
            prepare,
            [
                |it, owned| Did::Was(it.complete(&owned[0], "first")),
                |it, owned| Did::Was(it.complete(&owned[1], "second")),
            ],
            |world, dids| {
                assert!(dids.iter().all(Did::was));
                for (key, whole) in [("a", &b"first"[..]), ("b", b"second")] {
                    match world.observe(key) {
                        Some(Met::Replay(answer)) => assert_eq!(body(&answer.outcome), whole),
                        _ => panic!("{key} is lost"),
                    }
                }
            },
        );
    }
}

/// Races of what frees memory with what still looks at it, on the real reclamation and with the
/// address sanitizer. Whoever unlinks something also frees all that may be freed, in the model.
#[cfg(oncekey_reclaim)]
mod freeing {
    use super::*;

    /// Preemptions in one execution.
    const FREEING: usize = 3;

    /// Frees what was retired, as far as nobody looks at it, as the sweep does.
    fn tidy(world: &World) {
        let engine = &world.engine;
        engine.domain.turn_over();
        let guard = engine.pin();
        engine.lane(0).cells.free_blocks(0, &guard);
        drop(guard);
        engine.domain.collect();
        world.engine.slabs.clean();
    }

    fn fill_large(world: &World, key: &str) {
        let owned = world.win(key);
        let guard = world.engine.pin();
        let answer = Some(Outcome::new(200).body(vec![7; 600]));
        let engine = &world.engine;
        let done = engine.complete(engine.lane(0), owned.cell(), By::Owner, answer, &guard);
        assert!(done.is_ok());
    }

    /// Were a cell given back twice, or too early, two claims would be in one.
    fn claims_have_cells_of_their_own(world: &World, keys: [&str; 2]) {
        for key in keys {
            world.engine.trim();
            world.engine.trim();
            assert_eq!(won(&world.claim(key)), 1);
        }
        for key in keys {
            assert!(matches!(world.claim(key), Met::InFlight(_)), "{key} is lost");
        }
    }

    /// What a reader may see of an identity that is completed with `filled`, if at all.
    fn look(world: &World, _: &[Owned]) -> Did {
        match world.observe("a") {
            None | Some(Met::InFlight(_)) => {}
            Some(Met::Replay(answer)) => assert_eq!(body(&answer.outcome), b"filled"),
            _ => panic!("neither in flight nor whole"),
        }
        Did::Was(true)
    }

    #[test]
    fn loom_freed_cell_against_a_look() {
        // The cell of "a" goes with its completion; the next claim writes into it, because that of "z"
        // keeps the block.
        ring(
            FREEING,
            Lapse::TakeOver,
            |world| vec![world.win("a"), world.win("z")],
            [look, |it, owned| {
                assert!(it.complete(&owned[0], "filled"));
                tidy(it);
                Did::Met(it.claim("b"))
            }],
            |_, dids| assert_eq!(winners(dids), 1),
        );
    }

    #[test]
    fn loom_freed_ghost_against_a_look() {
        ring(
            FREEING,
            Lapse::TakeOver,
            |world| {
                let owned = world.win("a");
                assert!(world.release(&owned));
                Vec::new()
            },
            [look, |it, _| {
                let met = it.claim("a");
                tidy(it);
                assert_eq!(won(&it.claim("b")), 1);
                Did::Met(met)
            }],
            |_, dids| assert_eq!(winners(dids), 1),
        );
    }

    #[test]
    fn loom_freed_ghost_against_its_sweep() {
        // The claim replaces the ghost and retires it, or the sweep does: not both.
        ring(
            FREEING,
            Lapse::TakeOver,
            |world| {
                let owned = world.win("a");
                assert!(world.release(&owned));
                world.at(LEASE);
                Vec::new()
            },
            [
                |it, _| {
                    it.engine.sweep_step();
                    tidy(it);
                    Did::Was(true)
                },
                |it, _| Did::Met(it.claim("a")),
            ],
            |world, dids| {
                assert_eq!(winners(dids), 1);
                claims_have_cells_of_their_own(world, ["b", "c"]);
                assert!(matches!(world.claim("a"), Met::InFlight(_)), "a is lost");
            },
        );
    }

    #[test]
    fn loom_freed_slab_against_a_look() {
        ring(
            FREEING,
            Lapse::TakeOver,
            |world| {
                world.fill("a");
                Vec::new()
            },
            [look, |it, _| {
                it.at(RETENTION);
                it.engine.sweep_step();
                tidy(it);
                Did::Was(true)
            }],
            |world, _| assert!(world.observe("a").is_none()),
        );
    }

    #[test]
    fn loom_freed_slab_against_a_completion() {
        // The last record of the open slab dies while another one is written.
        ring(
            FREEING,
            Lapse::TakeOver,
            |world| {
                world.fill("a");
                world.at(RETENTION + 1);
                vec![world.win("b")]
            },
            [
                |it, owned| Did::Was(it.complete(&owned[0], "young")),
                |it, _| {
                    it.engine.sweep_step();
                    tidy(it);
                    Did::Was(true)
                },
            ],
            |world, dids| {
                assert!(dids[0].was());
                match world.observe("b") {
                    Some(Met::Replay(answer)) => assert_eq!(body(&answer.outcome), b"young"),
                    _ => panic!("the record is lost"),
                }
            },
        );
    }

    #[test]
    fn loom_freed_table_against_a_look() {
        ring(
            FREEING,
            Lapse::TakeOver,
            |world| {
                world.fill("a");
                world.grow();
                Vec::new()
            },
            [look, |it, _| {
                let met = it.claim("d");
                tidy(it);
                Did::Met(met)
            }],
            |world, dids| {
                assert_eq!(winners(dids), 1);
                assert!(matches!(world.observe("a"), Some(Met::Replay(_))), "a is lost");
            },
        );
    }

    #[test]
    fn loom_freed_outcome_against_a_replay() {
        // A large outcome is a value in its record.
        ring(
            FREEING,
            Lapse::TakeOver,
            |world| {
                fill_large(world, "a");
                Vec::new()
            },
            [
                |it, _| {
                    match it.observe("a") {
                        None => {}
                        Some(Met::Replay(answer)) => assert_eq!(body(&answer.outcome), [7; 600]),
                        _ => panic!("neither gone nor whole"),
                    }
                    Did::Was(true)
                },
                |it, _| {
                    let forgotten = it.engine.forget(&frame("a"), false) == Ok(true);
                    tidy(it);
                    Did::Was(forgotten)
                },
            ],
            |world, dids| {
                assert!(dids[1].was());
                assert!(world.observe("a").is_none());
            },
        );
    }

    #[test]
    fn loom_freed_cell_against_a_takeover() {
        // The cell is retired by the owner that came too late, or by its own completion.
        ring(
            FREEING,
            Lapse::TakeOver,
            lapsed,
            [
                |it, owned| {
                    let completed = it.complete(&owned[0], "filled");
                    tidy(it);
                    assert_eq!(won(&it.claim("b")), 1);
                    Did::Was(completed)
                },
                |it, _| Did::Met(it.claim("a")),
            ],
            |world, dids| {
                assert_eq!(usize::from(dids[0].was()) + winners(dids), 1);
                claims_have_cells_of_their_own(world, ["c", "d"]);
                assert!(matches!(world.claim("b"), Met::InFlight(_)), "b is lost");
                assert!(world.observe("a").is_some(), "a is lost");
            },
        );
    }

    #[test]
    fn loom_freed_successor_against_a_look() {
        // Who has met the cell that was taken over comes late to its successor, whose cell is another
        // claim's by then.
        ring(
            FREEING,
            Lapse::TakeOver,
            lapsed,
            [
                |it, owned| {
                    let Met::Won(next, token) = it.claim("a") else { panic!("a has not lapsed") };
                    assert!(it.complete(&next, "filled"));
                    tidy(it);
                    assert_eq!(won(&it.claim("b")), 1);
                    assert!(!it.complete(&owned[0], "late"));
                    Did::Met(Met::Won(next, token))
                },
                |it, _| Did::Met(it.claim_otherwise("a")),
            ],
            |world, dids| {
                assert!(matches!(dids[1], Did::Met(Met::Mismatch)), "another body was let in");
                claims_have_cells_of_their_own(world, ["c", "d"]);
                assert!(matches!(world.claim("b"), Met::InFlight(_)), "b is lost");
                assert!(matches!(world.observe("a"), Some(Met::Replay(_))), "a is lost");
            },
        );
    }

    #[test]
    fn loom_freed_cell_against_a_registration() {
        ring(
            BOUND,
            Lapse::TakeOver,
            |world| vec![world.win("a"), world.win("z")],
            [
                |it, owned| {
                    assert!(it.complete(&owned[0], "filled"));
                    tidy(it);
                    Did::Met(it.claim("b"))
                },
                |it, _| {
                    if let Met::Seated(ticket) = it.met("a", true) {
                        it.engine.waiters.leave(&ticket);
                    }
                    Did::Was(true)
                },
            ],
            |world, dids| {
                assert_eq!(winners(dids), 1);
                assert_eq!(world.engine.waiters.total(), 0);
            },
        );
    }

    #[test]
    fn loom_freed_cell_against_the_next_claim() {
        // The cell of "a" is given back, or its block goes, while a claim takes what is free.
        ring(
            FREEING,
            Lapse::TakeOver,
            |world| {
                world.fill("a");
                Vec::new()
            },
            [
                |it, _| {
                    it.engine.trim();
                    Did::Was(true)
                },
                |it, _| Did::Met(it.claim("b")),
            ],
            |world, dids| {
                assert_eq!(winners(dids), 1);
                assert!(matches!(world.claim("b"), Met::InFlight(_)), "b is lost");
            },
        );
    }

    #[test]
    fn loom_freed_cell_against_a_dropped_permit() {
        for on_lapse in [Lapse::TakeOver, Lapse::Hold] {
            ring(
                FREEING,
                on_lapse,
                |world| {
                    let owned = world.win("a");
                    world.at(LEASE + RETENTION);
                    vec![owned]
                },
                [
                    |it, owned| {
                        drop(it.engine.hold(it.engine.lane(0), &owned[0]));
                        tidy(it);
                        Did::Was(true)
                    },
                    |it, _| {
                        it.engine.sweep_step();
                        tidy(it);
                        Did::Was(true)
                    },
                ],
                |world, _| {
                    assert_eq!(world.engine.in_flight(), 0);
                    tidy(world);
                    // Were a cell free twice, these two would be one.
                    assert_eq!(won(&world.claim("b")) + won(&world.claim("c")), 2);
                    for key in ["b", "c"] {
                        assert!(matches!(world.claim(key), Met::InFlight(_)), "{key} is lost");
                    }
                },
            );
        }
    }
}
