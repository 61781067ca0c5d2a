"""The built-in engine as another process uses it: in visits.

    driver (`remote`)                              rank (here)
      visit: new requests, those given up  ---->     submit, abort, a few steps
      report: what has ended by then       <----
      visit: ...                           ---->

A rank answers one call at a time, so requests that come while it generates join at its next visit;
that is why a visit is short. Its length is a number of steps, never a time: ranks that share a
model get the same visits and must make the same steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl.workers.rollout.base import GenerationRequest, TokenOutput
from verl.workers.rollout.native.engine import NativeEngine, outputs_of
from verl.workers.rollout.native.sequence import Group

STEPS_PER_VISIT = 4


@dataclass(frozen=True, kw_only=True)
class Visit:
    """Requests go by numbers that the driver gives them."""

    new: Mapping[int, GenerationRequest] = field(default_factory=dict)
    given_up: tuple[int, ...] = ()
    closed_sessions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class VisitReport:
    """What has ended since the last visit."""

    finished: Mapping[int, list[TokenOutput]]
    refused: Mapping[int, str]
    """Requests that cannot run, with the reason."""


class EngineVisits:
    """Keeps the requests of an engine from one visit to the next."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self._under_way: dict[int, list[Group]] = {}

    def visit(self, visit: Visit) -> VisitReport:
        """If a step fails, the engine has dropped all requests, and so does this."""
        for session in visit.closed_sessions:
            self.engine.close_session(session)
        for number in visit.given_up:
            self._give_up(number)
        refused = self._submit(visit.new)
        try:
            for _ in range(STEPS_PER_VISIT):
                if all(map(_is_finished, self._under_way.values())):
                    break
                self.engine.step()
        except BaseException:
            self._under_way.clear()
            raise
        return VisitReport(finished=self._take_finished(), refused=refused)

    def _give_up(self, number: int) -> None:
        """It ends with what it has; nothing to do if it has been reported already."""
        for group in self._under_way.get(number, []):
            self.engine.abort(group.request.request_id)

    def _submit(self, requests: Mapping[int, GenerationRequest]) -> dict[int, str]:
        refused: dict[int, str] = {}
        for number, request in requests.items():
            try:
                self._under_way[number] = self.engine.submit(request)
            except ValueError as fault:
                refused[number] = str(fault)
        return refused

    def _take_finished(self) -> dict[int, list[TokenOutput]]:
        ended = [number for number, groups in self._under_way.items() if _is_finished(groups)]
        return {number: outputs_of(self._under_way.pop(number)) for number in ended}


def _is_finished(groups: list[Group]) -> bool:
    return all(group.is_finished for group in groups)
