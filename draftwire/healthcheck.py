"""`python -m target_service healthcheck` and the same of the draft service: asks a running service how it is.

For container health checks and probes that run a command. Reads what the service itself reads from the environment
(DRAFTWIRE_HOST, DRAFTWIRE_PORT, DRAFTWIRE_TLS_CERT, DRAFTWIRE_TLS_KEY, DRAFTWIRE_TLS_CA), so that inside its container it needs
no flags. Health asks for no token. Light on purpose: it runs every few seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwire.channels import TLS, Endpoint
from draftwire.errors import DraftwireError
from draftwire.wire import from_rpc_error

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main(argv: Sequence[str], *, program: str, port: int, environ: Mapping[str, str] | None = None) -> int:
    """Exit status: 0 SERVING, 1 anything else, with the reason on stderr. argparse exits with 2 for bad usage.

    port: where the service listens unless the environment says otherwise.
    """
    env = os.environ if environ is None else environ
    asked = _parser(program, port, env).parse_args(argv)
    try:
        tls = None
        if asked.tls_cert or asked.tls_ca:
            tls = _tls(asked)
        status = _status(Endpoint(address=asked.address, tls=tls), asked.service, asked.timeout_s)
    except DraftwireError as error:
        print(f"{asked.address}: {error.message}", file=sys.stderr)
        return 1
    serving = status == health_pb2.HealthCheckResponse.SERVING
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    print(f"{asked.address}: {name}", file=sys.stdout if serving else sys.stderr)
    return 0 if serving else 1


def _tls(asked: argparse.Namespace) -> TLS:
    """Trusts the service's own certificate beside the authorities, which are those of its clients, and shows it too."""
    authorities = TLS.from_files(ca=asked.tls_ca or None).ca or b""
    own = TLS.from_files(ca=asked.tls_cert or None).ca or b""
    shown = TLS.from_files(certificate=asked.tls_cert, key=asked.tls_key) if asked.tls_key else TLS()
    return TLS(
        ca=authorities + b"\n" + own,
        certificate=shown.certificate,
        key=shown.key,
        server_name=asked.tls_server_name or None,
    )


def _status(
    endpoint: Endpoint, service: str, timeout_s: float
) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
    request = health_pb2.HealthCheckRequest(service=service)
    with endpoint.sync_channel() as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
    status: health_pb2.HealthCheckResponse.ServingStatus.ValueType = reply.status
    return status


def _parser(program: str, port: int, env: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {program} healthcheck",
        description="Asks the service how it is: 0 it serves, 1 it does not, 2 wrong usage.",
    )
    host = env.get("DRAFTWIRE_HOST", "") or "127.0.0.1"
    host = _EVERYWHERE.get(host, host)
    number = env.get("DRAFTWIRE_PORT", "") or port
    address = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
    parser.add_argument("--address", default=address, help="host:port of the service (%(default)s)")
    parser.add_argument("--service", default="", help="full gRPC name to ask for; the whole process when empty")
    parser.add_argument("--timeout-s", type=_seconds, default=3.0, help="time for an answer (%(default)s)")
    for name, meaning in (
        ("tls-ca", "PEM file of authorities to trust beside --tls-cert itself"),
        ("tls-cert", "PEM file of the service's certificate; turns TLS on"),
        ("tls-key", "PEM file of its key, for a service that wants to know its clients"),
        ("tls-server-name", "name in the certificate, where it is not the host of the address"),
    ):
        variable = f"DRAFTWIRE_{name.upper().replace('-', '_')}"
        parser.add_argument(f"--{name}", default=env.get(variable, ""), help=f"{meaning} ({variable})")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(f"{text} is not above 0")
    return value
