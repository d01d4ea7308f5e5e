"""The output of the views: plain lines, the live view, the chart; and escaping of a model's text."""

import io
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from controllers.cli.output import (
    bin_points,
    distinguish_texts,
    divide_cells,
    draw_chart,
    fill_gaps,
    format_seconds,
    moved_cells,
    printable_text,
    scale_chart,
    shard_strip,
)
from controllers.cli.view import screens as view_plain
from controllers.cli.view.live import render_view
from controllers.cli.view.state import BestPoint, JobSnapshot, ViewState, WaitPoint
from gcore.errors import UsageError
from gcore.observability.events import JobEvent
from tools import draw_view

STATS = {
    "reward": 0.62, "response_length": 3.14, "tokens_per_second": 812.4, "seconds": 1.0,
    "collect_s": 0.31, "exchange_s": 0.02, "train_s": 0.44, "publish_s": 0.1,
}  # fmt: skip
SAMPLES = [
    {"prompt": "47+8=", "response": "55", "answer": "55", "reward": 1.0},
    {"prompt": "9+9=", "response": "\x1b[2J17", "answer": "18", "reward": 0.0},
]


def event(sequence, kind, message="", **data):
    return JobEvent(sequence, 100.0 + sequence, kind, message, data)


SCRIPT = [
    event(1, "state", state="RUNNING", reason="started"),
    event(2, "shards", shares={"node-0": [0, 1, 2, 3], "node-1": [4, 5, 6, 7]}, moved=0),
    event(3, "eval", step=0, accuracy=0.451, count=500, samples=SAMPLES),
    event(4, "step", step=1, steps=3, stats=STATS, groups_by_node={"node-0": 16, "node-1": 16}, filtered=2, failed=1),
    event(5, "member", "node-1 is gone", node="node-1", joined=False),
    event(6, "shards", shares={"node-0": [0, 1, 2, 3, 4, 5, 6, 7]}, moved=4),
    event(7, "step", step=2, steps=3, stats={}),
    event(8, "eval", step=2, accuracy=0.6, count=500, samples=SAMPLES),
    event(9, "step", step=3, steps=3, stats=STATS),
    event(10, "eval", step=3, accuracy=0.94, count=500, samples=SAMPLES),
    event(11, "new kind", "something new"),
    event(12, "state", state="SUCCEEDED", reason="all steps are committed"),
]


def states():
    state = ViewState()
    for one in SCRIPT:
        yield state, one
        state = state.apply(one)


def final():
    state = ViewState()
    for one in SCRIPT:
        state = state.apply(one)
    return state


def drawn(state, now=112.0, width=110):
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render_view(state, now, width))
    return console.export_text()


def test_the_plain_view_is_one_line_for_each_event_and_answers_before_and_after():
    printed = [line for before, one in states() for line in view_plain.event_lines(before, one)]
    assert printed == [
        "state: RUNNING: started",
        "shards: prompt shards assigned: node-0 has 4, node-1 has 4",
        "eval: accuracy 45.1% on 500 held-out prompts after step 0",
        "  47+8= → 55  correct",
        "  9+9= → \\x1b[2J17  incorrect, expected 18",
        "step 1/3 reward 0.620 accuracy 0.451 length 3.1 812 tok/s generate 0.31s transfer 0.02s "
        "train 0.44s weight sync 0.10s groups node-0:16 node-1:16 filtered 2 failed 1",
        "member: node-1 is gone",
        "shards: 4 of 8 prompt shards moved; now node-0 has 8",
        "step 2/3 reward - accuracy 0.451 length -",
        "eval: accuracy 60.0% on 500 held-out prompts after step 2",
        "step 3/3 reward 0.620 accuracy 0.600 length 3.1 812 tok/s generate 0.31s transfer 0.02s "
        "train 0.44s weight sync 0.10s",
        "eval: accuracy 94.0% on 500 held-out prompts after step 3",
        "  47+8= → 55  correct",
        "  9+9= → \\x1b[2J17  incorrect, expected 18",
        "new kind: something new",
        "state: SUCCEEDED: all steps are committed",
    ]


PICTURE_STATS = STATS | {"response_length": 5.0, "denoising_steps": 5.0, "pictures_per_second": 31.24}
FILE = "/runs/colours-u/samples/evaluation-0-0/ab.png"


def pictures(*rewards, prompt="red", **fields):
    """Samples of an evaluation that are generated pictures."""
    shown = {"sha256": "ab", "size": 9, "height": 8, "width": 8, "file": FILE}
    return [
        {"prompt": prompt, "response": "", "answer": "", "reward": reward, "correct": reward >= 1, "picture": shown}
        | fields
        for reward in rewards
    ]


def test_plain_lines_show_the_file_of_a_picture_and_steps_instead_of_tokens():
    state = ViewState()
    answers = [
        *pictures(1.0, 0.25),
        *pictures(0.0, answer="a red square"),
        *pictures(0.0, picture={"sha256": "cd", "file": ""}),
        *pictures(0.0, unscored="no judge"),
    ]
    lines = view_plain.event_lines(state, event(1, "eval", step=0, accuracy=0.25, count=4, samples=answers))
    assert lines[1:] == (
        f"  red → {FILE}  correct, reward 1",
        f"  red → {FILE}  incorrect, reward 0.25",
        f"  red → {FILE}  incorrect, reward 0, expected a red square",
        "  red → sha256:cd  incorrect, reward 0",
        f"  red → {FILE}  not scored: no judge",
    )
    (line,) = view_plain.event_lines(state, event(2, "step", step=1, steps=3, stats=PICTURE_STATS))
    assert line.startswith("step 1/3 reward 0.620 accuracy - denoising steps 5 31.2 pictures/s generate 0.31s")
    (line,) = view_plain.event_lines(state, event(2, "step", step=1, steps=3, stats={"denoising_steps": 4.5}))
    assert line == "step 1/3 reward - accuracy - denoising steps 4.5"


def test_an_incorrect_text_without_an_expected_answer_names_none():
    answers = [{"prompt": "1+1=", "response": "3", "answer": "", "reward": 0.0}]
    lines = view_plain.event_lines(ViewState(), event(1, "eval", step=0, accuracy=0.0, count=1, samples=answers))
    assert lines[1] == "  1+1= → 3  incorrect"


def test_the_live_view_shows_pictures_by_their_rewards_and_names_their_folder():
    state = ViewState()
    for one in (
        event(1, "eval", step=0, accuracy=0.0, count=3, samples=pictures(0.0, 0.125, 0.0)),
        event(2, "step", step=1, steps=2, stats=PICTURE_STATS | {"groups/a": 2.0, "groups/b": 2.0}),
        event(3, "eval", step=1, accuracy=1.0, count=3, samples=pictures(1.0, 0.5, 1.0)),
    ):
        state = state.apply(one)
    text = drawn(state)
    rows = [line.strip("│ ").split() for line in text.splitlines() if " reward 0" in line and "red" in line]
    # Equal prompts have different noise: each is compared with itself.
    assert rows == [
        ["red", "✗", "reward", "0", "✓", "reward", "1"],
        ["red", "✗", "reward", "0.125", "✗", "reward", "0.5"],
        ["red", "✗", "reward", "0", "✓", "reward", "1"],
    ]
    assert "pictures in /runs/colours-u/samples/evaluation-0-0" in text
    assert "denoising steps 5   pictures/s 31.2" in text
    for word in ("(empty)", "expected", "tokens", "length", "entropy"):
        assert word not in text


@pytest.mark.parametrize(("judged", "shown"), [(0.95, "95.0%"), (0.953, "95.3%"), (3.2, "3.200")])
def test_judge_score_on_held_out_answers_is_displayed_beside_the_accuracy(judged, shown):
    metrics = {"pass@1": 0.95, "mean@1": 0.95, "part:judged": judged}
    score = {"accuracy": 0.95, "count": 5, "samples": 1, "metrics": metrics}
    one = event(2, "eval", step=1, accuracy=0.95, count=5, by_source={"sums": score})
    (line,) = view_plain.event_lines(ViewState(), one)
    assert line == f"eval: accuracy 95.0%, judged {shown} on 5 held-out prompts after step 1"
    other = event(2, "eval", step=1, accuracy=0.95, count=10, by_source={"sums": score, "words": score})
    assert f"sums 95.0%, judged {shown}; words 95.0%, judged {shown}" in view_plain.event_lines(ViewState(), other)[1]


def test_a_step_that_came_in_parts_says_in_how_many():
    came = ViewState().apply(event(1, "state", state="RUNNING", reason="started"))
    (whole,) = view_plain.event_lines(came, event(2, "step", step=1, steps=3, stats=STATS))
    (parted,) = view_plain.event_lines(came, event(2, "step", step=1, steps=3, stats=STATS | {"parts": 4.0}))
    assert parted == f"{whole} parts 4"


def test_the_plain_view_prints_nothing_for_an_event_that_came_before():
    assert view_plain.event_lines(final(), SCRIPT[3]) == ()


def test_the_live_view_shows_the_run():
    text = drawn(final().observe(JobSnapshot("sums", "u1", "SUCCEEDED")))
    for part in (
        "sums",
        "SUCCEEDED",
        "step 3/3",
        "94.0%",
        "0.620",
        "812",
        "node-0",
        "gone",
        "47+8=",
        "4 of 8 prompt shards moved",
    ):
        assert part in text
    assert "\x1b[2J" not in text


OWNED = [
    event(1, "state", state="RUNNING"),
    event(2, "shards", shares={"node-0": [0, 1, 2, 3], "node-1": [4, 5, 6, 7]}),
]
LEFT = event(3, "member", node="node-1", joined=False)
MOVED = event(4, "shards", shares={"node-0": [0, 1, 2, 3, 4, 5, 6, 7], "node-1": []}, moved=4)


@pytest.mark.parametrize(
    ("events", "now", "maps"),
    [
        pytest.param(OWNED, 103.0, [], id="all are owned"),
        pytest.param([*OWNED, LEFT], 200.0, ["████····", "····████"], id="an owner is missing"),
        pytest.param([*OWNED, LEFT, MOVED], 105.0, ["████████", "········"], id="shards have just moved"),
        pytest.param([*OWNED, LEFT, MOVED], 200.0, [], id="they moved long ago"),
        pytest.param([*OWNED, LEFT, event(4, "state", state="FAILED")], 105.0, [], id="the job has ended"),
    ],
)
def test_the_map_of_shards_is_drawn_only_while_they_move_or_an_owner_is_missing(events, now, maps):
    state = ViewState()
    for one in events:
        state = state.apply(one)
    text = drawn(state, now=now)
    shown = [word for line in text.splitlines() for word in line.split() if set(word) <= set("█·░▒▓")]
    assert shown == maps
    assert "node-0" in text


@given(st.floats(-1e6, 1e6), st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30))
@example(0.0, [10.0, -5e-324])
@example(0.0, [0.0, 5e-324])
def test_a_first_step_never_flattens_the_chart_of_the_others(first, rest):
    low, high = scale_chart([first, *rest], clip_first=True)
    span = max(rest) - min(rest)
    assert low <= min(rest)
    assert max(rest) <= high
    if span > 1e-3:
        assert span >= (high - low) / 3


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
@example([0.0, -5e-324])
@example([1e6, 1e6 - 1e-9])
def test_a_chart_without_clipping_contains_all_its_values(values):
    low, high = scale_chart(values)
    assert low < high
    assert low <= min(values)
    assert max(values) <= high


def test_the_seconds_of_a_slow_first_step_are_named_beside_the_chart():
    state = ViewState()
    for number, seconds in enumerate((90.0, 1.0, 1.2, 1.1), 1):
        state = state.apply(event(number, "step", step=number, steps=4, stats={"seconds": seconds}))
    (line,) = [line for line in drawn(state, width=80).splitlines() if "seconds per step" in line]
    assert "1.10s  (first 1m30s)" in line
    chart = line.partition("per step ")[2].partition("  ")[0]
    assert len(set(chart)) > 2
    assert chart[0] == "█"


def test_a_long_wait_and_a_long_event_wrap_on_words():
    what = "step 2 needs 3 more prompts, " + " ".join(f"word{number}" for number in range(20))
    waiting = (WaitPoint("node-0", what, 100.0),)
    state = ViewState().observe(JobSnapshot("sums", "u1", "RUNNING", waiting=waiting))
    state = state.apply(event(1, "warning", "one " + " ".join(f"event{number}" for number in range(20))))
    text = drawn(state, width=80)
    assert {f"word{number}" for number in range(20)} | {f"event{number}" for number in range(20)} <= set(text.split())
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [20, 60, 80, 110, 200])
def test_the_live_view_can_be_drawn_at_every_moment_in_every_width(width):
    for state, _ in states():
        assert all(len(line) <= max(width, 44) for line in drawn(state, width=width).splitlines())


def test_on_eighty_columns_nothing_wraps_and_no_number_is_torn_from_its_name():
    stats = STATS | {"loss": -0.0123, "kl": 0.0012, "clip_fraction": 0.021, "grad_norm": 12.34, "entropy": 0.345}
    stats |= {"learning_rate": 3e-4, "tokens_per_second": 12345.6, "collect_s": 123.4, "train_s": 301.0}
    state = ViewState()
    for n in range(1, 6):
        state = state.apply(event(n, "step", step=n, steps=1000, stats=stats | {"seconds": 400.0}))
    state = state.apply(event(6, "rollback", to_step=4, lineage=1, reason="rank 0 died"))
    text = drawn(state, now=5000.0, width=80)
    for whole in (
        "gradient norm 12.34",
        "learning rate 3.0e-04",
        "train 5m01s",
        "weight sync 0.10s",
        "step 4/1000",
        "left",
        "rolled back 1×",
    ):
        assert whole in text
    rows = [line for line in text.splitlines() if "step 4/1000" in line or "generate" in line]
    assert len(rows) == 2
    assert ["rolled back" in rows[0], "weight sync" in rows[1]] == [True, True]


def test_a_small_loss_is_not_shown_as_zero():
    state = ViewState().apply(event(1, "step", step=1, steps=2, stats=STATS | {"loss": 5.2e-9, "seconds": 1.0}))
    assert "loss 5.2e-09" in drawn(state, now=10.0, width=80)


def test_the_live_view_says_what_is_waited_for_and_since_when():
    waiting = (WaitPoint("node-0", "step 2 needs 3 more prompts", 100.0),)
    text = drawn(ViewState().observe(JobSnapshot("sums", "u1", "RUNNING", waiting=waiting)), now=112.0)
    assert "node-0: step 2 needs 3 more prompts" in text
    assert "12s" in text


def test_a_picture_is_drawn_from_recorded_events(tmp_path):
    file = tmp_path / "events.jsonl"
    file.write_text("".join(one.to_line() + "\n" for one in SCRIPT))
    (tmp_path / "summary.json").write_text('{"job": "sums", "uid": "u1"}')
    state = draw_view.replay_events(file)
    assert (state.job, state.state) == ("sums", "SUCCEEDED")
    assert draw_view.replay_events(file, until=6).state == "RUNNING"
    image = draw_view.render_svg(state)
    assert image.startswith("<svg")
    assert "SUCCEEDED" in image
    assert image == draw_view.render_svg(state)


def test_a_picture_of_something_else_is_refused(tmp_path):
    file = tmp_path / "events.jsonl"
    file.write_text("no event\n")
    with pytest.raises(UsageError, match="no event"):
        draw_view.replay_events(file)
    with pytest.raises(UsageError, match="cannot read"):
        draw_view.replay_events(tmp_path / "none")


@given(st.text(max_size=80), st.integers(2, 100))
def test_shown_text_has_no_control_characters_and_keeps_to_its_limit(text, limit):
    shown = printable_text(text, limit)
    assert shown.isprintable()
    assert len(shown) <= limit


def test_prompts_that_begin_alike_are_told_apart_by_what_follows():
    system = "system: Answer with a number alone, and with nothing else.\n"
    assert distinguish_texts([system + "user: What is 6 times 7?", system + "user: What is 6 times 8?"], 40) == [
        "…7?",
        "…8?",
    ]
    assert distinguish_texts([system + "Ada has 2 packs", system + "Ben has 3"], 40) == [
        "…Ada has 2 packs",
        "…Ben has 3",
    ]
    assert distinguish_texts(["sort 08652:", "sort 01272:"], 40) == ["sort 08652:", "sort 01272:"]
    assert distinguish_texts([system], 20) == [printable_text(system, 20)]


@given(st.lists(st.text(max_size=80), max_size=4), st.integers(2, 100))
def test_texts_told_apart_have_no_control_characters_and_keep_to_their_limit(texts, limit):
    shown = distinguish_texts(texts, limit)
    assert len(shown) == len(texts)
    assert all(text.isprintable() and len(text) <= limit for text in shown)


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), max_size=6), st.integers(1, 80))
def test_the_parts_of_a_bar_sum_to_its_width(amounts, width):
    cells = divide_cells(amounts, width)
    assert sum(cells.values()) == (width if sum(amounts.values()) > 0 else 0)
    assert all(count >= 0 for count in cells.values())


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(-5, 5)), max_size=50), st.integers(1, 40), st.integers(1, 8))
def test_a_chart_has_its_size_and_a_mark_where_there_is_a_value(points, width, height):
    values = bin_points(points, width)
    lines = draw_chart(values, height=height, low=-5.0, high=5.0)
    assert [len(line) for line in lines] == [width] * height
    assert [line != " " for line in lines[-1]] == [value is not None for value in values]


def test_a_held_curve_goes_on_to_the_present_and_not_further():
    assert fill_gaps((None, 0.5, None, None, None), 3) == (None, 0.5, 0.5, 0.5, None)


@given(st.sets(st.integers(0, 199)), st.integers(1, 200), st.integers(1, 100))
def test_a_shard_map_fits_and_marks_exactly_the_cells_with_shards(owned, count, width):
    owned = {shard for shard in owned if shard < count}
    line = shard_strip(owned, count, width)
    assert len(line) <= width
    assert {n for n, cell in enumerate(line) if cell != "·"} == moved_cells(owned, count, width)


@pytest.mark.parametrize(
    ("value", "shown"), [(0.4249, "0.42s"), (59.4, "59s"), (59.6, "1m00s"), (7620, "2h07m")], ids=str
)
def test_durations_read_as_people_write_them(value, shown):
    assert format_seconds(value) == shown


def of_sources(*names):
    stats = STATS | {
        f"{key}/{name}": value
        for name in names
        for key, value in (("groups", 4.0), ("reward", 0.25), ("response_length", 3.5), ("truncated", 0.5))
    }
    scores = {name: {"accuracy": 0.875, "count": 8} for name in (*names, "held out only")}
    state = final().apply(
        event(20, "step", step=4, steps=9, stats=stats | {"filtered/empty": 2.0, "unknown/kind": 1.0})
    )
    return state.apply(event(21, "eval", step=4, accuracy=0.9, count=16, by_source=scores))


def test_the_live_view_has_a_line_for_each_source():
    text = drawn(of_sources("sums", "words"))
    for name in ("sums", "words"):
        (line,) = [line for line in text.splitlines() if f" {name} " in line and "%" in line and "50%" in line]
        assert line.split()[1:7] == [name, "4", "0.250", "3.5", "50%", "87.5%"]
    assert "empty" in text
    assert "held out only" in text
    assert "kind" not in text


def test_the_live_view_of_a_job_with_one_source_has_no_such_lines():
    assert "cut off" not in drawn(final())


def test_of_many_sources_the_live_view_shows_some_and_counts_the_others():
    assert "and 6 more" in drawn(of_sources(*(f"s{number}" for number in range(10))))


def test_the_plain_view_shows_an_accuracy_for_each_source():
    state = of_sources("sums")
    one = event(22, "eval", step=5, accuracy=0.5, count=4, by_source={"b": {"accuracy": 0.25}, "a": {"accuracy": 0.75}})
    assert view_plain.event_lines(state, one)[1] == "  a 75.0%, b 25.0%"
    alone = event(22, "eval", step=5, accuracy=0.5, count=4, by_source={"data": {"accuracy": 0.5}})
    assert "data" not in " ".join(view_plain.event_lines(state, alone))


PASSED = {"accuracy": 0.25, "count": 4, "samples": 4, "metrics": {"mean@4": 0.25, "pass@1": 0.25, "pass@4": 0.75}}


def test_the_plain_view_shows_what_is_measured_beside_the_accuracy_and_what_could_not_be_scored():
    one = event(22, "eval", step=5, accuracy=0.25, count=4, unscored=3, by_source={"data": PASSED})
    assert view_plain.event_lines(of_sources("sums"), one)[1:3] == (
        "  data 25.0%, pass@4 75.0%",
        "  3 responses could not be scored and count as incorrect",
    )
    parts = {**PASSED, "metrics": {"mean@4": -0.5, "pass@1": 0.25}}
    one = event(22, "eval", step=5, accuracy=0.25, count=4, by_source={"b": parts, "a": {"accuracy": 1.0}})
    assert view_plain.event_lines(of_sources("sums"), one)[1] == "  a 100.0%; b 25.0%, mean@4 -0.500"


def test_an_answer_is_right_if_the_evaluation_says_so_and_one_that_was_not_scored_says_why():
    samples = [
        {"prompt": "1+1=", "response": "3", "answer": "2", "reward": 0.5, "correct": False},
        {"prompt": "1+2=", "response": "3", "answer": "3", "reward": -0.5, "correct": True},
        {"prompt": "1+3=", "response": "4", "answer": "x", "reward": 0.0, "correct": False, "unscored": "no number"},
    ]
    one = event(1, "eval", step=0, accuracy=0.25, count=4, samples=samples)
    wrong, right, unscored = view_plain.event_lines(ViewState(), one)[1:]
    assert "incorrect, expected 2" in wrong
    assert right.endswith("  correct")
    assert unscored.endswith("not scored: no number")


def test_the_live_view_has_pass_at_k_and_where_it_was_best():
    state = of_sources("sums").apply(event(30, "eval", step=5, accuracy=0.25, count=4, by_source={"sums": PASSED}))
    assert "25.0%, pass@4 75.0%" in drawn(state)
    best = replace(state, best=BestPoint(3, "accuracy", 0.985))
    assert "best 98.5% (step 3)" in drawn(best)
    now = replace(state, best=BestPoint(5, "accuracy", 0.25))
    assert "best" not in drawn(now)


def test_plug_in_fault_is_displayed_with_its_escaped_traceback():
    trace = 'Traceback (most recent call last):\n  File "mine.py", line 2, in score\nKeyError: \x1b[2Jx'
    told = event(9, "fault", "reward 'mine' raised KeyError", what="...", trace=trace, node="node-0")
    head, *rest = view_plain.event_lines(ViewState(), told)
    assert head == "fault: reward 'mine' raised KeyError"
    assert rest[1] == '    File "mine.py", line 2, in score'
    assert len(rest) == 3
    assert "\x1b" not in rest[2]
