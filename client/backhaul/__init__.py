"""Activation checkpointing for PyTorch that recomputes on another machine.

    import backhaul

    session = backhaul.connect()          # starts a worker on this machine; or backhaul.connect("gpu-box:50051")
    y = session.checkpoint(block, x)      # accepts what torch.utils.checkpoint.checkpoint accepts

Importing this package is fast: torch is imported when one of the names below is first used.
"""

from typing import TYPE_CHECKING, Any

from backhaul_runtime.errors import (
    AccumulationError,
    AddressError,
    BackhaulError,
    BudgetError,
    CompilingError,
    ConnectError,
    CredentialError,
    DrainingError,
    LimitError,
    NotRemoteError,
    ProgramError,
    ProtocolVersionError,
    RecheckError,
    ReplayError,
    SavedTensorModifiedError,
    SegmentLostError,
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
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        DefaultDeviceType,
        GraphExecGroup,
        SelectiveCheckpointContext,
        create_selective_checkpoint_contexts,
        noop_context_fn,
        set_checkpoint_debug_enabled,
        set_checkpoint_early_stop,
    )

    from backhaul._api import checkpoint, checkpoint_sequential, connect, current_session, patched, wrap
    from backhaul._backward.value_check import CheckpointError
    from backhaul._config import Settings
    from backhaul._observe.report import Decision, Report, SegmentReport
    from backhaul._observe.warnings import NotRemoteWarning
    from backhaul._session import Session
    from backhaul._torch_api.wrap import SegmentModule, unwrap
    from backhaul_runtime.program.custom.adapters import register_adapter

__all__ = [
    "AccumulationError",
    "AddressError",
    "BackhaulError",
    "BudgetError",
    "CheckpointError",
    "CheckpointPolicy",
    "CompilingError",
    "ConnectError",
    "CredentialError",
    "Decision",
    "DefaultDeviceType",
    "DrainingError",
    "GraphExecGroup",
    "LimitError",
    "NotRemoteError",
    "NotRemoteWarning",
    "ProgramError",
    "ProtocolVersionError",
    "RecheckError",
    "ReplayError",
    "Report",
    "SavedTensorModifiedError",
    "SegmentLostError",
    "SegmentModule",
    "SegmentReport",
    "SegmentUnknownError",
    "SelectiveCheckpointContext",
    "Session",
    "SessionClosedError",
    "SessionUnknownError",
    "SettingError",
    "Settings",
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
    "create_selective_checkpoint_contexts",
    "current_session",
    "noop_context_fn",
    "patched",
    "register_adapter",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "unwrap",
    "wrap",
]

_TORCHS = "torch.utils.checkpoint"
_HOMES = {
    "CheckpointError": "backhaul._backward.value_check",
    "CheckpointPolicy": _TORCHS,
    "Decision": "backhaul._observe.report",
    "DefaultDeviceType": _TORCHS,
    "GraphExecGroup": _TORCHS,
    "NotRemoteWarning": "backhaul._observe.warnings",
    "Report": "backhaul._observe.report",
    "SegmentModule": "backhaul._torch_api.wrap",
    "SegmentReport": "backhaul._observe.report",
    "SelectiveCheckpointContext": _TORCHS,
    "Session": "backhaul._session",
    "Settings": "backhaul._config",
    "checkpoint": "backhaul._api",
    "checkpoint_sequential": "backhaul._api",
    "connect": "backhaul._api",
    "create_selective_checkpoint_contexts": _TORCHS,
    "current_session": "backhaul._api",
    "noop_context_fn": _TORCHS,
    "patched": "backhaul._api",
    "register_adapter": "backhaul_runtime.program.custom.adapters",
    "set_checkpoint_debug_enabled": _TORCHS,
    "set_checkpoint_early_stop": _TORCHS,
    "unwrap": "backhaul._torch_api.wrap",
    "wrap": "backhaul._api",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from backhaul_runtime.version import version

        return version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
