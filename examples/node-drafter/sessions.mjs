// Sessions: the committed ids of each text, and the one rule by which they grow.

import { crc32 } from "node:zlib";

import grpc from "@grpc/grpc-js";

import { ContractError, invalid } from "./errors.mjs";

const LEASE_S = 60;
export const MAX_LEASE_S = 600;

/** The committed ids of one session. Append-only; hashes[n] is the hash of the first n ids. */
export class Session {
  constructor(opening, kept = [], hashes = [0]) {
    this.opening = opening;
    this.endIds = new Set(opening.end_token_ids);
    this.ids = kept;
    this.hashes = hashes;
    this.newestRound = -1n;
    this.leaseS = Math.min(seconds(opening.lease) || LEASE_S, MAX_LEASE_S);
    this.usedAt = Date.now();
  }

  /** Appends where the advance extends, checks it where it overlaps. An error has changed nothing. */
  apply(advance, name) {
    const { base_length: base, token_ids: sent, prefix_hash: wanted } = advance;
    const length = this.ids.length;
    if (advance.rows.length) throw invalid(`${name}.rows`, "this drafter reads no hidden states");
    if (base + sent.length > this.opening.max_length) {
      throw invalid(`${name}.token_ids`, `end at ${base + sent.length}, max_length is ${this.opening.max_length}`);
    }
    if (base > length) throw this.gap(`the ids start at ${base}, the session holds ${length}: send from there`);
    const overlap = Math.min(base + sent.length, length) - base;
    const hashes = [this.hashes[base + overlap]];
    for (const id of sent.slice(overlap)) hashes.push(nextHash(id, hashes.at(-1)));
    const agrees = sent.slice(0, overlap).every((id, i) => id === this.ids[base + i]);
    if (!agrees || hashes.at(-1) !== wanted) {
      throw new ContractError(
        grpc.status.FAILED_PRECONDITION,
        "PREFIX_MISMATCH",
        `the first ${base + sent.length} ids differ from those of the session: open it again with Prefill`,
        { committed_length: length },
      );
    }
    for (const id of sent.slice(overlap)) this.ids.push(id);
    for (const hash of hashes.slice(1)) this.hashes.push(hash);
  }

  gap(text) {
    return new ContractError(grpc.status.OUT_OF_RANGE, "POSITION_GAP", text, { committed_length: this.ids.length });
  }
}

export const sessions = new Map();

/** CRC-32 over one more id as a little-endian uint32, continuing the hash of all ids before it. */
function nextHash(id, before) {
  const word = Buffer.alloc(4);
  word.writeUInt32LE(id);
  return crc32(word, before);
}

/** The session of a Draft or Commit, with what the call brings committed. */
export function committed(request) {
  const session = sessions.get(request.session_id);
  if (session === undefined) {
    const text = `session ${request.session_id} is not here: open it with Prefill`;
    throw new ContractError(grpc.status.NOT_FOUND, "SESSION_UNKNOWN", text);
  }
  session.usedAt = Date.now();
  const round = BigInt(request.round);
  if (round < session.newestRound) {
    const text = `round ${round} is older than round ${session.newestRound}`;
    throw new ContractError(grpc.status.ABORTED, "SUPERSEDED", text);
  }
  if (request.advance === null) throw invalid("advance", "is missing", "FIELD_REQUIRED");
  session.apply(request.advance, "advance");
  session.newestRound = round;
  return session;
}

/** Drops the sessions whose lease is over: their target is gone, or was cut off. */
export function sweep() {
  for (const [name, session] of sessions) {
    if (Date.now() - session.usedAt > session.leaseS * 1000) sessions.delete(name);
  }
}

const seconds = (duration) => (duration ? Number(duration.seconds) + duration.nanos / 1e9 : 0);
