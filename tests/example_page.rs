//! The example's page in a real browser: a button that is pressed twice, a line that is cut, a page
//! that is loaded anew. One charge, one receipt.
#![cfg(all(unix, feature = "client", feature = "axum"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "this is a test")]

#[path = "common/chromium.rs"]
mod chromium;
mod common;
#[path = "common/mischief.rs"]
mod mischief;
#[path = "common/payments.rs"]
mod payments;
#[path = "common/program.rs"]
mod program;

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::{
    chromium::Chromium,
    common::watchdog,
    mischief::{Fate, Mischief},
    payments::Payments,
};

const IS_PAID: &str = "!document.getElementById('paid').hidden";

/// A line on which the first charges have these fates, and all else passes; how many charges were asked
/// for on it so far.
async fn line(service: &Payments, fates: &'static [Fate]) -> (Mischief, Arc<AtomicUsize>) {
    let charges = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&charges);
    let line = Mischief::to(service.address, move |_, request| {
        if !request.starts_with(b"POST /charges") {
            return Fate::Pass;
        }
        let nth = count.fetch_add(1, Ordering::SeqCst);
        fates.get(nth).copied().unwrap_or(Fate::Pass)
    });
    (line.await, charges)
}

/// The id on the receipt, which must be that of the only charge so far.
async fn receipt(browser: &mut Chromium, service: &Payments, charges: u64) -> String {
    browser.until(IS_PAID).await;
    let id = browser.value("document.getElementById('receipt').textContent").await;
    let id = id.as_str().unwrap().to_owned();
    let page = browser.value("document.body.innerText + JSON.stringify(sessionStorage)").await;
    assert!(id.starts_with("ch_"), "{page}");
    assert_eq!(service.stat("executions").await, charges);
    assert_eq!(browser.value("sessionStorage.getItem('payment')").await, serde_json::Value::Null);
    id
}

#[test]
fn the_page_of_the_documentation_is_the_one_that_is_served() {
    let script = include_str!("../docs/examples/payments/pay.js");
    let page = include_str!("../docs/clients.md");
    let shown = page.split_once("```js\n").unwrap().1.split_once("\n```").unwrap().0;
    for function in shown.split("\n\n") {
        assert!(script.contains(function), "not in pay.js: {function}");
    }
}

#[tokio::test]
async fn a_button_pressed_twice_a_line_that_is_cut_and_a_reload_make_one_charge() {
    let _watchdog = watchdog();
    let Some(mut browser) = Chromium::start().await else { return };

    // Pressed twice: two requests, of which one waits for the other.
    let service = Payments::start(&[]);
    let (steady, _) = line(&service, &[]).await;
    browser.open(&format!("http://{}/?pause=1", steady.address)).await;
    browser.press("pay", 2).await;
    service.until_stat("waiters", |waiters| waiters == 1).await;
    resume(&service).await;
    let first = receipt(&mut browser, &service, 1).await;

    // What is paid stays paid over a reload, and another payment is another intent.
    browser.reload().await;
    assert_eq!(receipt(&mut browser, &service, 1).await, first);
    browser.press("again", 1).await;
    browser.press("pay", 1).await;
    service.until_stat("executions", |executions| executions == 2).await;

    // Pressed once more while the charge is made, also with another amount in the field: the same.
    let asked = browser.value("sessionStorage.getItem('payment')").await;
    browser.value("void (document.getElementById('amount').value = '5')").await;
    browser.press("pay", 1).await;
    service.until_stat("waiters", |waiters| waiters == 1).await;
    // Loaded anew in the middle: the page asks again under the same key.
    browser.reload().await;
    service.until_stat("waiters", |waiters| waiters == 2).await;
    assert_eq!(browser.value("sessionStorage.getItem('payment')").await, asked);
    resume(&service).await;
    let second = receipt(&mut browser, &service, 2).await;
    assert_ne!(second, first);
}

/// Each twice: where a connection that was used before is cut, the browser itself asks once more.
#[tokio::test]
async fn an_answer_that_is_lost_or_cut_in_its_head_or_body_is_asked_for_again() {
    let _watchdog = watchdog();
    let Some(mut browser) = Chromium::start().await else { return };
    let service = Payments::start(&[]);
    let mut receipts = Vec::new();
    for fates in [
        [Fate::Drop; 2],    // the request is lost
        [Fate::Cut(0); 2],  // the charge is made, and nothing of its answer comes back
        [Fate::Cut(30); 2], // a part of its head
        [Fate::Cut(95); 2], // a part of its body
    ] {
        let (cut, asked) = line(&service, Vec::leak(fates.into())).await;
        browser.open(&format!("http://{}/", cut.address)).await;
        browser.press("pay", 1).await;
        receipts.push(receipt(&mut browser, &service, receipts.len() as u64 + 1).await);
        assert_eq!(asked.load(Ordering::SeqCst), 3, "{fates:?}");
    }
    receipts.sort();
    receipts.dedup();
    assert_eq!(receipts.len(), 4);
}

/// All at once: pressed again in flight, loaded anew, and then the answer is cut, lost, and lost.
#[tokio::test]
async fn whatever_comes_together_one_charge_one_receipt() {
    let _watchdog = watchdog();
    let Some(mut browser) = Chromium::start().await else { return };
    let service = Payments::start(&[]);
    const FATES: &[Fate] =
        &[Fate::Pass, Fate::Pass, Fate::Cut(95), Fate::Cut(0), Fate::Cut(0), Fate::Drop];
    let (line, asked) = line(&service, FATES).await;
    browser.open(&format!("http://{}/?pause=1", line.address)).await;
    browser.press("pay", 1).await;
    service.until_stat("executions", |executions| executions == 1).await;
    browser.press("pay", 1).await;
    service.until_stat("waiters", |waiters| waiters == 1).await;
    browser.reload().await;
    service.until_stat("waiters", |waiters| waiters == 2).await;
    resume(&service).await;
    receipt(&mut browser, &service, 1).await;
    assert_eq!(asked.load(Ordering::SeqCst), 7);
}

/// Lets the charge with `pause=1` go on.
async fn resume(service: &Payments) {
    let url = format!("http://{}/resume", service.address);
    let resumed = reqwest::Client::new().post(url).send().await.unwrap();
    assert_eq!(resumed.status(), 204);
}
