//! What is asked of every peer: identities, fingerprints and answers, made from a number.
//!
//! An identity is 48 bytes in one piece: account (8), endpoint (4) and a key of 36 characters, a
//! UUID's form. The peers keep it inline and hash it with one call, which is a favour to them:
//! oncekey takes parts of any length, checks the key's characters and frames the parts.

use std::hash::{Hash, Hasher};

use bytes::Bytes;

const ACCOUNT: usize = 8;
const ENDPOINT: usize = 12;
const ID: usize = 48;

/// A whole identity. Equal byte for byte or not at all.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id([u8; ID]);

impl Id {
    pub(crate) fn account(&self) -> &[u8] {
        &self.0[..ACCOUNT]
    }

    pub(crate) fn endpoint(&self) -> &[u8] {
        &self.0[ACCOUNT..ENDPOINT]
    }

    pub(crate) fn key(&self) -> &[u8] {
        &self.0[ENDPOINT..]
    }
}

impl Hash for Id {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write(&self.0);
    }
}

/// The bytes of a SHA-256, though made more cheaply: hashing bodies is not compared here.
pub(crate) type Print = [u8; 32];

/// One request: who asks for what.
#[derive(Clone)]
pub(crate) struct Ask {
    pub(crate) id: Id,
    pub(crate) print: Print,
}

impl Ask {
    /// The request of this number: another number, another identity and fingerprint.
    pub(crate) fn numbered(n: u64) -> Self {
        let (high, low) = (mix(n), mix(!n));
        let mut id = [b'-'; ID];
        id[..ACCOUNT].copy_from_slice(&(high % 1_000).to_be_bytes());
        id[ACCOUNT..ENDPOINT].copy_from_slice(&(low as u32 % 16).to_be_bytes());
        let (high, low) = (high.to_be_bytes(), low.to_be_bytes());
        let key = &mut id[ENDPOINT..];
        hex(&mut key[0..8], &high[0..4]);
        hex(&mut key[9..13], &high[4..6]);
        hex(&mut key[14..18], &high[6..8]);
        hex(&mut key[19..23], &low[0..2]);
        hex(&mut key[24..36], &low[2..8]);
        let mut print = [0; 32];
        for (piece, salt) in print.chunks_exact_mut(8).zip(1..) {
            piece.copy_from_slice(&mix(n ^ (salt << 56)).to_be_bytes());
        }
        Self { id: Id(id), print }
    }
}

fn hex(out: &mut [u8], bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (pair, byte) in out.chunks_exact_mut(2).zip(bytes) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
}

/// Scatters numbers: a bijection of 64 bits (the finalizer of splitmix64).
pub(crate) fn mix(n: u64) -> u64 {
    let n = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// What is kept of finished work: what oncekey keeps, without header lines.
#[derive(Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Bytes,
}

impl Answer {
    /// A status and no body, as of a `201 Created`.
    pub(crate) fn empty() -> Self {
        Self { status: 201, body: Bytes::new() }
    }

    /// A body of its own of `len` bytes.
    pub(crate) fn sized(len: usize) -> Self {
        Self { status: 200, body: Bytes::from(vec![b'x'; len]) }
    }
}

/// A kept answer that is handed back.
pub(crate) trait Kept {
    fn status(&self) -> u16;
    fn body(&self) -> &[u8];
}

impl Kept for Answer {
    fn status(&self) -> u16 {
        self.status
    }

    fn body(&self) -> &[u8] {
        &self.body
    }
}

impl Kept for oncekey::Outcome {
    fn status(&self) -> u16 {
        self.status()
    }

    fn body(&self) -> &[u8] {
        self.bytes()
    }
}

/// Reads an answer as somebody who sends it would, a byte of each cache line at least.
pub(crate) fn read(kept: &impl Kept) -> u64 {
    let lines = kept.body().iter().step_by(64).map(|byte| u64::from(*byte)).sum::<u64>();
    lines + u64::from(kept.status())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_make_identities_of_the_promised_form() {
        let one = Ask::numbered(1);
        assert_eq!(one.id.account().len(), 8);
        assert_eq!(one.id.endpoint().len(), 4);
        let key = std::str::from_utf8(one.id.key()).unwrap();
        assert_eq!(key.len(), 36);
        assert_eq!(key.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
        assert!(one.id != Ask::numbered(2).id && one.print != Ask::numbered(2).print);
        assert!(one.id == Ask::numbered(1).id && one.print == Ask::numbered(1).print);
    }
}
