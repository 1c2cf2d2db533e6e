//! Every peer does the same, or the comparison means nothing.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    task::{Context, Poll, Waker},
    time::Duration,
};

use crate::{
    ask::{Answer, Ask, Kept},
    peer::{Met, Peer, Time},
};

use super::*;

const DAY: Duration = Duration::from_secs(86_400);

fn keeps_the_promises<P: Peer>(mismatch_in_flight: bool) {
    let peer = P::new(Time::ByHand { retention: DAY });
    for n in 0..1_000 {
        let ask = Ask::numbered(n);
        let other = Ask { id: ask.id, print: Ask::numbered(!n).print };
        let Met::Won(permit) = peer.claim(&ask) else { panic!("{}: {n} is new", P::NAME) };
        assert!(matches!(peer.claim(&ask), Met::InFlight), "{}", P::NAME);
        assert!(matches!(peer.meet(&ask), Met::InFlight), "{}", P::NAME);
        if mismatch_in_flight {
            assert!(matches!(peer.meet(&other), Met::Mismatch), "{}", P::NAME);
        }
        peer.complete(permit, Answer::sized(200));
        for met in [peer.claim(&ask), peer.meet(&ask)] {
            let Met::Replay(kept) = met else { panic!("{}: {n} is kept", P::NAME) };
            assert_eq!((kept.status(), kept.body()), (200, &[b'x'; 200][..]));
        }
        assert!(matches!(peer.meet(&other), Met::Mismatch), "{}", P::NAME);
    }
    if P::ENDS {
        assert_eq!((peer.keys(), peer.reap()), (Some(1_000), 0));
        peer.pass(DAY);
        assert_eq!((peer.reap(), peer.keys()), (1_000, Some(0)), "{}", P::NAME);
    } else {
        (0..1_000).for_each(|n| peer.remove(&Ask::numbered(n).id));
    }
    let Met::Won(permit) = peer.claim(&Ask::numbered(7)) else { panic!("{}: ended", P::NAME) };
    peer.complete(permit, Answer::empty());
}

#[test]
fn each_peer_keeps_the_promises() {
    keeps_the_promises::<oncekey::Oncekey>(true);
    keeps_the_promises::<first::First>(true);
    keeps_the_promises::<dashmap::Dashmap>(true);
    keeps_the_promises::<sharded::Sharded>(true);
    keeps_the_promises::<papaya::Papaya>(true);
    keeps_the_promises::<scc::Scc>(true);
    keeps_the_promises::<quick_cache::QuickCache>(false);
    keeps_the_promises::<moka::Moka>(true);
}

fn shares<P: Peer>() {
    let peer = P::new(Time::Real);
    let (peer, runs) = (&peer, &AtomicU32::new(0));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let kept = peer.share(&Ask::numbered(1), || {
                    runs.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(20));
                    Answer::sized(3)
                });
                assert_eq!(kept.expect("told").body(), b"xxx");
            });
        }
    });
    assert_eq!(runs.load(Ordering::Relaxed), 1, "{}", P::NAME);
}

#[test]
fn those_who_wait_as_threads_share_one_run() {
    shares::<oncekey::Oncekey>();
    shares::<quick_cache::QuickCache>();
    shares::<moka::Moka>();
}

fn seats<P: Peer>() {
    let peer = P::new(Time::Real);
    let ask = Ask::numbered(1);
    let mut cx = Context::from_waker(Waker::noop());
    let Met::Won(permit) = peer.claim(&ask) else { panic!("new") };
    let mut seat = peer.seat(&ask).expect("in flight");
    assert!(seat.as_mut().poll(&mut cx).is_pending());
    peer.complete(permit, Answer::sized(3));
    let Poll::Ready(Some(kept)) = seat.as_mut().poll(&mut cx) else { panic!("told") };
    assert_eq!(kept.body(), b"xxx");
}

#[test]
fn those_who_wait_as_tasks_are_told() {
    seats::<oncekey::Oncekey>();
    seats::<first::First>();
}
