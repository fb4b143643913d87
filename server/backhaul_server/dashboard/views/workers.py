"""Workers and their sessions as /api/v1 shows them."""

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.watched import TIERS, Watched
from backhaul_server.dashboard.views import schemas
from backhaul_server.dashboard.views.topology import worker_id


def worker_status(worker: Watched) -> schemas.WorkerStatus:
    """Returns the status of a worker. Before its first answer, unknown values are zero."""
    telemetry = worker.telemetry or telemetry_pb2.GetTelemetryResponse()
    memory = telemetry.memory
    held_bytes = sum(getattr(memory, tier) for tier in TIERS)
    return schemas.WorkerStatus(
        id=worker_id(worker.address.text),
        address=worker.address.text,
        state=worker.state,
        error=worker.error,
        seen_at_s=worker.answered_at_s,
        version=telemetry.worker_version,
        epoch=telemetry.epoch,
        device=telemetry.device,
        fingerprint=dict(sorted(telemetry.fingerprint.items())),
        uptime_s=telemetry.uptime_s,
        memory=schemas.Memory(
            budget_bytes=memory.budget_bytes,
            segment_bytes=memory.segment_bytes,
            cached_bytes=memory.cached_bytes,
            working_bytes=memory.working_bytes,
            result_bytes=memory.result_bytes,
            resident_bytes=memory.resident_bytes,
            refusals=memory.refusals,
            evictions=memory.evictions,
            reserve_bytes=memory.reserve_bytes,
        ),
        memory_share=held_bytes / memory.budget_bytes if memory.budget_bytes else 0.0,
        sessions=len(telemetry.sessions),
        recomputed_segments=telemetry.recomputed_segments,
        received_bytes=telemetry.received_bytes,
        sent_bytes=telemetry.sent_bytes,
        queued_requests=telemetry.queued_requests,
        load=worker.load.columns[0][-1] if worker.load.at_s and not worker.error else None,
        busy_s=telemetry.busy_s,
        spared_bytes=telemetry.spared_bytes,
        accelerator=accelerator_status(worker.telemetry),
        last_error=telemetry.last_error,
        last_error_at_s=telemetry.last_error_at_s,
    )


def accelerator_status(telemetry: telemetry_pb2.GetTelemetryResponse | None) -> schemas.AcceleratorStatus | None:
    """Returns the GPU of a worker's answer; None if it tells of none."""
    if telemetry is None or not telemetry.HasField("accelerator"):
        return None
    accelerator = telemetry.accelerator
    return schemas.AcceleratorStatus(
        name=accelerator.name,
        utilization=accelerator.utilization if accelerator.HasField("utilization") else None,
        used_bytes=accelerator.used_bytes,
        total_bytes=accelerator.total_bytes,
    )


def session_statuses(worker: Watched) -> list[schemas.SessionStatus]:
    """Returns the open sessions of a worker; none while the worker does not answer."""
    return [
        schemas.SessionStatus(
            id=f"session:{worker.address.text}/{session.run or session.trainer}",
            worker=worker.address.text,
            trainer=session.trainer,
            run=session.run,
            client_version=session.client_version,
            segments=session.segments,
            held_bytes=session.held_bytes,
            quota_share=session.held_bytes / worker.budget_bytes if worker.budget_bytes else 0.0,
            idle_s=session.idle_s,
            drift=session.drift,
            last_error=session.last_error,
        )
        for session in worker.sessions()
    ]
