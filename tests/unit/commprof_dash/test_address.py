"""Test the state of a page in its address."""

from hypothesis import given
from hypothesis import strategies as st

from commprof_dash import address

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=30)


@given(st.lists(NAMES, max_size=5), NAMES)
def test_a_link_is_read_back_as_it_was_made(runs, measure):
    link = address.link("/compare", run=runs, measure=measure)
    path, _, search = link.partition("?")
    assert path == "/compare"
    assert address.parse(f"?{search}") == {"run": tuple(runs), "measure": (measure,)}


def test_no_query_says_nothing_and_an_empty_value_says_none():
    assert address.parse("") == {}
    assert address.parse(None) == {}
    assert address.parse("?run=") == {"run": ()}


def test_one_falls_back_to_the_default():
    allowed = {"wire": 1, "payload": 2}
    assert address.one({"measure": ("payload",)}, "measure", allowed, "wire") == "payload"
    assert address.one({"measure": ("nonsense",)}, "measure", allowed, "wire") == "wire"
    assert address.one({"measure": ()}, "measure", allowed, "wire") == "wire"
    assert address.one({}, "measure", allowed, "wire") == "wire"
