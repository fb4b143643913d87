"""The RPCs for telemetry: a worker's own state, and the reports of its trainers."""

from collections import Counter
from time import monotonic, time

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.fingerprint import fingerprint
from backhaul_runtime.process.resources import resident_bytes
from backhaul_runtime.sealing import sealed
from backhaul_runtime.version import version
from backhaul_runtime.wire.splicing import field_of
from backhaul_server.worker.audit import AuditLog
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.limits import ALL_LOOKS, LOOKS
from backhaul_server.worker.rpc.accelerator import AcceleratorMeter
from backhaul_server.worker.rpc.calls import Context, Servicer, unary
from backhaul_server.worker.rpc.meter import RpcMeter
from backhaul_server.worker.rpc.trainer_reports import TrainerReports


class TelemetryServicer(Servicer):
    """Implements the service of telemetry.

    Args:
        worker: The worker whose state is reported.
        meter: Counts calls and bytes.
        audit: Gets an entry for each request that is denied.
    """

    def __init__(self, worker: Worker, meter: RpcMeter, audit: AuditLog) -> None:
        super().__init__(worker, meter, audit)
        self._started = monotonic()
        self._reports = TrainerReports()
        self._accelerator = AcceleratorMeter(worker.device)
        self._unread: Counter[str] = Counter()  # the number of unread answers, by connection

    @unary
    async def PutReports(  # noqa: N802  gRPC's name
        self, request: telemetry_pb2.PutReportsRequest, context: Context
    ) -> telemetry_pb2.PutReportsResponse:
        """Keeps a report of a session's trainer for dashboards."""
        self._reports.put(request.report, self.session(request.session).account.name)
        return telemetry_pb2.PutReportsResponse()

    @unary
    async def GetTelemetry(  # noqa: N802  gRPC's name
        self, request: telemetry_pb2.GetTelemetryRequest, context: Context
    ) -> bytes:
        """Answers with the worker's present state, and the reports after the one that the request names.

        A credential that may not see all gets only its own sessions and reports.
        """
        peer = context.peer()
        LOOKS.check(self._unread[peer] + 1)
        ALL_LOOKS.check(self._unread.total() + 1)
        self._unread[peer] += 1
        # gRPC calls it when the client has read the answer. The type stub declares a class instead of a callable.
        context.add_done_callback(lambda _: self._was_read(peer))  # type: ignore[arg-type]
        worker, usage, now = self.worker, self.worker.store.usage(), monotonic()
        work = worker.engine.work
        account = self.account
        seen = None if account.sees_all else account.name
        reports, has_more = self._reports.after(request.after_report if request.epoch == worker.epoch else 0, seen)
        last_error, last_error_at_s = worker.last_error if account.sees_all else ("", 0.0)
        answer = telemetry_pb2.GetTelemetryResponse(
            worker_version=version(),
            epoch=worker.epoch,
            device=str(worker.device),
            draining=worker.draining,
            uptime_s=now - self._started,
            memory=telemetry_pb2.MemoryTelemetry(
                budget_bytes=usage.budget,
                segment_bytes=usage.segments,
                cached_bytes=usage.cached,
                working_bytes=usage.working,
                result_bytes=usage.results,
                resident_bytes=resident_bytes(),
                refusals=usage.refusals,
                evictions=usage.evictions,
                reserve_bytes=usage.reserve,
            ),
            sessions=[
                telemetry_pb2.SessionTelemetry(
                    trainer=session.trainer,
                    segments=len(session.segments),
                    idle_s=max(0.0, now - (session.expires_at - worker.lease_s)),
                    drift=session.drift,
                    run=session.run,
                    held_bytes=worker.store.held_bytes(session),
                    client_version=session.client_version,
                    last_error=session.last_error,
                )
                for session in worker.sessions.values()
                if account.sees_all or session.account is account
            ],
            rpcs=[
                telemetry_pb2.RpcTelemetry(
                    method=name, calls=rpc.calls, errors=rpc.errors, total_s=rpc.total_s, buckets=rpc.buckets
                )
                for name, rpc in sorted(self.meter.methods.items())
            ],
            recomputed_segments=work.recomputed,
            received_bytes=self.meter.bytes["received"],
            sent_bytes=self.meter.bytes["sent"],
            queued_requests=work.jobs,
            fingerprint=fingerprint(worker.device),
            last_error=last_error,
            last_error_at_s=last_error_at_s,
            has_more_reports=has_more,
            speculation_hits=work.hits,
            speculation_misses=work.misses,
            accelerator=self._accelerator.latest(),
            busy_s=work.busy_s,
            spared_bytes=worker.spared_bytes,
            clock_s=time(),
        )
        number = telemetry_pb2.GetTelemetryResponse.REPORTS_FIELD_NUMBER
        return sealed((answer.SerializeToString(), *(field_of(number, report) for report in reports)))

    def _was_read(self, peer: str) -> None:
        self._unread[peer] -= 1
        if not self._unread[peer]:
            del self._unread[peer]
