"""Goes through a directory of evidence, and judges each call in it.

NOTE [Verdicts]
1. Nothing counts that does not have its digest: an object, a file of a step, or what they say of each other.
2. A call is equal only if all that the directory should have of it is there and equal. The end of a step says how
   many backwards each call has. Without the end, a call without a backward can't be judged, because the process may
   have been killed before it was written.
3. What is wrong with one file concerns the calls that need it, and no others.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from backhaul._evidence.files import EvidenceName, EvidenceReader, UnusableError
from backhaul._evidence.gradients import measured_contribution
from backhaul.verify.recomputation import Recomputation, Recomputer
from backhaul.verify.stored_calls import StoredBackward, StoredCall, stored_backward, stored_call
from backhaul.verify.verdicts import Difference, SegmentVerdict
from backhaul_proto.v1 import evidence_pb2
from backhaul_runtime.errors import BackhaulError
from backhaul_runtime.replay.replay import Contribution
from backhaul_runtime.tensors.random_projection import SIZE, drift, tolerance


@dataclass(slots=True, eq=False)
class Judge:
    """Judges the calls of a directory.

    Attributes:
        reader: The reader of the directory with its files.
        recomputer: What computes calls again, here or on a worker.
        steps: The numbers of the steps to judge; empty for all.
        segment: The name of the calls to judge; empty for all.
        problems: What is wrong with the directory beside single calls, each in a sentence.
        notes: What else is known of it, each in a sentence.
    """

    reader: EvidenceReader
    recomputer: Recomputer
    steps: Collection[int] = ()
    segment: str = ""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def verdicts(self) -> Iterator[SegmentVerdict]:
        """Yields the verdict on each call, in order. Afterwards `problems` and `notes` are complete.

        Raises:
            UnusableError: The directory can't be read at all.
        """
        names, strangers = self.reader.names()
        self.problems += [f"steps/{name!r} is no file of evidence, and was ignored" for name in strangers]
        if missing := set(self.steps) - {name.step for name in names}:
            self.problems.append(f"the directory has no step {', '.join(map(str, sorted(missing)))}")
        for (step, session), of_step in groupby(names, key=lambda name: (name.step, name.session)):
            if not self.steps or step in self.steps:
                yield from self._of_step(EvidenceName(step, session), list(of_step))
        if not self.steps and not self.segment:
            self._check_others()

    def _of_step(self, end: EvidenceName, names: Sequence[EvidenceName]) -> Iterator[SegmentVerdict]:
        counts = self._counts(end, is_there=end in names)
        numbers: dict[int, set[int]] = {}  # those of the backwards of each call; 0 for the call itself
        for name in names:
            if name.call:
                numbers.setdefault(name.call, set()).add(name.backward)
        for call in sorted(numbers.keys() | (counts or {}).keys()):
            verdict = self._of_call(end._replace(call=call), numbers.get(call, set()) - {0}, counts)
            if not self.segment or verdict.segment in {"", self.segment}:
                yield verdict

    def _counts(self, end: EvidenceName, *, is_there: bool) -> dict[int, int] | None:
        """Returns the number of backwards of each call of a step; None if its end is not there or was changed."""
        where = f"step {end.step} of session {end.session}"
        try:
            if not is_there:
                raise UnusableError(
                    f"{where} has no end: its process was killed in it, the disk was full, or files are missing"
                )
            message = self.reader.message(end, evidence_pb2.EvidenceStep)
            if (message.step, message.session) != (end.step, end.session):
                raise UnusableError(f"steps/{end} is the file of another place")
        except UnusableError as error:
            self.problems.append(str(error))
            return None
        if message.why_ended:
            self.notes.append(f"The recording ended in {where}, perhaps not with its last call: {message.why_ended}")
        return {count.call: count.backwards for count in message.calls}

    def _of_call(self, name: EvidenceName, backwards: Collection[int], counts: dict[int, int] | None) -> SegmentVerdict:
        verdict = SegmentVerdict(name.step, name.session, name.call, "", "unknown")
        try:
            message = self.reader.message(name, evidence_pb2.EvidenceCall)
            verdict = replace(verdict, segment=message.name)
            if self.segment not in {"", message.name}:
                return verdict
            call = stored_call(self.reader, name, message)
            if counts is not None and name.call not in counts:
                raise UnusableError(f"the end of its step does not name it: steps/{name} was added later")
            return self._judged(verdict, name, call, backwards, None if counts is None else counts[name.call])
        except Exception as error:  # the directory is not trusted, so an op may raise anything
            return replace(verdict, why=_reason(error))

    def _judged(
        self,
        verdict: SegmentVerdict,
        name: EvidenceName,
        call: StoredCall,
        written: Collection[int],
        expected: int | None,
    ) -> SegmentVerdict:
        backwards, reasons = list[tuple[int, StoredBackward]](), list[str]()
        if call.uses is not None:
            for number in range(1, max([*written, expected or 0], default=0) + 1):
                try:
                    backwards.append((number, stored_backward(self.reader, name._replace(backward=number), call)))
                except Exception as error:
                    reasons.append(_reason(error))
            if expected is None and not written:
                reasons.append("no backward of it was recorded, and the step has no end")
        differing, gradients = dict[str, Difference](), 0
        if not backwards:
            again = self.recomputer.recompute(call, None)
            differing |= {one.tensor: one for one in _forward_differences(call, again)}
        for number, backward in backwards:
            again = self.recomputer.recompute(call, backward)
            differing |= {one.tensor: one for one in _forward_differences(call, again)}
            where = f" in backward {number}" if len(backwards) > 1 else ""
            differing |= {one.tensor: one for one in _gradient_differences(backward, again, where)}
            gradients += len(backward.contributions)
        return replace(
            verdict,
            outcome="differs" if differing else "unknown" if reasons else "equal",
            why="; ".join(dict.fromkeys(reasons)),
            tensors=len(call.compared),
            gradients=gradients,
            workers=sorted({backward.worker for _, backward in backwards}),
            has_other_bits=any(backward.has_other_bits for _, backward in backwards),
            differences=list(differing.values()),
            fingerprint=self.recomputer.differences(call) if differing else {},
        )

    def _check_others(self) -> None:
        """Checks the objects that no call has named, such as those of a process that was killed."""
        for where, digest in self.reader.unread_objects():
            if digest is None:
                self.problems.append(f"{where!r} is no file of evidence, and was ignored")
                continue
            try:
                self.reader.check_object(digest)
            except UnusableError as error:
                self.problems.append(str(error))


def _forward_differences(call: StoredCall, again: Recomputation) -> Iterator[Difference]:
    if len(again.digests) != len(call.compared):
        yield Difference(f"{len(call.compared)} tensors of forward are {len(again.digests)} now")
        return
    for number, (recorded, digest) in enumerate(zip(call.compared, again.digests, strict=True)):
        if recorded.digest != digest:
            what = f"saved by {recorded.op}" if recorded.op else "which the call returned"
            yield Difference(f"tensor {number}, {what}, {recorded.description}")


def _gradient_differences(backward: StoredBackward, again: Recomputation, where: str) -> Iterator[Difference]:
    if [one.source for one in backward.contributions] != [one.source for one in again.contributions]:
        yield Difference(f"{len(backward.contributions)} gradients{where} are {len(again.contributions)} others now")
        return
    for number, (recorded, contribution) in enumerate(zip(backward.contributions, again.contributions, strict=True)):
        now = measured_contribution(contribution)
        if now.digest != recorded.digest:
            what = f"gradient {number}{where}, of source {recorded.source}, {recorded.description or 'none'}"
            yield _distant(what, recorded, now, contribution)


def _distant(
    what: str,
    recorded: evidence_pb2.EvidenceContribution,
    now: evidence_pb2.EvidenceContribution,
    contribution: Contribution,
) -> Difference:
    if recorded.description != now.description:
        return Difference(f"{what}, which is {now.description or 'none'} now")
    if len(recorded.projection) != SIZE or contribution.gradient is None:
        return Difference(what)
    distance = drift(recorded.projection, now.projection)
    return Difference(what, distance, is_rounding=distance <= tolerance(contribution.gradient.dtype))


def _reason(error: Exception) -> str:
    """Returns why something can't be judged, in a line without a full stop."""
    match error:
        case UnusableError() | BackhaulError():
            reason = str(error)
        case _:
            reason = f"{type(error).__name__}: {error}"
    return reason.partition("\n")[0].rstrip(".")[:500]
