"""The command `backhaul health`."""

import argparse
import sys
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from backhaul_runtime.errors import AddressError, SettingError
from backhaul_runtime.process.addresses import parse_address
from backhaul_runtime.process.tls import TlsFiles, files_of
from backhaul_runtime.process.units import parse_seconds

HELP = "check whether a worker or a dashboard is serving"
EXAMPLES = (
    "backhaul health gpu-box:50051 --tls trainer",
    "backhaul health http://127.0.0.1:8080           # a dashboard",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    parser.add_argument(
        "address", metavar="ADDR", help="host:port or unix:/path of a worker, or http://host:port of a dashboard"
    )
    parser.add_argument(
        "--timeout",
        type=parse_seconds,
        default=5.0,
        metavar="SECONDS",
        help="treat no answer within this time as a failure (default: %(default)g)",
    )
    parser.add_argument(
        "--tls", metavar="DIR", help="directory with tls.crt, tls.key and ca.crt, for a worker that speaks TLS"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the status in one line. Returns the exit code: 0 if serving, 1 if not, 2 if the check was impossible."""
    try:
        if arguments.address.startswith(("http://", "https://")):
            trouble = _dashboard(arguments.address, arguments.timeout)
        else:
            trouble = _worker(arguments.address, arguments.timeout, files_of(arguments.tls))
    except (AddressError, SettingError, ImportError) as error:
        print(f"backhaul health: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.address}: {trouble or 'serving'}")
    return 1 if trouble else 0


def _worker(address: str, timeout_s: float, tls: TlsFiles | None) -> str:
    """Returns why a worker does not serve; empty if it serves."""
    target = parse_address(address).target
    import grpc

    from backhaul_runtime.wire.protocol import CHANNEL_OPTIONS
    from backhaul_server.dashboard.collect.plain_words import why_unanswered

    try:
        from grpc_health.v1 import health_pb2
    except ImportError as error:
        raise ImportError(f"{error}; install it with: pip install 'backhaul[server]'") from None
    request, response = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
    if tls is not None:
        credentials = grpc.ssl_channel_credentials(**tls.of_channel)
        opened = grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
    else:
        opened = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    with opened as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        try:
            status = check(request(), timeout=timeout_s).status
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            return why_unanswered(error.code(), str(error.details()))
    return "" if status == response.SERVING else response.ServingStatus.Name(status)


def _dashboard(url: str, timeout_s: float) -> str:
    """Returns why a dashboard does not serve; empty if it serves."""
    try:
        with build_opener(ProxyHandler({})).open(f"{url.rstrip('/')}/healthz", timeout=timeout_s):
            return ""
    except HTTPError as error:
        return f"what listens there answers {error.code} {error.reason}: it is no dashboard, or not ready"
    except (HTTPException, ValueError) as error:
        return f"what listens there is no dashboard: {' '.join(str(error).split()) or type(error).__name__}"
    except OSError as error:
        from backhaul_server.dashboard.collect.plain_words import why_unreachable

        return why_unreachable(str(error))
