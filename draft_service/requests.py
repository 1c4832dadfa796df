"""Messages of the contract to values, with every bad field named. Nothing behind this module checks again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import Message

from draft_service.calls import Round
from draft_service.history import Advance
from draft_service.sources.base import Ask, SessionSpec
from draftwire.errors import FieldViolation, InvalidRequest
from draftwire.noise import NOISE_VERSION
from draftwire.sampling import SAMPLER_VERSION, Sampler
from draftwire.v1 import common_pb2, draft_pb2
from draftwire.wire import PROTOCOL_VERSION, invalid, to_seconds

MAX_RELEASED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The first message of a Prefill."""

    session_id: str
    spec: SessionSpec
    tokenizer_fingerprint: str
    expected_instance_id: str
    lease_s: float | None


class _Faults:
    """Collects bad fields, so that a caller sees all of them at once."""

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []
        self._reasons: list[str] = []

    def unless(self, good: bool, field: str, description: str, reason: str = "OUT_OF_BOUNDS") -> None:
        """Notes the field unless it is good."""
        if not good:
            self._violations.append(FieldViolation(field, description))
            self._reasons.append(reason)

    def session_id(self, value: str) -> None:
        """A session's name."""
        reason = "FIELD_INVALID" if value else "FIELD_REQUIRED"
        self.unless(16 <= len(value) <= 128, "session_id", f"has {len(value)} characters, expected 16 to 128", reason)

    def ids(self, field: str, ids: Sequence[int], vocabulary: int) -> None:
        """Token ids below the vocabulary; 0 takes any."""
        if vocabulary and ids and max(ids) >= vocabulary:
            index = next(i for i, token_id in enumerate(ids) if token_id >= vocabulary)
            text = f"is {ids[index]}, expected less than the vocabulary's {vocabulary}"
            self.unless(False, f"{field}[{index}]", text, "TOKEN_OUT_OF_VOCAB")

    def raise_any(self) -> None:
        """Raises InvalidRequest with all that was noted."""
        if self._violations:
            text = "; ".join(f"{v.field} {v.description}" for v in self._violations[:3])
            raise InvalidRequest(text, reason=self._reasons[0], violations=self._violations)


def read_opening(message: draft_pb2.SessionOpen) -> Opening:
    """Raises InvalidRequest naming each bad field."""
    faults = _Faults()
    version = message.protocol_version
    faults.unless(
        version == PROTOCOL_VERSION,
        "protocol_version",
        f"is {version}, this drafter understands {PROTOCOL_VERSION} only",
        "FIELD_INVALID" if version else "FIELD_REQUIRED",
    )
    faults.session_id(message.session_id)
    faults.unless(message.prompt_length >= 1, "prompt_length", "is 0, expected 1 or more")
    faults.unless(
        message.max_length >= message.prompt_length,
        "max_length",
        f"is {message.max_length}, expected at least prompt_length, {message.prompt_length}",
    )
    faults.unless(len(message.cache_salt) <= 128, "cache_salt", "has more than 128 characters")
    lease_s = to_seconds(message.lease) if message.HasField("lease") else None
    faults.unless(lease_s is None or lease_s > 0, "lease", f"is {lease_s} s, expected more than 0, or nothing")
    sampler = _sampler(message.sampling, faults)
    faults.raise_any()
    return Opening(
        session_id=message.session_id,
        spec=SessionSpec(
            prompt_length=message.prompt_length,
            max_length=message.max_length,
            sampler=sampler,
            end_ids=frozenset(message.end_token_ids),
            cache_salt=message.cache_salt,
            cached=not message.cache_disabled,
        ),
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        expected_instance_id=message.expected_instance_id,
        lease_s=lease_s,
    )


def read_chunk(message: draft_pb2.Advance, vocabulary: int) -> Advance:
    """One chunk of a Prefill. Raises InvalidRequest naming each bad field."""
    faults = _Faults()
    advance = _advance("chunk", message, vocabulary, faults)
    faults.raise_any()
    return advance


def read_draft(message: draft_pb2.DraftRequest, vocabulary: int) -> Round:
    """Raises InvalidRequest naming each bad field."""
    faults = _Faults()
    faults.session_id(message.session_id)
    advance = _advance("advance", message.advance, vocabulary, faults)
    faults.ids("assumed_token_ids", message.assumed_token_ids, vocabulary)
    faults.unless(message.max_draft_tokens >= 1, "max_draft_tokens", "is 0, expected 1 or more; Commit drafts nothing")
    budget_s = to_seconds(message.time_budget) if message.HasField("time_budget") else None
    faults.unless(budget_s is None or budget_s >= 0, "time_budget", f"is {budget_s} s, expected 0 or more")
    _present(message, "advance", faults)
    faults.raise_any()
    ask = Ask(
        assumed=tuple(message.assumed_token_ids),
        limit=message.max_draft_tokens,
        want_confidences=message.want_confidences,
    )
    return Round(session_id=message.session_id, number=message.round, advance=advance, ask=ask, time_budget_s=budget_s)


def read_commit(message: draft_pb2.CommitRequest, vocabulary: int) -> Round:
    """Raises InvalidRequest naming each bad field."""
    faults = _Faults()
    faults.session_id(message.session_id)
    advance = _advance("advance", message.advance, vocabulary, faults)
    _present(message, "advance", faults)
    faults.raise_any()
    return Round(session_id=message.session_id, number=message.round, advance=advance, ask=None)


def read_release(message: draft_pb2.ReleaseRequest) -> tuple[str, ...]:
    """Raises InvalidRequest for too many names."""
    if len(message.session_ids) > MAX_RELEASED:
        raise invalid("session_ids", f"has {len(message.session_ids)} names, at most {MAX_RELEASED} fit in one call")
    return tuple(message.session_ids)


def read_describe(message: draft_pb2.DescribeRequest) -> None:
    """Raises InvalidRequest for an overlong name."""
    if len(message.target_instance_id) > 128:
        raise invalid("target_instance_id", "has more than 128 characters", reason="OUT_OF_BOUNDS")


def _present(message: Message, field: str, faults: _Faults) -> None:
    faults.unless(
        message.HasField(field), field, "is missing; an empty one still carries prefix_hash", "FIELD_REQUIRED"
    )


def _advance(field: str, message: draft_pb2.Advance, vocabulary: int, faults: _Faults) -> Advance:
    faults.ids(f"{field}.token_ids", message.token_ids, vocabulary)
    faults.unless(
        not message.rows, f"{field}.rows", "this drafter reads no hidden states: Describe has no taps", "FIELD_INVALID"
    )
    return Advance(base_length=message.base_length, ids=tuple(message.token_ids), prefix_hash=message.prefix_hash)


def _sampler(message: common_pb2.NoiseSampling, faults: _Faults) -> Sampler:
    """Greedy where the target is, and where it draws in a way that is unknown here."""
    temperature = message.temperature
    known = message.noise_version == NOISE_VERSION and message.sampler_version == SAMPLER_VERSION
    faults.unless(0 <= temperature <= 100, "sampling.temperature", f"is {temperature}, expected 0 to 100")
    if temperature == 0 or not known:
        return Sampler()
    faults.unless(0 < message.top_p <= 1, "sampling.top_p", f"is {message.top_p}, expected (0, 1]; 1 keeps everything")
    faults.unless(0 <= message.min_p <= 1, "sampling.min_p", f"is {message.min_p}, expected [0, 1]")
    return Sampler(
        temperature=temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
    )
