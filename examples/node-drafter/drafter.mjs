// A draft service for draftwire in JavaScript: all that the contract asks of a drafter, with prompt lookup behind it.
// docs/protocol.md has the reasons.
//
//   node drafter.mjs [--host 127.0.0.1] [--port 50052] [--protos ../../protos]

import { randomUUID } from "node:crypto";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { HealthImplementation } from "grpc-health-check";

import { ContractError, full, invalid } from "./errors.mjs";
import { guess } from "./lookup.mjs";
import { MAX_LEASE_S, Session, committed, sessions, sweep } from "./sessions.mjs";

const PROTOCOL_VERSION = 1;
const SERVICE = "draftwire.v1.DraftService";
const MAX_DRAFT_TOKENS = 16;
const SESSION_LIMIT = 256;
const MAX_MESSAGE_BYTES = 8 * 1024 * 1024;
const INSTANCE_ID = randomUUID(); // new at each start: a target sees that its sessions are gone

// The five calls -----------------------------------------------------------------------------------------------------

function describe() {
  return {
    instance_id: INSTANCE_ID,
    software_version: `node-drafter 0.1.0, node ${process.versions.node}`,
    min_protocol_version: PROTOCOL_VERSION,
    max_protocol_version: PROTOCOL_VERSION,
    source_kind: "lookup-js",
    tokenizer_fingerprint: "", // ids are only compared: any vocabulary fits
    max_draft_tokens: MAX_DRAFT_TOKENS,
    max_message_bytes: MAX_MESSAGE_BYTES,
    max_lease: { seconds: MAX_LEASE_S },
    load: load(),
  };
}

/** Reads the whole stream before anything changes: one that breaks off leaves the old session as it was. */
function prefill(call, callback) {
  let session;
  let held;
  let failed = false;
  const fail = (error) => {
    if (!failed) callback(asStatus(error));
    failed = true;
  };
  call.on("error", () => {}); // the caller went away; nothing was changed
  call.on("data", (message) => {
    if (failed) return;
    try {
      if ((message.part === "open") !== (session === undefined)) throw invalid("part", "open first, once, then chunks");
      if (session === undefined) {
        session = opened(message.open);
        return;
      }
      if (held === undefined) {
        // Ids before the first chunk are those that the session holds already.
        held = Math.min(message.chunk.base_length, sessions.get(session.opening.session_id)?.ids.length ?? 0);
        const old = sessions.get(session.opening.session_id);
        if (held > 0) session = new Session(session.opening, old.ids.slice(0, held), old.hashes.slice(0, held + 1));
      }
      session.apply(message.chunk, "chunk");
    } catch (error) {
      fail(error);
    }
  });
  call.on("end", () => {
    if (failed || call.cancelled) return;
    if (session === undefined) {
      fail(invalid("part", "the stream was empty", "FIELD_REQUIRED"));
      return;
    }
    const name = session.opening.session_id;
    if (!sessions.has(name) && sessions.size >= SESSION_LIMIT) {
      fail(full("SESSION_LIMIT", `all ${SESSION_LIMIT} sessions are in use`, 1));
      return;
    }
    sessions.set(name, session);
    const lease = { seconds: Math.floor(session.leaseS) };
    const reply = { instance_id: INSTANCE_ID, committed_length: session.ids.length, reused_length: held ?? 0, lease };
    callback(null, { ...reply, load: load() });
  });
}

function opened(opening) {
  const { session_id: name, expected_instance_id: expected } = opening;
  if (opening.protocol_version !== PROTOCOL_VERSION) {
    throw invalid("protocol_version", `is ${opening.protocol_version}, this drafter understands ${PROTOCOL_VERSION}`);
  }
  if (name.length < 16 || name.length > 128) throw invalid("session_id", "needs 16 to 128 characters");
  if (opening.prompt_length < 1) throw invalid("prompt_length", "needs 1 or more", "OUT_OF_BOUNDS");
  if (opening.max_length < opening.prompt_length) throw invalid("max_length", "is below prompt_length", "OUT_OF_BOUNDS");
  if (expected && expected !== INSTANCE_ID) {
    const text = `this is drafter ${INSTANCE_ID}, not ${expected}: call Describe again`;
    throw new ContractError(grpc.status.FAILED_PRECONDITION, "INSTANCE_MISMATCH", text, { instance_id: INSTANCE_ID });
  }
  return new Session(opening);
}

function draft(request) {
  const began = performance.now();
  if (request.max_draft_tokens < 1) throw invalid("max_draft_tokens", "needs 1 or more", "OUT_OF_BOUNDS");
  const session = committed(request);
  const missing = session.opening.prompt_length - session.ids.length;
  if (missing > 0) throw session.gap(`${missing} prompt tokens are missing: send them first`);
  const most = Math.min(request.max_draft_tokens, MAX_DRAFT_TOKENS);
  // A function of the committed ids and the question alone, so a retry of a round gets the same answer.
  const { ids, end } = guess(session, request.assumed_token_ids, most);
  return {
    instance_id: INSTANCE_ID,
    round: request.round,
    committed_length: session.ids.length,
    first_position: session.ids.length + request.assumed_token_ids.length,
    token_ids: ids,
    end,
    timings: { computed: { nanos: Math.round((performance.now() - began) * 1e6) } },
    load: load(),
  };
}

function commit(request) {
  const session = committed(request);
  const lease = { seconds: Math.floor(session.leaseS) };
  return { instance_id: INSTANCE_ID, committed_length: session.ids.length, lease };
}

function release(request) {
  if (request.session_ids.length > 1024) throw invalid("session_ids", "takes at most 1024 names");
  for (const name of request.session_ids) sessions.delete(name);
  return {};
}

// The process --------------------------------------------------------------------------------------------------------

const load = () => ({ sessions: sessions.size, session_limit: SESSION_LIMIT });

function asStatus(error) {
  if (error instanceof ContractError) return error;
  console.error(error); // the text of a fault is for the log, not for the caller
  return new ContractError(grpc.status.INTERNAL, "INTERNAL", "internal error");
}

const unary = (answer) => (call, callback) => {
  try {
    callback(null, answer(call.request));
  } catch (error) {
    callback(asStatus(error));
  }
};

function main() {
  const { values } = parseArgs({
    options: {
      host: { type: "string", default: "127.0.0.1" },
      port: { type: "string", default: "50052" },
      protos: { type: "string", default: fileURLToPath(new URL("../../protos", import.meta.url)) },
    },
  });
  // uint64 as text: a round does not fit a JavaScript number.
  const options = { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true };
  const loaded = protoLoader.loadSync("draftwire/v1/draft.proto", { ...options, includeDirs: [values.protos] });
  const server = new grpc.Server({
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
  });
  const health = new HealthImplementation({ "": "SERVING", [SERVICE]: "SERVING" });
  health.addToServer(server);
  server.addService(grpc.loadPackageDefinition(loaded).draftwire.v1.DraftService.service, {
    Describe: unary(describe),
    Prefill: prefill,
    Draft: unary(draft),
    Commit: unary(commit),
    Release: unary(release),
  });
  server.bindAsync(`${values.host}:${values.port}`, grpc.ServerCredentials.createInsecure(), (error, port) => {
    if (error) {
      console.error(`cannot listen on ${values.host}:${values.port}: ${error.message}`);
      process.exit(1);
    }
    console.log(`listening on ${values.host}:${port}`);
  });
  setInterval(sweep, 1000).unref();
  const stop = () => {
    for (const name of ["", SERVICE]) health.setStatus(name, "NOT_SERVING");
    setTimeout(() => process.exit(0), 2000).unref(); // an open health Watch never ends by itself
    server.tryShutdown(() => process.exit(0));
  };
  process.on("SIGTERM", stop);
  process.on("SIGINT", stop);
}

main();
