//! How many retries memory answers, and what the tier is asked, with many nodes: a simulation.
//!
//! Every key is claimed on one node, completed, and with some probability sent again, mostly soon and
//! seldom late. A node's memory is a queue: the oldest leaves when it is full, as in the store. A retry
//! that finds nothing in its node's memory asks the tier, and is in memory from then on.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashSet, VecDeque},
};

/// Who gets a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Routing {
    /// Any node, as behind most load balancers.
    Any,
    /// The node of the account's hash.
    Account,
    /// The same, and half-way one node is gone, its accounts going to the others.
    AccountAndADeath,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Simulation {
    pub(crate) nodes: u64,
    pub(crate) routing: Routing,
    /// New keys a second, for all nodes.
    pub(crate) rate: f64,
    /// Keys that the memory of one node holds.
    pub(crate) memory: usize,
    /// The share of keys that are sent again.
    pub(crate) retried: f64,
    /// How many keys are simulated.
    pub(crate) keys: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// The share of retries that memory answered.
    pub(crate) hits: f64,
    /// Steps of the tier for each new key.
    pub(crate) steps: f64,
}

impl Simulation {
    pub(crate) fn run(&self) -> Seen {
        let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
        let mut nodes: Vec<Memory> = (0..self.nodes).map(|_| Memory::default()).collect();
        let mut retries = BinaryHeap::new();
        let (mut sent, mut asked, mut hits) = (0_u64, 0_u64, 0_u64);
        for key in 0..self.keys {
            let now = key as f64 / self.rate;
            let is_late = self.routing == Routing::AccountAndADeath && key > self.keys / 2;
            while retries.peek().is_some_and(|Reverse((at, _))| *at <= (now * 1e6) as u64) {
                let Some(Reverse((_, key))) = retries.pop() else { break };
                sent += 1;
                let node = self.node(key, is_late, &mut dice);
                if nodes[node].keys.contains(&key) {
                    hits += 1;
                } else {
                    asked += 1;
                    nodes[node].keep(key, self.memory);
                }
            }
            let node = self.node(key, is_late, &mut dice);
            nodes[node].keep(key, self.memory);
            asked += 2;
            if dice.unit() < self.retried {
                retries.push(Reverse((((now + dice.delay()) * 1e6) as u64, key)));
            }
        }
        Seen { hits: hits as f64 / sent.max(1) as f64, steps: asked as f64 / self.keys as f64 }
    }

    /// Each key stands for an account of its own.
    fn node(&self, key: u64, is_late: bool, dice: &mut Dice) -> usize {
        let of_account =
            |nodes: u64| Dice(key.wrapping_mul(0x2545_f491_4f6c_dd1d) | 1).next() % nodes;
        let node = match self.routing {
            Routing::Any => dice.next() % self.nodes,
            _ => of_account(self.nodes),
        };
        // The last node is the one that dies; only its accounts move.
        match is_late && self.nodes > 1 && node == self.nodes - 1 {
            true => of_account(self.nodes * 7) as usize % (self.nodes as usize - 1),
            false => node as usize,
        }
    }
}

#[derive(Default)]
struct Memory {
    keys: HashSet<u64>,
    order: VecDeque<u64>,
}

impl Memory {
    fn keep(&mut self, key: u64, most: usize) {
        if self.order.len() == most
            && let Some(oldest) = self.order.pop_front()
        {
            self.keys.remove(&oldest);
        }
        self.keys.insert(key);
        self.order.push_back(key);
    }
}

/// splitmix64: the same numbers in each run.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Seconds until a retry: 7 of 10 by a client library, 2 by a queue or a person, 1 late.
    fn delay(&mut self) -> f64 {
        let mean = match self.next() % 10 {
            0..7 => 2.0,
            7..9 => 120.0,
            _ => 3_600.0,
        };
        -mean * (1.0 - self.unit()).ln()
    }
}
