"""Pages: nothing is lost, nothing is given twice, and what is found is what it says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut_jax.engine.pages import Pages

SIZE = 2


class Batch:
    """Requests that share a pool, and what each page holds as they write it."""

    def __init__(self, count):
        self.pages = Pages(count, SIZE)
        self.held = {}  # pages of each request, and its tokens
        self.holds = {}  # page: all tokens up to its end, as far as they are written
        self.number = 0

    def write(self, key):
        pages, tokens = self.held[key]
        for i, page in enumerate(pages):
            end = min((i + 1) * SIZE, len(tokens))
            if i * SIZE < end:
                self.holds[page] = tokens[:end]

    def enter(self, tokens, extra):
        pool = self.pages
        shared = pool.match(tokens[:-1])
        assert len(shared) * SIZE < len(tokens)
        for i, page in enumerate(shared):
            assert self.holds[page] == tokens[: (i + 1) * SIZE]
        need = -(-(len(tokens) + extra) // SIZE) - len(shared)
        if need > pool.room(shared):
            return
        pool.share(shared)
        before = dict(self.holds)
        own = pool.take(need)
        self.held[self.number] = [*shared, *own], tokens
        self.write(self.number)
        pool.name(tokens, self.held[self.number][0])
        for page in shared:
            assert self.holds[page] == before[page]
        self.number += 1

    def grow(self, key, token):
        pages, tokens = self.held[key]
        if len(tokens) == len(pages) * SIZE:
            if not self.pages.room():
                return
            pages.extend(self.pages.take(1))
        self.held[key] = pages, (*tokens, token)
        self.write(key)

    def leave(self, key, known):
        pages, tokens = self.held.pop(key)
        self.pages.name(tokens[: min(known, len(tokens))], pages)
        self.pages.give_back(pages)

    def spoil(self, key):
        pages, _ = self.held.pop(key)
        self.pages.forget(pages)
        self.pages.give_back(pages)

    def check(self):
        pool = self.pages
        used = {page for pages, _ in self.held.values() for page in pages}
        assert pool.used == len(used)
        assert pool.free + pool.used + pool.cached == pool.count
        for pages, tokens in self.held.values():
            assert len(set(pages)) == len(pages)
            for i, page in enumerate(pages):  # nobody wrote over it
                end = min((i + 1) * SIZE, len(tokens))
                if i * SIZE < end:
                    assert self.holds[page] == tokens[:end]
        assert pool.room() == pool.count - len(used)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "grow", "grow", "grow", "leave", "spoil"]),
        st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple),
        st.integers(0, 9),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(count=st.integers(1, 9), events=EVENTS)
def test_whatever_happens_pages_add_up_and_hold_what_they_are_found_for(count, events):
    batch = Batch(count)
    for what, tokens, number in events:
        running = sorted(batch.held)
        if what == "enter":
            batch.enter(tokens, number % 3)
        elif running:
            key = running[number % len(running)]
            match what:
                case "grow":
                    batch.grow(key, tokens[0])
                case "leave":
                    batch.leave(key, number)
                case "spoil":
                    batch.spoil(key)
        batch.check()
    for key in list(batch.held):
        batch.leave(key, 99)
    # What nobody uses and has a name can be found, each page by its own tokens.
    pool = batch.pages
    found = {
        page
        for tokens in batch.holds.values()
        for page in pool.match(tokens)
        if pool.cached
    }
    assert len(found) == pool.cached
    assert pool.used == 0
    assert len(pool.take(count)) == count  # all are to be had
    assert pool.cached == 0


class TestByHand:
    def test_a_prefix_of_whole_pages_is_found(self):
        pages = Pages(4, SIZE)
        held = pages.take(3)
        pages.name((1, 2, 3, 4, 5), held)
        assert pages.match((1, 2, 3, 4, 5, 6)) == held[:2]
        assert pages.match((1, 2, 3)) == held[:1]
        assert pages.match((1,)) == []
        assert pages.match((2, 1, 3, 4)) == []
        # The same tokens behind another page are another page.
        assert pages.match((3, 4)) == []

    def test_the_longest_unused_goes_first_and_the_end_before_the_beginning(self):
        pages = Pages(4, SIZE)
        old, new = pages.take(2), pages.take(2)
        pages.name((1, 2, 3, 4), old)
        pages.name((5, 6, 7, 8), new)
        pages.give_back(old)
        pages.give_back(new)
        pages.match((1, 2, 3, 4))  # used just now
        assert pages.take(1) == [new[1]]
        assert pages.match((5, 6, 7, 8)) == new[:1]
        assert pages.take(3) == [old[1], old[0], new[0]]

    def test_what_is_shared_is_nobodys_until_the_last_leaves(self):
        pages = Pages(3, SIZE)
        first = pages.take(2)
        pages.name((1, 2, 3), first)
        shared = pages.match((1, 2, 9))
        assert shared == first[:1]
        pages.share(shared)
        pages.give_back(first)
        assert (pages.free, pages.used, pages.cached) == (2, 1, 0)
        pages.give_back(shared)
        assert (pages.free, pages.used, pages.cached) == (2, 0, 1)
        assert pages.room(shared) == 2

    def test_names_are_taken_from_all_that_follows(self):
        pages = Pages(4, SIZE)
        held = pages.take(3)
        pages.name((1, 2, 3, 4, 5, 6), held)
        pages.give_back(held)
        pages.forget(held[1:2])
        assert pages.match((1, 2, 3, 4, 5, 6)) == held[:1]
        assert (pages.free, pages.cached) == (3, 1)

    def test_more_than_there_are(self):
        pages = Pages(2, SIZE)
        with pytest.raises(ValueError, match="room for 3 pages, found 2"):
            pages.take(3)
        with pytest.raises(ValueError, match="at least a page"):
            Pages(0, SIZE)
