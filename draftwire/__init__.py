"""draftwire: speculative decoding over gRPC whose drafter is another process.

This is the client library. Importing it costs nothing: a name is loaded at its first use, and none of them needs mlx.

    from draftwire import Client

    with Client("127.0.0.1:50051") as client:
        print(client.complete("Once upon a time", max_tokens=32).text)
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftwire.aio_client import AsyncClient, AsyncGenerateStream
    from draftwire.channels import TLS
    from draftwire.client import Client, GenerateStream
    from draftwire.errors import (
        AlreadyExists,
        Cancelled,
        DeadlineExceeded,
        DraftwireError,
        FailedPrecondition,
        FieldViolation,
        IncompleteStream,
        InternalError,
        InvalidRequest,
        NotFound,
        Overloaded,
        PermissionDenied,
        Unauthenticated,
        Unavailable,
        UnfinishedOutput,
        Unsupported,
    )
    from draftwire.events import (
        Activity,
        Chunk,
        Completion,
        Drafter,
        DrafterState,
        Event,
        Finished,
        FinishReason,
        Health,
        ModelInfo,
        NoDraftReason,
        RequestInfo,
        RequestState,
        Sampling,
        ServiceTotals,
        SpeculationStats,
        Started,
        Timings,
        Token,
        TopLogprob,
        Usage,
    )
    from draftwire.request import GenerateOptions, TokenizeOptions

_HOMES = {
    "client": ("Client", "GenerateStream"),
    "aio_client": ("AsyncClient", "AsyncGenerateStream"),
    "channels": ("TLS",),
    "request": ("GenerateOptions", "TokenizeOptions"),
    "errors": (
        *("AlreadyExists", "Cancelled", "DeadlineExceeded", "DraftwireError", "FailedPrecondition", "FieldViolation"),
        *("IncompleteStream", "InternalError", "InvalidRequest", "NotFound", "Overloaded", "PermissionDenied"),
        *("Unauthenticated", "Unavailable", "UnfinishedOutput", "Unsupported"),
    ),
    "events": (
        *("Activity", "Chunk", "Completion", "Drafter", "DrafterState", "Event", "Finished", "FinishReason", "Health"),
        *("ModelInfo", "NoDraftReason", "RequestInfo", "RequestState", "Sampling", "ServiceTotals", "SpeculationStats"),
        *("Started", "Timings", "Token", "TopLogprob", "Usage"),
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "TLS",
    "Activity",
    "AlreadyExists",
    "AsyncClient",
    "AsyncGenerateStream",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Drafter",
    "DrafterState",
    "DraftwireError",
    "Event",
    "FailedPrecondition",
    "FieldViolation",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "GenerateStream",
    "Health",
    "IncompleteStream",
    "InternalError",
    "InvalidRequest",
    "ModelInfo",
    "NoDraftReason",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "RequestInfo",
    "RequestState",
    "Sampling",
    "ServiceTotals",
    "SpeculationStats",
    "Started",
    "Timings",
    "Token",
    "TokenizeOptions",
    "TopLogprob",
    "Unauthenticated",
    "Unavailable",
    "UnfinishedOutput",
    "Unsupported",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name in _HOME_OF:
        return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    try:
        return version("draftwire")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0+unknown"


if TYPE_CHECKING:
    __version__: str
