// The values of tests/vectors.json, made by another language: node tests/vectors.mjs [FILE]
// What stands above the second blank line is all that another client needs.
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

const sha256 = (chunks) => createHash("sha256").update(Buffer.concat(chunks)).digest();
const length = (part) => Buffer.from(part.length.toString(16).padStart(16, "0"), "hex");
const fingerprint = (scheme, parts) => sha256(
  [sha256([Buffer.from(scheme)]).subarray(0, 8), ...parts.flatMap((part) => [length(part), part])]);
const plain = (text) => !/[^!-~]|["\\,:/~]/.test(text);
function key(scheme, from, list) { // from: what stands before the list in the hash
  const texts = list.map((part) => part.toString("latin1")), name = texts[0];
  const begun = scheme === "key-downstream-1" ? from[0].toString("latin1") + "/" : "";
  const readable = scheme !== "key-identity-1" && !/[^!-~]|["\\,]/.test(begun)
    && texts.every(plain);
  const text = begun + texts.join(":");
  if (readable && text.length > 0 && text.length <= 255) return text;
  const shown = plain(name) && name.length <= 190 ? name : "";
  return `${shown}~${fingerprint(scheme, [...from, ...list]).toString("hex")}`;
}

const { fingerprints, keys } = JSON.parse(readFileSync(process.argv[2] ?? "tests/vectors.json"));
const bytes = (part) => typeof part === "string" ? Buffer.from(part)
  : "hex" in part ? Buffer.from(part.hex, "hex")
  : Buffer.from(part.repeat[0].repeat(part.repeat[1]));
const check = (known, made) => { if (known !== made) throw new Error(`${made}, not ${known}`); };
for (const { scheme, parts, digest } of fingerprints)
  check(digest, fingerprint(scheme, parts.map(bytes)).toString("hex"));
for (const v of keys) check(v.key, key(v.scheme, v.from.map(bytes), v.parts.map(bytes)));
console.log(`as they are: ${fingerprints.length} fingerprints, ${keys.length} keys`);
