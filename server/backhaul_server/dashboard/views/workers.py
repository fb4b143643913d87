"""Workers and their sessions as /api/v1 shows them."""

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.watched import TIERS, Watched
from backhaul_server.dashboard.views import schemas


def worker_status(worker: Watched) -> schemas.WorkerStatus:
    """Returns the status of a worker. Before its first answer, unknown values are zero."""
    telemetry = worker.telemetry or telemetry_pb2.GetTelemetryResponse()
    memory = telemetry.memory
    held_bytes = sum(getattr(memory, tier) for tier in TIERS)
    return schemas.WorkerStatus(
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
        ),
        memory_share=held_bytes / memory.budget_bytes if memory.budget_bytes else 0.0,
        sessions=len(telemetry.sessions),
        recomputed_segments=telemetry.recomputed_segments,
        received_bytes=telemetry.received_bytes,
        sent_bytes=telemetry.sent_bytes,
        queued_requests=telemetry.queued_requests,
        last_error=telemetry.last_error,
        last_error_at_s=telemetry.last_error_at_s,
    )


def session_statuses(worker: Watched) -> list[schemas.SessionStatus]:
    """Returns the open sessions of a worker; none while the worker does not answer."""
    return [
        schemas.SessionStatus(
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
