"""Which pages of a cache are free, which are used, and which hold known prefixes.

Plain Python, of page numbers and tokens; nothing of arrays. A page is free, or in use
by one request or more, or idle: nobody uses it, but it holds a prefix that may be asked
for again, and is taken only where no page is free, the longest unused first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

# A page's name: the serial number of the page before it, 0 for none, and its tokens. So
# pages are equal by all their tokens up to here; a hash alone never says so.
_Name = tuple[int, tuple[int, ...]]


class Pages:
    """The pages of one pool of memory.

    A page is named once all its positions are written, and not written again; so what
    is shared needs no copies. `free + used + cached` is always `count`.

    Attributes:
      count: pages in all.
      size: positions of each.
    """

    def __init__(self, count: int, size: int) -> None:
        if count < 1 or size < 1:
            raise ValueError(
                f"expected at least a page of a position; found {count} of {size}"
            )
        self.count, self.size = count, size
        self._free = list(range(count))[::-1]  # the lowest is taken first
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._page_of: dict[_Name, int] = {}
        self._name_of: dict[int, tuple[int, _Name]] = {}  # and its serial number
        self._serial = 0

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that requests have, each counted once."""
        return len(self._users)

    @property
    def cached(self) -> int:
        """Pages that nobody uses and that hold a known prefix."""
        return len(self._idle)

    def match(self, tokens: Sequence[int], *, use: bool = True) -> list[int]:
        """The named pages that hold the longest prefix of whole pages, in order.

        They are nobody's yet. With `use` they count as used just now; without, this
        changes nothing.
        """
        found: list[int] = []
        serial = 0
        for at in range(0, len(tokens) - self.size + 1, self.size):
            page = self._page_of.get((serial, tuple(tokens[at : at + self.size])))
            if page is None:
                break
            found.append(page)
            serial = self._name_of[page][0]
        # The last first: without the page before it a page cannot be found.
        for page in reversed(found) if use else ():
            if page in self._idle:
                self._idle.move_to_end(page)
        return found

    def room(self, shared: Iterable[int] = ()) -> int:
        """Pages that `take` could give to one who shares these."""
        return self.free + self.cached - sum(page in self._idle for page in shared)

    def share(self, pages: Iterable[int]) -> None:
        """One more uses these named pages."""
        for page in pages:
            self._idle.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1

    def take(self, count: int) -> list[int]:
        """So many pages for one user; what they hold is lost.

        Raises:
          ValueError: there are no more than `room()`.
        """
        if count > self.room():
            raise ValueError(f"expected room for {count} pages, found {self.room()}")
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._unname(page)
            self._users[page] = 1
            taken.append(page)
        return taken

    def name(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Makes a request's pages known, as far as `tokens` fill them.

        Where another page has the same prefix already it stays the one that is found,
        and what follows goes without a name: the page before might be gone before it.
        """
        serial = 0
        for at, page in enumerate(pages[: len(tokens) // self.size]):
            some = tokens[at * self.size : (at + 1) * self.size]
            name = (serial, tuple(some))
            if self._page_of.setdefault(name, page) != page:
                return
            if page not in self._name_of:
                self._serial += 1
                self._name_of[page] = self._serial, name
            serial = self._name_of[page][0]

    def give_back(self, pages: Sequence[int]) -> None:
        """One user less of these, which are a request's, in order."""
        for page in reversed(pages):  # see `match`
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._name_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def forget(self, pages: Iterable[int]) -> None:
        """Takes the names of these, and of all that follow them, away."""
        gone = [page for page in pages if page in self._name_of]
        while gone:
            serials = {self._unname(page) for page in gone}
            for page in gone:
                if page in self._idle:
                    del self._idle[page]
                    self._free.append(page)
            gone = [p for p, (_, name) in self._name_of.items() if name[0] in serials]

    def _unname(self, page: int) -> int:
        """Takes a page's name away; returns its serial number."""
        serial, name = self._name_of.pop(page)
        del self._page_of[name]
        return serial
