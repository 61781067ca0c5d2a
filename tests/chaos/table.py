"""What became of each strike, as rows of a table."""

from dataclasses import dataclass

from tests.chaos.strikes import Strike, Strikes
from tests.pace import pace

TITLES = ("where", "who", "fault", "phase", "detected after", "recovered after", "verdict")

shown: list["Row"] = []
"""All rows of this session, printed at its end."""


@dataclass(frozen=True)
class Row:
    where: str
    who: str
    fault: str
    phase: str
    detected: float | None = None
    recovered: float | None = None
    message: str = ""
    limit: float = 30.0

    @property
    def is_kept(self) -> bool:
        """Whether what is promised has come true."""
        is_detected = self.detected is not None and self.detected <= self.limit
        return is_detected and self.recovered is not None

    def cells(self) -> tuple[str, ...]:
        verdict = "kept" if self.is_kept else f"NOT kept (limit {self.limit:g} s)"
        times = (_seconds(self.detected), _seconds(self.recovered))
        return (self.where, self.who, self.fault, self.phase, *times, verdict)


def rows_of(strikes: Strikes, where: str, limits: dict[str, float]) -> list[Row]:
    """A row for each strike that was planned, in the order of steps; `limits` are by fault."""
    slowness = pace()
    rows = [
        _row(strikes, strike, where, slowness * limits[strike.fault])
        for strike in strikes.planned()
    ]
    shown.extend(rows)
    return rows


def _row(strikes: Strikes, strike: Strike, where: str, limit: float) -> Row:
    who = f"{strike.role}, rank {strike.rank}"
    key = {"role": strike.role, "rank": strike.rank, "phase": strike.phase}
    struck = [event for event in strikes.events("struck") if key.items() <= event.items()]
    if not struck:
        return Row(where, who, strike.fault, strike.phase, limit=limit)
    start = struck[0]["time"]
    lost = [event for event in strikes.events("lost") if event["time"] > start]
    detected = lost[0]["time"] - start if lost else None
    finished = [
        event["time"] - start
        for event in strikes.events("finished")
        if event["step"] == strike.step and event["time"] > start
    ]
    message = lost[0]["message"] if lost else ""
    recovered = finished[0] if finished and lost else None
    return Row(where, who, strike.fault, strike.phase, detected, recovered, message, limit)


def as_text(rows: list[Row]) -> str:
    lines = [TITLES, ("---",) * len(TITLES), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
