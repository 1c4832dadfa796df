"""`python -m target_service.grammar_worker`: the compiler's process. Reads constraints, answers with compiled grammars.

A process, because a compile can take any time and any memory, and only a process can be ended in the middle. Frames on standard
input and output: four bytes of length, big-endian, then as many bytes. The first frame in is the vocabulary, the first
one out says that it is ready; then each frame in is a job in JSON and each frame out its answer: "+" and the grammar, or
"-" and why not. The end of the input ends it, and so does an alarm, if a job outlives its time with nobody there to end it.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from contextlib import suppress
from typing import IO, Any

from target_service.grammar_rules import Refused


def main() -> None:
    """Serves standard input until its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    # Whatever a library prints must not get between the frames.
    os.dup2(2, 1)
    first = read_frame(sys.stdin.buffer)
    if first is None:
        return
    try:
        from target_service.grammar_compile import Compiler, tokenizer_info

        pieces, width, end_ids = unpack_vocabulary(first)
        compiler = Compiler(tokenizer_info(pieces, width, end_ids))
    except Exception as error:
        write_frame(answers, b"-" + str(error).encode())
        return
    write_frame(answers, b"+")
    while (job := read_frame(sys.stdin.buffer)) is not None:
        write_frame(answers, _answer(compiler, json.loads(job)))


def _answer(compiler: Any, job: dict[str, Any]) -> bytes:
    _bound_memory(job["most_bytes"])
    signal.setitimer(signal.ITIMER_REAL, job["timeout_s"] + 1.0)
    try:
        grammar: str = compiler.compile(job["kind"], job["text"], job["values"], job["any_whitespace"])
    except Refused as refusal:
        return b"-" + str(refusal).encode()
    except MemoryError:
        return b"-needs more memory to compile than there is for it"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return b"+" + grammar.encode()


def _bound_memory(more_bytes: int) -> None:
    """Lets the process grow by so much from where it is; where the system cannot, the time limit must do."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def pack_vocabulary(pieces: list[bytes], width: int, end_ids: list[int]) -> bytes:
    """The first frame: a line of JSON with width, end ids and the pieces' lengths, then the pieces."""
    head = {"width": width, "end_ids": end_ids, "lengths": [len(piece) for piece in pieces]}
    return json.dumps(head).encode() + b"\n" + b"".join(pieces)


def unpack_vocabulary(frame: bytes) -> tuple[list[bytes], int, list[int]]:
    """What `pack_vocabulary` packed."""
    line, _, joined = frame.partition(b"\n")
    head = json.loads(line)
    pieces, at = [], 0
    for length in head["lengths"]:
        pieces.append(joined[at : at + length])
        at += length
    return pieces, head["width"], head["end_ids"]


def write_frame(file: IO[bytes], payload: bytes) -> None:
    """Writes one frame."""
    file.write(struct.pack(">I", len(payload)) + payload)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """The next frame; None at the end of the input."""
    head = file.read(4)
    return file.read(struct.unpack(">I", head)[0]) if len(head) == 4 else None


if __name__ == "__main__":
    main()
