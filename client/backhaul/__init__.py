"""Activation checkpointing for PyTorch that recomputes on another machine.

    import backhaul

    session = backhaul.connect()          # starts a worker here; or backhaul.connect("gpu-box:50051")
    y = session.checkpoint(block, x)      # takes what torch.utils.checkpoint.checkpoint takes

Importing this package costs nothing: torch is imported when a name below is first used.
"""

from typing import TYPE_CHECKING, Any

from backhaul_runtime.errors import (
    AddressError,
    BackhaulError,
    BudgetError,
    ConnectError,
    DoubleBackwardError,
    DrainingError,
    NotRemoteError,
    ProgramError,
    ProtocolVersionError,
    ReplayError,
    SavedTensorModifiedError,
    SegmentUnknownError,
    SessionClosedError,
    SessionUnknownError,
    SettingError,
    StaleTensorError,
    TensorsMissingError,
    TransferError,
    UnsupportedTensorError,
    ValueCheckError,
    WorkerError,
    WorkerLostError,
)

if TYPE_CHECKING:
    from backhaul._api import checkpoint, checkpoint_sequential, connect, current_session, patched, wrap
    from backhaul._report import Decision, Report, SegmentReport
    from backhaul._session import Session
    from backhaul._value_check import CheckpointError
    from backhaul._wrap import SegmentModule, unwrap

__all__ = [
    "AddressError",
    "BackhaulError",
    "BudgetError",
    "CheckpointError",
    "ConnectError",
    "Decision",
    "DoubleBackwardError",
    "DrainingError",
    "NotRemoteError",
    "ProgramError",
    "ProtocolVersionError",
    "ReplayError",
    "Report",
    "SavedTensorModifiedError",
    "SegmentModule",
    "SegmentReport",
    "SegmentUnknownError",
    "Session",
    "SessionClosedError",
    "SessionUnknownError",
    "SettingError",
    "StaleTensorError",
    "TensorsMissingError",
    "TransferError",
    "UnsupportedTensorError",
    "ValueCheckError",
    "WorkerError",
    "WorkerLostError",
    "checkpoint",
    "checkpoint_sequential",
    "connect",
    "current_session",
    "patched",
    "unwrap",
    "wrap",
]

_HOMES = {
    "CheckpointError": "_value_check",
    "Decision": "_report",
    "Report": "_report",
    "SegmentModule": "_wrap",
    "SegmentReport": "_report",
    "Session": "_session",
    "checkpoint": "_api",
    "checkpoint_sequential": "_api",
    "connect": "_api",
    "current_session": "_api",
    "patched": "_api",
    "unwrap": "_wrap",
    "wrap": "_api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
