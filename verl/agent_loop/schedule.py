"""Virtual time: when groups start, and at which token a row goes over to new weights.

    clock of a row = clock at which it started + tokens it has sampled + `reply_tokens` per reply

    steps       0 0 0 0 1 1 1 1 2 2 2 2 ...       group i belongs to step i // batch, always
    may start   i < batch * (published + sync_every) + staleness * sync_every * batch
    an update   is seen by every row from the token on at which its clock reaches the clock of the
                update: the largest clock at which one of the deciding groups ended

Who decides: with `lag` 0 the groups of the steps that the update contains, which is as early as it
can be; generation waits while they are trained on. With `lag` 1 also those of the next step, so
that training has that long. Where rows do not go on across an update, all that have started.

Nothing here looks at a real clock or at the order of arrival, so an asynchronous run is a function
of its seed and its plan. Rows that really ran ahead are cut back, rows that are behind are run up.
"""

from dataclasses import dataclass, field

from verl.config.async_plan import AsyncPlan


@dataclass(eq=False)
class RowClock:
    """Where one row stands in virtual time."""

    index: int
    """Of its group."""

    clock: int
    has_ended: bool = False


@dataclass
class Schedule:
    """The state of virtual time: a function of what rows have sampled so far."""

    plan: AsyncPlan
    num_groups: int
    """Groups of the whole run; whole steps."""

    published: int = 0
    """Steps that the published weights contain."""

    clock: int = 0
    """Of the last update."""

    horizon: int = 0
    """The next update is not seen before this clock, as far as is known."""

    rows: dict[int, list[RowClock]] = field(default_factory=dict)
    """By group, those whose step is not published."""

    running: set[RowClock] = field(default_factory=set)
    """Rows that decide when the next update is seen, and have not ended."""

    @property
    def limit(self) -> int:
        """Groups with a smaller index may start."""
        return min(self.plan.capacity(self.published), self.num_groups)

    @property
    def next_update(self) -> int:
        """Steps that the next update contains."""
        return min(self.published + self.plan.sync_every, self.num_groups // self.plan.batch)

    @property
    def num_deciding(self) -> int:
        """Groups with a smaller index decide when the next update is seen."""
        if not self.plan.is_partial:
            return self.limit
        return min(self.limit, self.plan.batch * (self.next_update + self.plan.lag))

    def decides(self, row: RowClock) -> bool:
        return row.index < self.num_deciding

    def begin(self, index: int, clock: int | None = None) -> RowClock:
        """A row of group `index` starts now, or started at `clock` where a run is continued."""
        if index >= self.limit:
            raise ValueError(f"group {index} starts before its time; the limit is {self.limit}")
        row = RowClock(index, self.clock if clock is None else clock)
        self.rows.setdefault(index, []).append(row)
        if self.decides(row):
            self.running.add(row)
        self.advance(row, 0)
        return row

    def advance(self, row: RowClock, tokens: int) -> None:
        """The row has got so many tokens, or has lost them where they are negative."""
        row.clock += tokens
        if self.decides(row):
            self.horizon = max(self.horizon, row.clock)

    def end(self, row: RowClock) -> None:
        row.has_ended = True
        self.running.discard(row)

    def update_clock(self) -> int:
        """When the next update is seen; whoever decides must have ended."""
        num_begun = max(self.rows, default=-1) + 1
        if self.running or num_begun < self.num_deciding:
            raise ValueError(
                f"{len(self.running)} rows that decide when the update is seen still run, and "
                f"{num_begun} of {self.num_deciding} groups have begun"
            )
        return max(self.horizon, self.clock + self.plan.update_tokens)

    def publish(self, clock: int) -> None:
        """The next update is seen from `clock` on."""
        self.published = self.next_update
        self.clock = self.horizon = clock
        first = self.published * self.plan.batch
        self.rows = {index: rows for index, rows in self.rows.items() if index >= first}
        deciding = [row for rows in self.rows.values() for row in rows if self.decides(row)]
        self.running = {row for row in deciding if not row.has_ended}
        self.horizon = max([clock, *(row.clock for row in deciding)])
