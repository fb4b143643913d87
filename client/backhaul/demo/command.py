"""`backhaul demo`."""

import argparse
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

from backhaul._cli.environment_options import obstacle_to
from backhaul_runtime.errors import AddressError, ConnectError, CredentialError, ProtocolVersionError, SettingError
from backhaul_runtime.process.resources import usable_cores
from backhaul_runtime.process.units import parse_count

if TYPE_CHECKING:
    from backhaul._session import Session

HELP = "train a small language model with and without Backhaul and compare"
EXAMPLES = (
    "backhaul demo --dashboard                      # starts a worker and a dashboard",
    "backhaul demo --device cuda                    # trains on a GPU, with a worker on the same GPU",
    "backhaul demo --worker gpu-box:50051 --token-file worker.token --layers 12",
)
_RETRY_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `backhaul demo` to its parser."""
    parser.add_argument(
        "--steps", type=parse_count, default=8, help="training steps of each variant (default: %(default)s)"
    )
    parser.add_argument("--layers", type=parse_count, default=6, help="blocks, one segment each (default: %(default)s)")
    parser.add_argument("--width", type=parse_count, default=256, help="a multiple of 32 (default: %(default)s)")
    parser.add_argument("--context", type=parse_count, default=256, help="bytes of text per row (default: %(default)s)")
    parser.add_argument("--batch", type=parse_count, default=8, help="rows per step (default: %(default)s)")
    parser.add_argument(
        "--micro-batches",
        type=parse_count,
        default=4,
        metavar="COUNT",
        help="parts into which the rows of a step are divided (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="cpu", help="device of the training, and of a worker that is started (default: %(default)s)"
    )
    parser.add_argument(
        "--worker", metavar="ADDRESS", help="running worker, or several separated by commas (default: start one)"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="file with the token of the worker, or several files separated by commas"
    )
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="how long to wait for the worker to start"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    parser.add_argument("--dashboard", action="store_true", help="start a dashboard that watches the training")
    parser.add_argument(
        "--serve",
        action="store_true",
        help="keep the worker and the dashboard running until Ctrl-C; on a terminal also without this, if there is a "
        "dashboard",
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains all variants, compares them and prints the results.

    Returns:
        The exit code: 0 if all variants were bitwise equal, 1 if not, 2 if an option cannot be used, 130 after Ctrl-C
        in the training.
    """
    if arguments.width % 32:
        print(f"backhaul demo: --width {arguments.width} is not a multiple of 32", file=sys.stderr)
        return 2
    if obstacle := obstacle_to(arguments.json):
        print(f"backhaul demo: --json {arguments.json}: {obstacle}", file=sys.stderr)
        return 2
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # Otherwise torch's profiler logs each start and stop.
    # Otherwise it warns of tensors that a thread of the session has allocated and this thread frees.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if trouble := _unusable(arguments.device):
        print(f"backhaul demo: {trouble}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)  # Raises, so that the processes it started are ended.
    try:
        return _run(arguments)
    except (AddressError, ConnectError, CredentialError, ProtocolVersionError, SettingError) as error:
        print(f"backhaul demo: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from backhaul.demo.corpus import standard_library
    from backhaul.demo.dashboard import DashboardProcess
    from backhaul.demo.results import as_json, as_table, verdict
    from backhaul.demo.variants import DemoSettings, variants

    # The trainer and the worker share this machine, so each gets half of its cores.
    torch.set_num_threads(max(1, usable_cores() // 2))
    settings = DemoSettings(
        steps=arguments.steps,
        layers=arguments.layers,
        width=arguments.width,
        context=arguments.context,
        batch=arguments.batch,
        micro_batches=arguments.micro_batches,
        device=arguments.device,
    )
    print(f"training {settings.layers} blocks of width {settings.width} on the source of Python's standard library")
    corpus = standard_library()
    sessions: list[Session] = []
    dashboard: DashboardProcess | None = None
    try:
        # The sessions share one worker, so that each variant has a report of its own.
        worker = arguments.worker

        def connect(variant: str, returns: str) -> "Session":
            nonlocal worker
            session = _connected(arguments, worker, variant, returns)
            sessions.append(session)
            worker = worker or session.workers
            return session

        trained = variants(settings, connect)
        if arguments.dashboard:
            dashboard = DashboardProcess(worker, sessions[0].config.token_file)
            if dashboard.url:
                print(f"dashboard: {dashboard.url}", flush=True)
        began_s = monotonic()
        print(f"{'seconds per step of:':<26}{'  '.join(variant.name for variant in trained)}")
        for step in range(settings.steps):
            for variant in trained:
                variant.train(corpus, step)
                variant.compare(trained[0])
            for variant in trained:
                variant.finish()
            times = "  ".join(f"{variant.step_s[-1]:>{len(variant.name)}.2f}" for variant in trained)
            done, left = step + 1, settings.steps - step - 1
            left_s = (monotonic() - began_s) / done * left
            progress = f"step {done}/{settings.steps}, loss {trained[0].losses[-1]:.4f}"
            print(f"{progress:<26}{times}" + (f"  about {left_s:.0f} s left" if left else ""), flush=True)
        for variant in trained:
            variant.measure_memory(corpus)
        results = as_json(settings, trained)
        print("\n" + as_table(results))
        print("\n" + verdict(results))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=2) + "\n")
        url = dashboard.url if dashboard is not None else ""
        if arguments.serve or (url and sys.stdout.isatty()):
            print(f"serving {url or 'the worker'} until Ctrl-C", flush=True)
            with suppress(KeyboardInterrupt):
                signal.pause()
    except KeyboardInterrupt:
        return 130
    finally:
        for session in reversed(sessions):
            session.close()
        if dashboard is not None:
            dashboard.close()
    return 0 if results["all_equal"] else 1


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _unusable(device: str) -> str:
    """Returns why the demo can't train on a device; empty if it can."""
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        return f'--device "{device}" can\'t be used: {str(error).splitlines()[0]}'
    return ""


def _connected(arguments: argparse.Namespace, worker: str | None, variant: str, returns: str) -> "Session":
    import backhaul

    deadline = monotonic() + arguments.wait
    while True:
        try:
            return backhaul.connect(
                worker,
                token_file=arguments.token_file,
                device=arguments.device,
                returns=returns,  # type: ignore[arg-type]
                run=f"demo, {variant}",
            )
        except ConnectError:
            if monotonic() >= deadline:
                raise
            sleep(_RETRY_S)
