"""Stop strings: found over token borders, nothing of them leaks, held text comes out once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stop import StopMatcher


def run(stops: list[str], parts: list[str]) -> tuple[list[str], str | None]:
    """Return what was let out after each part (and at the end), and the stop string that matched."""
    matcher = StopMatcher(stops)
    out = [matcher.feed(part).text for part in parts]
    if matcher.matched is None:
        out.append(matcher.flush())
    return out, matcher.matched


def first_end(text: str, stop: str) -> int:
    at = text.find(stop)
    return at + len(stop) if at >= 0 else len(text) + 1


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    end, _, stop = min((first_end(text, stop), -len(stop), stop) for stop in stops)
    return (text, None) if end > len(text) else (text[: end - len(stop)], stop)


@given(
    stops=st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4),
    parts=st.lists(st.text("ab.c", max_size=4), max_size=12),
)
def test_any_cutting_of_a_text_gives_what_the_whole_text_gives(stops: list[str], parts: list[str]) -> None:
    out, matched = run(stops, parts)
    assert ("".join(out), matched) == expected(stops, "".join(parts))


@given(
    stops=st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4),
    parts=st.lists(st.text("ab.c", max_size=4), max_size=12),
)
def test_only_what_may_become_a_stop_string_is_held(stops: list[str], parts: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen, sent = "", ""
    for part in parts:
        seen += part
        sent += matcher.feed(part).text
        if matcher.matched is not None:
            return
        held = seen[len(sent) :]
        assert seen == sent + held
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_cut_over_tokens_leaks_nothing() -> None:
    assert run(["<END>"], ["one <", "E", "ND", "> two"]) == (["one ", "", "", ""], "<END>")


def test_one_that_is_never_completed_comes_out_at_the_end() -> None:
    assert run(["<END>"], ["one <", "EN"]) == (["one ", "", "<EN"], None)


def test_held_text_comes_out_when_it_turns_out_to_be_something_else() -> None:
    assert run(["aab"], ["aa", "aa", "c"]) == (["", "aa", "aac", ""], None)


@pytest.mark.parametrize("stops", [["b", "ab"], ["ab", "b"]])
def test_of_two_that_end_together_the_longer_one_wins(stops: list[str]) -> None:
    assert run(stops, ["xab"]) == (["x"], "ab")


def test_what_follows_a_stop_string_is_dropped() -> None:
    matcher = StopMatcher(["."])
    assert matcher.feed("one. two").text == "one"
    assert matcher.feed(" three").text == ""
    assert matcher.flush() == ""
