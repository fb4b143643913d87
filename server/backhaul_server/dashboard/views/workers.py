"""Workers and their sessions as /api/v1 shows them."""

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.watched import TIERS, Watched
from backhaul_server.dashboard.schemas.network import worker_id
from backhaul_server.dashboard.schemas.now import AcceleratorStatus, Memory, SessionStatus, WorkerStatus


def worker_status(worker: Watched) -> WorkerStatus:
    """Returns the status of a worker. Before its first answer, unknown values are zero."""
    telemetry = worker.telemetry or telemetry_pb2.GetTelemetryResponse()
    memory = telemetry.memory
    held_bytes = sum(getattr(memory, tier) for tier in TIERS)
    return WorkerStatus.of(
        telemetry,
        id=worker_id(worker.address.text),
        address=worker.address.text,
        state=worker.state,
        error=worker.error,
        seen_at_s=worker.answered_at_s,
        version=telemetry.worker_version,
        memory=Memory.of(memory),
        memory_share=held_bytes / memory.budget_bytes if memory.budget_bytes else 0.0,
        sessions=len(telemetry.sessions),
        load=worker.load.columns[0][-1] if worker.load.at_s and not worker.error else None,
        accelerator=accelerator_status(worker.telemetry),
    )


def accelerator_status(telemetry: telemetry_pb2.GetTelemetryResponse | None) -> AcceleratorStatus | None:
    """Returns the GPU of a worker's answer; None if it tells of none."""
    if telemetry is None or not telemetry.HasField("accelerator"):
        return None
    return AcceleratorStatus.of(telemetry.accelerator)


def session_statuses(worker: Watched) -> list[SessionStatus]:
    """Returns the open sessions of a worker; none while the worker does not answer."""
    return [
        SessionStatus.of(
            session,
            id=f"session:{worker.address.text}/{session.run or session.trainer}",
            worker=worker.address.text,
            quota_share=session.held_bytes / worker.budget_bytes if worker.budget_bytes else 0.0,
        )
        for session in worker.sessions()
    ]
