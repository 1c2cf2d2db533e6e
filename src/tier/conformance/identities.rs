//! Rule 1: identities are equal byte for byte.

use super::probe::{HOUR, Node, Probe, Verdict, outcome};
use crate::tier::State;

pub(super) async fn every_byte_of_an_identity_counts(p: Probe<'_>) -> Verdict {
    let parts: [(&[u8], &[u8], &str); 32] = [
        (b"a:b", b"c", "k"),
        (b"a", b"b:c", "k"),
        (b"a", b":bc", "k"),
        (b"ab", b"c", "k"),
        (b"a", b"bc", "k"),
        (b"a", b"b", "ck"),
        (b"", b"abc", "k"),
        (b"abc", b"", "k"),
        (b"", b"", "k"),
        (b"A", b"bc", "k"),
        (b"a", b"BC", "k"),
        (b"a", b"bc", "K"),
        (b"a ", b"bc", "k"),
        (b" a", b"bc", "k"),
        (b"a", b"bc ", "k"),
        (b"a", b"bc", "k "),
        (b"a", b"bc", " k"),
        (b"a\0", b"bc", "k"),
        (b"a", b"\0bc", "k"),
        (b"a", b"bc\0", "k"),
        (b"a\0b", b"c", "k"),
        (b"\0", b"\0", "k"),
        // No UTF-8, and two ways to write one letter.
        (b"\xff", b"\xfe\x80", "k"),
        (b"\xfe", b"\xfe\x80", "k"),
        (b"\xff", b"\xfe\x81", "k"),
        (b"\xff\xff", b"", "k"),
        ("\u{e9}".as_bytes(), b"", "k"),
        ("e\u{301}".as_bytes(), b"", "k"),
        // What patterns, quotes and placeholders are made of.
        (b"%", b"_", "*"),
        (b"a", b"bc", "'\"\\{}$1?"),
        (b"a", b"'; --", "k"),
        (b"\r\n", b"\t", "k"),
    ];
    // Each on another node, and all of them before one is looked at.
    let owner = p.owner().await?;
    let mut claimed = Vec::new();
    for (number, (account, endpoint, key)) in parts.into_iter().enumerate() {
        let id = p.bare_id(account, endpoint, key)?;
        p.node(number).won_by(&id, &owner).await.map(|token| claimed.push((id, token)))?;
    }
    for (number, (id, token)) in claimed.iter().enumerate() {
        let node = p.node(number + 1);
        let found = node.sees(id, &State::InFlight).await?;
        node.at.ensure(found.token == *token, || {
            format!("an identity has the record of another: {found:?} for {token}")
        })?;
        let body = outcome(&number.to_string());
        node.done("complete", node.complete(id, *token, Some(&body), HOUR).await?)?;
    }
    for (number, (id, _)) in claimed.iter().enumerate() {
        p.node(number).replays(id, &outcome(&number.to_string())).await?;
    }
    Ok(())
}

pub(super) async fn the_longest_identities_have_room(p: Probe<'_>) -> Verdict {
    let owner = p.owner().await?;
    let (account, endpoint, key) =
        (255 - p.account().len(), 512 - p.at.check.len(), "k".repeat(255));
    // They differ in the last byte alone, of each part in turn, with bytes that no text has.
    let of = |part: usize, last: u8| {
        let mut parts = [vec![0xff; account], vec![0; endpoint], key.clone().into_bytes()];
        if let Some(byte) = parts[part].last_mut() {
            *byte = last;
        }
        let [account, endpoint, key] = parts;
        p.id_of(account, endpoint, &String::from_utf8_lossy(&key))
    };
    let node: Node = p.node(0);
    for part in 0..3 {
        for last in [b'x', b'y'] {
            let id = of(part, last)?;
            let token = node.won_by(&id, &owner).await?;
            let found = p.node(1).sees(&id, &State::InFlight).await?;
            node.at.ensure(found.token == token, || {
                format!("a long identity has the record of another: {found:?} for {token}")
            })?;
        }
    }
    Ok(())
}
