//! The wheel against simple models.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

impl<T> Wheel<T> {
    /// Walks everything and asserts invariants 1 to 3.
    fn check(&self) {
        self.timers.check();
        let mut seen = 0;
        for (list, &first) in self.first.iter().enumerate() {
            if list != OPEN {
                let bit = self.occupied[list / SLOTS] >> (list % SLOTS) & 1;
                assert_eq!(bit == 1, first != NIL);
            }
            let (mut back, mut place) = (Back::list(list), first);
            while let Some(timer) = self.timers.get(place) {
                assert_eq!(timer.back, back);
                assert!(list == OPEN || list == self.list_for(timer.at));
                seen += 1;
                (back, place) = (Back::place(place), timer.next);
            }
            assert_eq!(place, NIL);
        }
        assert_eq!(seen, self.len());
    }

    /// Advances with a budget that never runs out.
    fn all(&mut self, now: u64) -> Vec<T> {
        let mut out = Vec::new();
        assert!(!self.advance(now, usize::MAX, &mut out));
        out
    }
}

const SECOND: u64 = 1000;
const HOUR: u64 = 3600 * SECOND;
const DAY: u64 = 24 * HOUR;

#[test]
fn a_timer_costs_24_bytes_and_the_item() {
    assert_eq!(size_of::<Option<Timer<u64>>>(), 32);
    assert_eq!(size_of::<Option<TimerId>>(), 16);
}

#[test]
fn back_round_trips() {
    for list in 0..=OPEN {
        assert_eq!(Back::list(list).unpack(), Err(list));
    }
    for place in [0, 1, OPEN as u32, Back::LIST - 1] {
        assert_eq!(Back::place(place).unpack(), Ok(place));
    }
}

#[test]
fn late_items_come_at_the_next_advance() {
    let mut wheel = Wheel::new(100);
    for at in [0, 99, 100] {
        wheel.insert(at, at);
    }
    assert_eq!(wheel.next_deadline(), Some(100));
    wheel.insert(101, 101);
    let mut out = wheel.all(100);
    out.sort_unstable();
    assert_eq!(out, [0, 99, 100]);
    assert_eq!(wheel.next_deadline(), Some(101));
}

#[test]
fn time_never_goes_back() {
    let mut wheel = Wheel::new(0);
    wheel.insert(10, 'a');
    assert_eq!(wheel.all(50), ['a']);
    wheel.insert(60, 'b');
    assert_eq!(wheel.all(5), []);
    wheel.insert(40, 'c');
    assert_eq!(wheel.all(0), ['c']);
    assert_eq!(wheel.all(60), ['b']);
}

/// The wheel turns through empty time too, so that the next deadline is as good as it can be.
#[test]
fn after_a_long_idle_time_the_near_future_is_exact() {
    let mut wheel = Wheel::new(0);
    assert_eq!(wheel.all(3 * DAY), []);
    wheel.insert(3 * DAY + 1, 'a');
    assert_eq!(wheel.next_deadline(), Some(3 * DAY + 1));
}

#[test]
fn a_stale_id_finds_nothing() {
    let mut wheel = Wheel::new(0);
    let out = wheel.insert(1, 'a');
    let removed = wheel.insert(2, 'b');
    assert_eq!(wheel.remove(removed), Some('b'));
    assert_eq!(wheel.all(1), ['a']);
    // The places are taken again, also after their chunk went and came back.
    let many: Vec<_> = (0..1000).map(|_| wheel.insert(3, 'x')).collect();
    assert!([out, removed].iter().all(|id| many.iter().any(|other| other.place == id.place)));
    assert_eq!((wheel.remove(out), wheel.remove(removed)), (None, None));
    wheel.all(3);
    let again: Vec<_> = (0..1000).map(|_| wheel.insert(9, 'y')).collect();
    assert!(many.iter().all(|id| wheel.remove(*id).is_none()));
    assert!(again.iter().all(|id| wheel.remove(*id) == Some('y')));
    wheel.check();
}

/// One timer on each side of every boundary between slots of every level, up to the end of `u64`.
#[test]
fn each_level_wraps() {
    for start in [0, 1, 63, 64, HOUR, u64::MAX / 2, u64::MAX - 65, u64::MAX - 1] {
        let mut times = vec![start + 1, u64::MAX - 1, u64::MAX];
        for level in 0..LEVELS as u32 {
            for slot in [1, 2, 62, 63, 64, 65] {
                let edge = (start >> (level * DIGIT)).checked_add(slot).unwrap_or(0);
                if edge.leading_zeros() >= level * DIGIT {
                    let edge = edge << (level * DIGIT);
                    times.extend([edge.saturating_sub(1), edge, edge.saturating_add(1)]);
                }
            }
        }
        times.retain(|time| *time > start);
        times.sort_unstable();
        times.dedup();
        let mut wheel = Wheel::new(start);
        for time in &times {
            wheel.insert(*time, *time);
        }
        wheel.check();
        for time in times {
            let early = wheel.all(time - 1);
            assert!(early.iter().all(|at| *at < time), "{early:?} before {time}");
            assert!(wheel.next_deadline().is_none_or(|next| next <= time));
            wheel.insert(time, time);
            wheel.check();
            let out = wheel.all(time);
            assert!(!out.is_empty() && out.iter().all(|at| *at == time), "{out:?} at {time}");
        }
        assert_eq!((wheel.len(), wheel.next_deadline()), (0, None));
        wheel.insert(u64::MAX, u64::MAX);
        assert_eq!(wheel.all(u64::MAX), [u64::MAX]);
    }
}

/// Case 68: three years with an insert for 24 h each hour, and once more where the first years of
/// `u64` ticks are long over.
#[test]
fn three_years() {
    for start in [0, 1_234_567_890_123, u64::MAX - 4 * 365 * DAY] {
        let mut wheel = Wheel::new(start);
        let mut bytes = 0;
        for hour in 0..3 * 365 * 24 {
            let now = start + hour * HOUR;
            let out = wheel.all(now);
            // Exactly the one of yesterday, in the very tick.
            assert_eq!(out.len(), usize::from(hour >= 24));
            assert!(out.iter().all(|at| *at == now));
            wheel.insert(now + DAY, now + DAY);
            assert!(wheel.all(now + HOUR - 1).is_empty());
            assert!(wheel.next_deadline().is_some_and(|next| next <= now + HOUR.max(DAY)));
            assert_eq!(wheel.len() as u64, (hour + 1).min(24));
            if hour == 48 {
                bytes = wheel.bytes();
            }
        }
        wheel.check();
        assert_eq!(wheel.bytes(), bytes);
    }
}

/// The sleeper's way: from one deadline to the next, never further.
#[test]
fn deadlines_lead_to_the_item_in_a_step_for_each_level() {
    for at in [1, 64, 4095, 4096, DAY + 1, 3 * 365 * DAY, u64::MAX / 3, u64::MAX] {
        let mut wheel = Wheel::new(0);
        wheel.insert(at, at);
        let mut steps = 0;
        loop {
            steps += 1;
            let next = wheel.next_deadline().unwrap();
            assert!(next <= at);
            if !wheel.all(next).is_empty() {
                assert_eq!(next, at);
                break;
            }
        }
        assert!(steps <= LEVELS, "{steps} steps to {at}");
    }
}

/// R24: bounded work when a million items end together.
#[test]
fn a_million_in_one_tick() {
    const MANY: usize = 1_000_000;
    const BUDGET: usize = 256;
    let mut wheel = Wheel::new(0);
    let empty = wheel.bytes();
    for n in 0..MANY {
        wheel.insert(DAY, n);
    }
    let full = wheel.bytes();
    assert!(full < MANY * 34, "{full}");

    // They have to move down before their time: that is paid from the budget too.
    let begin = wheel.next_deadline().unwrap();
    let mut out = Vec::new();
    let mut calls = 1;
    while wheel.advance(begin, BUDGET, &mut out) {
        calls += 1;
    }
    assert!(out.is_empty() && begin < DAY);
    assert_eq!(calls, MANY.div_ceil(BUDGET) + usize::from(MANY.is_multiple_of(BUDGET)));
    assert!(wheel.advance(DAY - 1, BUDGET, &mut out));
    while wheel.advance(DAY - 1, BUDGET, &mut out) {}
    assert!(out.is_empty());

    let mut seen = vec![false; MANY];
    let mut more = true;
    while more {
        more = wheel.advance(DAY, BUDGET, &mut out);
        assert!(out.len() == BUDGET || !more);
        // A newcomer that is due later changes nothing.
        out.drain(..).for_each(|n| assert!(!std::mem::replace(&mut seen[n], true)));
    }
    assert!(seen.iter().all(|seen| *seen));
    wheel.check();
    assert!(wheel.bytes() < empty + 4096, "{} of {full}", wheel.bytes());
}

#[test]
fn a_long_sleep_hands_out_each_item_once_without_moving_it() {
    let mut wheel = Wheel::new(0);
    for n in 0..10_000 {
        wheel.insert(1 + n * n * 1000, n);
    }
    // 10 000 units are enough for all, though the items stand on five levels.
    let mut out = Vec::new();
    assert!(!wheel.advance(u64::MAX, 10_000, &mut out));
    assert_eq!(out.len(), 10_000);
}

#[test]
fn a_budget_of_zero_moves_nothing() {
    let mut wheel = Wheel::new(0);
    assert!(!wheel.advance(5, 0, &mut Vec::new()));
    wheel.insert(10, ());
    assert!(!wheel.advance(9, 0, &mut Vec::new()));
    assert!(wheel.advance(10, 0, &mut Vec::new()));
    assert!(wheel.advance(10, 0, &mut Vec::new()));
    assert_eq!(wheel.all(10).len(), 1);
}

/// One timer that never ends does not keep others (case 76), nor their memory.
#[test]
fn one_that_stays_keeps_one_chunk() {
    let mut wheel = Wheel::new(0);
    wheel.insert(u64::MAX, 0);
    let before = wheel.bytes();
    for n in 0..10_000 {
        wheel.insert(DAY + n % 1000, n);
    }
    assert_eq!(wheel.all(25 * HOUR).len(), 10_000);
    assert_eq!(wheel.len(), 1);
    assert!(wheel.bytes() < before + 4096);
}

/// Against a `BTreeMap` from time to items:
///
/// 1. Nothing comes early: all that comes out is due, and was inside.
/// 2. Nothing is lost or late: when `advance` returns false, nothing that is due is left.
/// 3. A call hands out no more than its budget, and with a budget makes progress.
/// 4. `remove` gives an item back if and only if it is still inside.
/// 5. `next_deadline` is there if and only if an item is, not after the first one's time, and in the
///    future when `advance` has returned false: a sleeper does not spin.
/// 6. `len` counts, and the invariants hold after each step.
#[derive(Clone, Debug)]
enum Step {
    /// How many ticks ahead, or before the present.
    Insert(i64),
    InsertAt(u64),
    /// Of all ids ever given.
    Remove(prop::sample::Index),
    /// How far, and with what budget.
    Advance(u64, usize),
    AdvanceToDeadline(usize),
    Back(u64),
}

/// Distances that reach every level, the near ones more often.
fn distance() -> impl Strategy<Value = u64> {
    (0..64u32, any::<u64>()).prop_map(|(bits, random)| random >> 1 >> bits)
}

fn near() -> impl Strategy<Value = u64> {
    prop_oneof![0..3u64, 0..200u64, 0..10_000u64, 0..(2 * DAY)]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let budget = prop_oneof![0..4usize, 0..20usize, Just(usize::MAX)];
    prop::collection::vec(
        prop_oneof![
            6 => near().prop_map(|ahead| Step::Insert(ahead as i64)),
            2 => distance().prop_map(|ahead| Step::Insert(ahead as i64)),
            1 => near().prop_map(|late| Step::Insert(-(late as i64))),
            1 => prop_oneof![any::<u64>(), Just(u64::MAX), Just(0)].prop_map(Step::InsertAt),
            2 => any::<prop::sample::Index>().prop_map(Step::Remove),
            4 => (near(), budget.clone()).prop_map(|(by, budget)| Step::Advance(by, budget)),
            1 => (distance(), budget.clone()).prop_map(|(by, budget)| Step::Advance(by, budget)),
            2 => budget.prop_map(Step::AdvanceToDeadline),
            1 => near().prop_map(Step::Back),
        ],
        1..120,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]
    #[test]
    fn agrees_with_a_sorted_map(start in prop_oneof![Just(0), any::<u64>()], steps in steps()) {
        let mut wheel = Wheel::new(start);
        let mut now = start;
        let mut inside: BTreeMap<(u64, usize), ()> = BTreeMap::new();
        let mut ids: Vec<(TimerId, u64)> = Vec::new();
        for step in steps {
            let insert = match step {
                Step::Insert(ahead) => Some(now.saturating_add_signed(ahead)),
                Step::InsertAt(at) => Some(at),
                _ => None,
            };
            let advance = match step {
                Step::Advance(by, budget) => Some((now.saturating_add(by), budget)),
                Step::AdvanceToDeadline(budget) => {
                    wheel.next_deadline().map(|next| (next.max(now), budget))
                }
                Step::Back(by) => Some((now.saturating_sub(by), 5)),
                _ => None,
            };
            if let Some(at) = insert {
                inside.insert((at, ids.len()), ());
                ids.push((wheel.insert(at, ids.len()), at));
            }
            if let (Step::Remove(index), false) = (&step, ids.is_empty()) {
                let number = index.index(ids.len());
                let (id, at) = ids[number];
                let expected = inside.remove(&(at, number)).map(|()| number);
                prop_assert_eq!(wheel.remove(id), expected);
                prop_assert_eq!(wheel.remove(id), None);
            }
            if let Some((to, budget)) = advance {
                let mut out = Vec::new();
                let more = wheel.advance(to, budget, &mut out);
                now = now.max(to);
                prop_assert!(out.len() <= budget);
                for number in out {
                    let at = ids[number].1;
                    prop_assert!(at <= now, "{} came at {}", at, now);
                    prop_assert_eq!(inside.remove(&(at, number)), Some(()));
                }
                let left = inside.keys().next().is_some_and(|(at, _)| *at <= now);
                prop_assert!(more || !left);
                prop_assert!(!more || budget != usize::MAX);
                prop_assert!(more || wheel.next_deadline().is_none_or(|next| next > now));
            }
            wheel.check();
            prop_assert_eq!(wheel.len(), inside.len());
            let first = inside.keys().next().map(|(at, _)| (*at).max(now));
            prop_assert_eq!(wheel.next_deadline().is_some(), first.is_some());
            prop_assert!(wheel.next_deadline() <= first);
        }
        // A limited budget comes to an end too, after a deal for each item and level.
        let (mut out, mut calls) = (Vec::new(), 0);
        while wheel.advance(u64::MAX, 1, &mut out) {
            calls += 1;
            prop_assert!(calls <= inside.len());
        }
        prop_assert_eq!(out.len(), inside.len());
        prop_assert_eq!(wheel.len(), 0);
    }
}
