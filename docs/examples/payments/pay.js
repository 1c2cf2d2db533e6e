// One intent, one key: made when somebody means to pay, and kept, with what is to be sent, until
// the answer has come. So a second press, a cut connection and a reload ask for the same charge.

const KEPT = "payment"; // in sessionStorage: of this tab, over reloads

/** The payment that is under way, or a new one. */
function payment() {
  const kept = sessionStorage.getItem(KEPT);
  if (kept !== null) return JSON.parse(kept);
  const made = { key: crypto.randomUUID(), body: JSON.stringify(order()) };
  sessionStorage.setItem(KEPT, JSON.stringify(made));
  return made;
}

/** Asks until there is an answer, each time with the same key and the same bytes. */
async function pay() {
  const { key, body } = payment();
  for (let wait = 100; ; wait = Math.min(2 * wait, 5000)) {
    const answer = await ask(key, body).catch(() => null); // no answer
    if (answer !== null && !isPassing(answer)) return settle(key, answer);
    say("No answer yet. Asking again: you will not be charged twice.");
    await new Promise((resolve) => setTimeout(resolve, Math.random() * wait));
  }
}

async function ask(key, body) {
  const response = await fetch("/charges" + location.search, {
    method: "POST",
    headers: { "Idempotency-Key": `"${key}"`, Authorization: "Bearer visitor" },
    body,
    signal: AbortSignal.timeout(20_000),
  });
  const text = await response.text();
  if (response.ok) JSON.parse(text); // Chromium takes a head that was cut off for a whole one: no JSON
  return { status: response.status, text, replayed: response.headers.has("Idempotent-Replayed") };
}

/** Whether the same request may get another answer. */
function isPassing({ status, text, replayed }) {
  if (replayed) return false; // kept: it will be the same as long as the key lives
  if (status === 409) return /"type":"[^"]*#in-flight"/.test(text);
  return [408, 425, 429, 500, 502, 503, 504].includes(status);
}

/** The answer has come: only now is the key given up. What was pressed twice gets it twice. */
function settle(key, { status, text }) {
  const kept = sessionStorage.getItem(KEPT);
  if (kept === null || JSON.parse(kept).key !== key) return;
  if (status === 201) sessionStorage.setItem("receipt", text);
  sessionStorage.removeItem(KEPT);
  show(status === 201 ? "" : `Not paid: ${status} ${text}`);
}

// The page itself.

const find = (id) => document.getElementById(id);
const cents = () => Number(find("amount").value);
const order = () => ({ amount_cents: cents(), currency: "usd", source: "pm_card" });
const say = (text) => { find("status").textContent = text; };

function show(text) {
  const receipt = sessionStorage.getItem("receipt");
  find("form").hidden = receipt !== null; // whoever presses now presses nothing
  find("paid").hidden = receipt === null;
  find("receipt").textContent = receipt === null ? "" : JSON.parse(receipt).id;
  say(text);
}

find("pay").addEventListener("click", () => { say("Paying .."); pay(); });
find("again").addEventListener("click", () => { sessionStorage.removeItem("receipt"); show(""); });
show("");
if (sessionStorage.getItem(KEPT) !== null) pay(); // loaded anew before the answer had come
