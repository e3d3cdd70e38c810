"""Text from bytes: however they are cut, the pieces joined are the same text, with no half of a character and nothing of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.serving.text import TextStream

CHARACTERS = st.sampled_from(["a", "b", "ab", "\n", "é", "語", "😀", "\ufffd"])
DATA = st.lists(CHARACTERS.map(str.encode) | st.binary(min_size=1, max_size=3), max_size=30).map(b"".join)
STOPS = st.lists(st.lists(CHARACTERS, min_size=1, max_size=4).map("".join), max_size=4)


def pieces(data: bytes, cuts: list[int], stops: list[str]) -> list[str]:
    stream, ends = TextStream(stops), [*sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [*(stream.feed(data[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)), stream.end()]


def slow(data: bytes, stops: list[str]) -> str:
    """By the definition: the shortest beginning that ends in a stop string, without the longest that it ends in."""
    text = data.decode("utf-8", "replace")
    for stop in range(len(text) + 1):
        met = [one for one in stops if text[:stop].endswith(one)]
        if met:
            return text[: stop - len(max(met, key=len))]
    return text


@settings(max_examples=400, deadline=None)
@given(DATA, st.lists(st.integers(0, 100), max_size=30), STOPS)
def test_the_pieces_joined_are_the_text_up_to_the_first_stop(data: bytes, cuts: list[int], stops: list[str]):
    assert "".join(pieces(data, cuts, stops)) == slow(data, stops)


@settings(max_examples=200, deadline=None)
@given(DATA, STOPS)
def test_nothing_is_held_back_that_cannot_become_a_stop(data: bytes, stops: list[str]):
    stream, text = TextStream(stops), ""
    for n in range(len(data)):
        text += stream.feed(data[n : n + 1])
        if stream.stopped:
            return
        whole = slow(data[: n + 1], [])
        tail = whole[len(text) :].rstrip("\ufffd")  # a character that is not whole yet: up to three bytes, each of which may be none
        assert whole.startswith(text)
        assert not tail or any(stop.startswith(tail) for stop in stops)


@settings(max_examples=200, deadline=None)
@given(DATA)
def test_each_byte_knows_its_character(data: bytes):
    stream, text = TextStream(), data.decode("utf-8", "replace")
    for n in range(len(data)):
        stream.feed(data[n : n + 1])
        assert 0 <= stream.place < len(text)
        if data[n] < 0x80:
            assert text[stream.place] == chr(data[n])


@pytest.mark.parametrize("cut", range(1, 5))
def test_an_emoji_over_two_pieces_is_one_character(cut: int):
    assert pieces("x😀".encode(), [1, cut], [])[-3:] in (["", "😀", ""], ["😀", "", ""], ["x", "😀", ""])
    assert "".join(pieces("x😀".encode(), [1, cut], [])) == "x😀"


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_character_that_is_cut_at_the_end_gives_one_replacement(missing: int):
    assert pieces("so 😀".encode()[:-missing], [1, 2, 4], [])[-1] == "\ufffd"


@pytest.mark.parametrize("cuts", [[], [3], [5, 6, 7, 8], list(range(12))])
def test_a_stop_is_never_begun(cuts: list[int]):
    given_out = pieces(b"...ABCDEFGHIJKL", cuts, ["DEFGHIJ"])
    assert "".join(given_out) == "...ABC"
    assert not any("D" in piece for piece in given_out)


def test_of_two_stops_the_one_that_is_whole_first_counts_in_any_pieces():
    for cuts in ([], [1, 2, 3]):
        assert "".join(pieces(b"abcd", cuts, ["abcd", "c"])) == "ab"
        assert "".join(pieces(b"xabc", cuts, ["c", "abc"])) == "x"


def test_what_looked_like_a_stop_comes_after_all():
    stream = TextStream(["END."])
    assert [stream.feed(b) for b in (b"the E", b"N", b"D", b" is near")] == ["the ", "", "", "END is near"]
