// Errors of the contract: gRPC statuses whose google.rpc details tell programs what happened.

import grpc from "@grpc/grpc-js";

/** A gRPC status with google.rpc.ErrorInfo. Programs read `reason`, people read the text. */
export class ContractError extends Error {
  constructor(code, reason, message, metadata = {}, more = []) {
    super(message);
    this.code = code;
    this.details = message;
    this.metadata = new grpc.Metadata();
    const info = [text(1, reason), text(2, "draftwire.v1")];
    for (const [key, value] of Object.entries(metadata)) {
      info.push(field(3, Buffer.concat([text(1, key), text(2, String(value))])));
    }
    const details = [packed("google.rpc.ErrorInfo", Buffer.concat(info)), ...more];
    const status = Buffer.concat([Buffer.from([0x08, code]), text(2, message), ...details.map((any) => field(3, any))]);
    this.metadata.set("grpc-status-details-bin", status);
  }
}

// protobuf by hand, for the few messages of google.rpc that an error carries: length-delimited fields are all it takes.
const varint = (n) => Buffer.from(n < 128 ? [n] : [(n & 127) | 128, ...varint(n >>> 7)]);
const field = (number, bytes) => Buffer.concat([varint((number << 3) | 2), varint(bytes.length), bytes]);
const text = (number, text) => field(number, Buffer.from(text));
const packed = (name, bytes) => Buffer.concat([text(1, `type.googleapis.com/${name}`), field(2, bytes)]);

/** INVALID_ARGUMENT that names the field. */
export function invalid(name, description, reason = "FIELD_INVALID") {
  const violation = Buffer.concat([text(1, name), text(2, description)]);
  const detail = packed("google.rpc.BadRequest", field(1, violation));
  return new ContractError(grpc.status.INVALID_ARGUMENT, reason, `${name}: ${description}`, {}, [detail]);
}

/** RESOURCE_EXHAUSTED that says when to come back; seconds below 128. */
export function full(reason, message, retryAfterS) {
  const delay = Buffer.from([0x08, retryAfterS]); // Duration.seconds
  const detail = packed("google.rpc.RetryInfo", field(1, delay));
  return new ContractError(grpc.status.RESOURCE_EXHAUSTED, reason, message, {}, [detail]);
}
