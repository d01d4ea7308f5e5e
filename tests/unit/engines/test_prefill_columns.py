"""Positions in the cache, as a table of cells that remember the token and the sequence that they hold."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.engines.torch.kv_cache import plan_resize, table_rows
from gcore.engines.torch.prefill import prefill_batches
from gcore.engines.torch.scheduler import plan_compaction

Cell = tuple[int, int]
"""(sequence, position)"""


@dataclass
class Table:
    """The engine's use of the rules, on cells instead of numbers."""

    columns: int = 64
    column: int = 0
    starts: list[int] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    cells: dict[tuple[int, int], Cell] = field(default_factory=dict)
    moved: int = 0
    written: int = 0

    def make_room(self, longest: int) -> None:
        first = min(self.starts) if self.starts else None
        room = plan_resize(first=first, column=self.column, longest=longest, columns=self.columns)
        if room.shift or room.columns != self.columns:
            live = {
                (row, column): cell
                for (row, column), cell in self.cells.items()
                if row < len(self.starts) and self.starts[row] <= column < self.column
            }
            self.moved += len(live)
            self.cells = {(row, column + room.shift): cell for (row, column), cell in live.items()}
        self.starts = [start + room.shift for start in self.starts]
        self.column += room.shift
        self.columns = room.columns

    def write(self, row: int, column: int, cell: Cell) -> None:
        assert 0 <= column < self.columns
        self.cells[row, column] = cell
        self.written += 1

    def join(self, lengths: list[int], first_name: int) -> None:
        self.make_room(max(lengths))
        for i, length in enumerate(lengths):
            row, name = len(self.starts), first_name + i
            self.starts.append(self.column - length)
            self.names.append(name)
            for position in range(length):
                self.write(row, self.starts[row] + position, (name, position))

    def step(self) -> None:
        if self.column >= self.columns:
            self.make_room(0)
        for row, (name, start) in enumerate(zip(self.names, self.starts, strict=True)):
            self.write(row, self.column, (name, self.column - start))
        self.column += 1

    def leave(self, rows: list[int]) -> None:
        change = plan_compaction(rows, len(self.starts))
        for hole, source in zip(change.holes, change.sources, strict=True):
            for column in range(self.starts[source], self.column):
                self.cells[hole, column] = self.cells[source, column]
            self.starts[hole], self.names[hole] = self.starts[source], self.names[source]
        del self.starts[change.active :], self.names[change.active :]

    def check(self) -> None:
        for row, (name, start) in enumerate(zip(self.names, self.starts, strict=True)):
            assert start >= 0
            window = [self.cells[row, column] for column in range(start, self.column)]
            assert window == [(name, position) for position in range(len(window))]


events = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.lists(st.integers(1, 90), min_size=1, max_size=4)),
        st.tuples(st.just("step"), st.integers(1, 70)),
        st.tuples(st.just("leave"), st.lists(st.integers(0, 7), min_size=1, max_size=4)),
    ),
    max_size=25,
)


@given(events)
def test_every_row_keeps_its_own_tokens_in_order_through_joins_steps_shifts_and_leaves(events: list) -> None:  # type: ignore[type-arg]
    table, names = Table(), 0
    for kind, value in events:
        if kind == "join":
            table.join(value, names)
            names += len(value)
        elif kind == "step":
            for _ in range(value if table.starts else 0):
                table.step()
        else:
            table.leave([row for row in set(value) if row < len(table.starts)])
        table.check()


@given(st.integers(1, 300), st.integers(300, 3000))
def test_moving_costs_at_most_two_cells_for_each_cell_written(prompt: int, steps: int) -> None:
    table = Table()
    table.join([prompt], 0)
    for _ in range(steps):
        table.step()
    assert table.moved <= 2 * table.written


@given(st.integers(1, 40), st.integers(0, 500))
def test_short_sequences_one_after_the_other_do_not_widen_the_table(length: int, turns: int) -> None:
    table = Table()
    for turn in range(turns % 60):
        table.join([length % 16 + 1], turn)
        for _ in range(length % 16 + 1):
            table.step()
        table.leave([0])
    assert table.columns == 64


@given(st.integers(0, 60).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, max(0, n - 1)), max_size=n))))
def test_rows_that_stay_are_the_first_ones_and_none_is_copied_twice(case: tuple[int, set[int]]) -> None:
    active, leaving = case
    leaving = {row for row in leaving if row < active}
    change = plan_compaction(sorted(leaving), active)
    rows = list(range(active))
    for hole, source in zip(change.holes, change.sources, strict=True):
        rows[hole] = source
    assert sorted(rows[: change.active]) == [row for row in range(active) if row not in leaving]
    assert len(change.holes) <= len(leaving)
    assert set(change.holes) <= leaving


@given(st.lists(st.integers(1, 3000), max_size=60), st.integers(1, 8192))
def test_every_prompt_goes_through_the_model_once_and_no_pass_is_mostly_padding(lengths: list[int], most: int) -> None:
    batches = prefill_batches(lengths, most_tokens=most)
    assert sorted(member for batch in batches for member in batch.members) == list(range(len(lengths)))
    for batch in batches:
        real = [lengths[member] for member in batch.members]
        assert batch.width == max(real)
        assert len(real) == 1 or batch.width * len(real) <= most
        assert 4 * sum(real) >= 3 * batch.width * len(real)


@pytest.mark.parametrize(
    ("wanted", "rows", "most", "expected"),
    [
        pytest.param(1, 0, 256, 8, id="never fewer than eight"),
        pytest.param(1, 0, 4, 4, id="never more than the slots"),
        pytest.param(9, 8, 256, 16, id="doubled"),
        pytest.param(200, 8, 256, 200, id="or what is wanted"),
        pytest.param(3, 16, 256, 16, id="never made smaller"),
    ],
)
def test_the_table_gets_rows_as_they_are_wanted(wanted: int, rows: int, most: int, expected: int) -> None:
    assert table_rows(wanted, rows=rows, most=most) == expected
