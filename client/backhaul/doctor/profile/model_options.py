"""The options that `backhaul doctor` and `backhaul plan` share. Does not import torch."""

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from backhaul._config import Config, Settings, resolve
from backhaul._setting import texts_of
from backhaul_runtime.process.discovery import parse_resolvers
from backhaul_runtime.process.resources import usable_cores

if TYPE_CHECKING:
    from backhaul.doctor.profile.target import Target

_PATIENT_S = 30.0
"""A worker is given this time without a message, because a lost segment would spoil a measurement."""


def add_model_options(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    """Adds the options that name workers and the model to a command's parser."""
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        required=is_required,
        help="function that returns a module and an example batch, or the model of an experiment",
    )
    parser.add_argument(
        "--argument",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="arguments for the function",
    )
    parser.add_argument(
        "--layers",
        default="",
        metavar="CLASS",
        help="classes of the modules to checkpoint, separated by commas (default: the longest list of layers)",
    )
    parser.add_argument(
        "--worker",
        action="extend",
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="running workers (default: start one here)",
    )
    said = texts_of(Config)
    for option, setting, metavar in (("--token-file", "token_file", "FILE"), ("--tls", "tls", "DIR")):
        sentence = said[setting].split(". ")[0].rstrip(".")
        parser.add_argument(option, metavar=metavar, help=sentence[0].lower() + sentence[1:])


def config_of(arguments: argparse.Namespace) -> Config:
    """Returns the settings of sessions with the workers that the options name.

    Raises:
        AddressError: An address cannot be read.
        SettingError: A setting has an invalid value.
    """
    if arguments.worker:  # at once: the model is measured before the workers
        for resolver in parse_resolvers(",".join(arguments.worker)):
            resolver.close()
    return patient(worker=",".join(arguments.worker) or None, token_file=arguments.token_file, tls=arguments.tls)


def patient(settings: Settings | None = None, **arguments: Any) -> Config:
    """Returns the settings of sessions that measure: they wait long for a worker, and take nothing from a plan.

    Args:
        settings: Further fields, which go before those of a patient session; None for no further ones.
        **arguments: Arguments of `connect`, without `strict` and `plan`.

    Raises:
        SettingError: A setting has an invalid value.
    """
    further = {} if settings is None else settings.given()
    return resolve(Settings(**{"silence_s": _PATIENT_S, **further}), strict=False, plan="", **arguments)


def target_of(arguments: argparse.Namespace) -> "Target":
    """Loads the model that the options name.

    Raises:
        SettingError: An option cannot be used, or the model cannot be loaded.
    """
    _quiet()
    from backhaul.doctor.profile.target import load_target, parse_argument
    from backhaul_runtime.errors import SettingError

    try:
        given = dict(map(parse_argument, arguments.argument))
    except ValueError as error:
        raise SettingError(f"--argument: {error}") from None
    return load_target(arguments.model, arguments.layers, given)


def divide_cores(config: Config) -> None:
    """Gives this process half of the cores, if it computes on them and a session starts a worker beside it."""
    _quiet()
    import torch

    if not config.worker and not torch.cuda.is_available():
        torch.set_num_threads(max(1, min(torch.get_num_threads(), usable_cores() // 2)))


def say_part(part: str) -> None:
    """Says on standard error which part of a measurement begins: a measurement takes a minute or more."""
    sys.stderr.write(f"measuring {part} ...\n")
    sys.stderr.flush()


def _quiet() -> None:
    """Keeps torch's profiler from logging. Call it before torch is imported."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
