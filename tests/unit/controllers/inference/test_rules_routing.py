"""Which engine a request goes to."""

from hypothesis import given
from hypothesis import strategies as st

from controllers.inference.rules import RouteCandidate, choose_engine

loads = st.lists(
    st.builds(RouteCandidate, instance=st.sampled_from("abcdef"), owed=st.integers(0, 64), serving=st.booleans()),
    unique_by=lambda load: load.instance,
)
sizes = st.integers(1, 16)


def test_nobody_serves_and_nobody_is_on_the_way() -> None:
    assert choose_engine([], 8) is None


def test_of_two_that_are_equally_busy_the_one_that_serves_is_taken() -> None:
    assert choose_engine([RouteCandidate("a", 8, serving=False), RouteCandidate("b", 8, serving=True)], 8) == "b"


@given(loads, sizes)
def test_a_new_request_goes_to_the_least_busy_whether_it_serves_or_is_on_its_way(
    found: list[RouteCandidate], size: int
) -> None:
    chosen = choose_engine(found, size)
    assert (chosen is None) == (not found)
    assert all(load.owed >= next(c for c in found if c.instance == chosen).owed for load in found)


@given(st.integers(1, 40), st.integers(2, 5), sizes)
def test_a_burst_is_dealt_evenly_while_only_one_of_them_serves(requests: int, engines: int, size: int) -> None:
    samples = dict.fromkeys(range(engines), 0)
    for _ in range(requests):
        chosen = choose_engine([RouteCandidate(str(e), n, serving=e == 0) for e, n in samples.items()], size)
        assert chosen is not None
        samples[int(chosen)] += size
    assert max(samples.values()) - min(samples.values()) <= size


@given(loads, sizes, st.sampled_from("abcdef"))
def test_a_request_moves_only_to_one_that_serves_and_is_then_no_busier(
    found: list[RouteCandidate], size: int, held: str
) -> None:
    own = next((load for load in found if load.instance == held), None)
    chosen = next((load for load in found if load.instance == choose_engine(found, size, held)), None)
    if own is None or chosen is None or chosen.instance == held:
        return
    assert not own.serving
    assert chosen.serving
    assert chosen.owed + size <= own.owed


@given(st.integers(1, 12), sizes)
def test_an_engine_that_never_comes_up_holds_nothing_back(requests: int, size: int) -> None:
    """One serves and answers one request after the other; those that wait for the other engine all get there."""
    serving, waiting = 0, requests
    for _ in range(2 * requests):
        serving = max(0, serving - 1)
        own = waiting * size
        while (
            waiting
            and choose_engine([RouteCandidate("a", serving * size, True), RouteCandidate("b", own, False)], size, "b")
            == "a"
        ):
            serving, waiting = serving + 1, waiting - 1
            own = waiting * size
    assert waiting == 0
