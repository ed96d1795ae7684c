"""Kinds of tasks: one record each, which all that deals with tasks reads."""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal


class _Kinds(type):
    """Makes the class of kinds a collection: of all that there are."""

    _known: "dict[str, Kind]"

    def __iter__(cls) -> "Iterator[Kind]":
        return iter(tuple(cls._known.values()))

    def __len__(cls) -> int:
        return len(cls._known)

    def __contains__(cls, letter: object) -> bool:
        return letter in cls._known


class Kind(str, metaclass=_Kinds):
    """A kind of task: `F` forward, `B` backward and its halves, a further one, or yours.

    `I` gives the cotangents of a stage's inputs, which the stage before waits for; `W` gives the
    gradients of its weights, which nothing waits for. `B` is `I`, then `W`. `R` computes the
    activations again that the backward reads: the `F` of its stage and microbatch drops them. `O`
    offloads them to the memory of the host, and `L` loads them back. `G` gathers the parameters of
    its stage for tasks from the `F` of its microbatch on, and `H` from a backward of it on. `S`
    sums the gradients of its stage over replicas, up to those of its microbatch.

    A kind is its letter, a `str`, with a record of all that is known of it; a new kind is one
    value: a capital letter, its title, and further fields by name. The letter alone gives a kind
    that there is: `Kind("F")`.

    Attributes:
      title: what it does, for legends.
      after: the kinds that come before it, of its stage and microbatch.
      makes: the kind whose results it makes, for the tasks of its stage that come after it: an `R`
        makes those of the `F`, and an `I` those of a `B`.
      parts: the kinds whose costs add up to its own, where it has none.
      cost: its time, where `Costs` has none.
      holds: the change of the activations that its rank holds.
      lane: what of its rank it runs on: `"compute"`, or, beside the tasks that compute, `"copy"` or
        `"collective"`. A rank starts its tasks in their order; those of one lane run one after the
        other.
      of_stage: whether what it makes is of its stage, not of a microbatch: the tasks of the stage
        that come after it on its rank read it, up to the next task that `makes` the same.
      takes: of what is `of_stage`, the kinds of the stage's tasks before it, since the last one of
        its kind, whose sums it takes, and combines over replicas; none where it makes something for
        those after it.
      field: the field of `Costs` and `Memory` that it has; by default an entry of their `other`.
      colours: in drawings, of a rank's first stage and of its last.

    Raises:
      ValueError: the letter is none, or is that of another kind; or it makes what is of a stage
        and is not of one itself, or the other way round; or it takes sums and is not of a stage.

    >>> Kind("F") is Kind.F, Kind.W == "W", Kind.R.title
    (True, True, 'recompute')
    >>> note = Kind("N", "note", after="F", cost=0.5)
    >>> Kind("N") is note
    True
    """

    _known: ClassVar[dict[str, "Kind"]] = {}
    F: ClassVar["Kind"]
    B: ClassVar["Kind"]
    I: ClassVar["Kind"]  # noqa: E741
    W: ClassVar["Kind"]
    R: ClassVar["Kind"]
    O: ClassVar["Kind"]  # noqa: E741
    L: ClassVar["Kind"]
    G: ClassVar["Kind"]
    H: ClassVar["Kind"]
    S: ClassVar["Kind"]

    title: str  # pyright: ignore[reportIncompatibleMethodOverride]
    after: tuple[str, ...]
    makes: str
    parts: tuple[str, ...]
    cost: float
    holds: float
    lane: Literal["compute", "copy", "collective"]
    of_stage: bool
    takes: tuple[str, ...]
    field: str
    colours: tuple[str, str]

    def __new__(
        cls,
        letter: str,
        title: str | None = None,
        *,
        after: Iterable[str] = (),
        makes: str = "",
        parts: Iterable[str] = (),
        cost: float = 1.0,
        holds: float = 0.0,
        lane: Literal["compute", "copy", "collective"] = "compute",
        of_stage: bool = False,
        takes: Iterable[str] = (),
        field: str = "",
        colours: tuple[str, str] = ("#4d5663", "#c3c9d1"),
    ) -> "Kind":
        known = cls._known.get(letter)
        if title is None:
            if known is None:
                raise ValueError(
                    f"{letter!r} is no kind of task; the kinds are {listed(Kind)}. Give a new one "
                    f"a title: Kind({letter!r}, 'what it does')."
                )
            return known
        if len(letter) != 1 or not "A" <= letter <= "Z":
            raise ValueError(f"a kind of task is named by one capital letter, got {letter!r}.")
        self = super().__new__(cls, letter)
        self.title, self.field = title, field
        self.after, self.makes, self.parts = tuple(after), makes, tuple(parts)
        self.cost, self.holds, self.lane, self.colours = cost, holds, lane, colours
        self.of_stage, self.takes = of_stage, tuple(takes)
        if known is None:
            self._check()
            return cls._known.setdefault(letter, self)
        if vars(known) != vars(self):
            raise ValueError(
                f"{letter!r} is the kind {known.title!r} already, and would be {title!r} with "
                f"other fields; give the new kind another letter."
            )
        return known

    def __repr__(self) -> str:
        return f"Kind({str(self)!r})"

    def __str__(self) -> str:
        return str.__str__(self)

    def __reduce__(self) -> Any:
        if self.is_own:
            return Kind, (str(self),)
        # With its record: another process need not have imported who made the kind.
        named = tuple(map(Kind, self._named))
        return _restored, (str(self), dict(vars(self)), named)

    @property
    def _named(self) -> tuple[str, ...]:
        """The letters of the kinds that it comes after, takes and makes, which have to be there."""
        return (*self.after, *self.takes, *filter(None, [self.makes]))

    @property
    def is_own(self) -> bool:
        """Tells whether the kind is one of the library's own."""
        return self in "FBIWROLGHS"

    @property
    def before(self) -> "tuple[Kind, ...]":
        """The kinds of its stage and microbatch that come before it, where the table has them.

        These are the kinds of `after`, and those that stand in for one of them: which make its
        results, and do not come after this kind themselves.

        >>> Kind.B.before[:3], Kind.L.before
        ((Kind('F'), Kind('R'), Kind('L')), (Kind('O'),))
        """
        found = []
        for need in map(Kind, self.after):
            found.append(need)
            if self.makes != need:
                found += [k for k in Kind if k.makes == need and not k._comes_after(self)]
        return tuple(dict.fromkeys(found))

    def _check(self) -> None:
        """Refuses a new kind that names kinds which are not there, or that no task can do."""
        for other in self._named:
            Kind(other)
        if self.makes and self.of_stage != Kind(self.makes).of_stage:
            own, other = ("is", "is not") if self.of_stage else ("is not", "is")
            raise ValueError(
                f"the kind {self} ({self.title}) {own} of_stage, but makes what {self.makes} does, "
                f"which {other} of_stage; give both the same."
            )
        if self.takes and (self.makes or not self.of_stage):
            takes = listed(map(Kind, self.takes))
            raise ValueError(
                f"the kind {self} ({self.title}) takes the sums of {takes}, so that it is "
                f"of_stage=True and makes nothing; correct it, or give it no takes."
            )

    def _comes_after(self, other: "Kind") -> bool:
        return self == other or any(Kind(k)._comes_after(other) for k in self.after)


def _restored(letter: str, record: dict[str, Any], named: tuple[Kind, ...]) -> Kind:
    """Makes a kind of its record, after those that it names."""
    return Kind(letter, record.pop("title"), **record)


def listed(kinds: Iterable[Kind], word: str = "and") -> str:
    """Lists kinds, in the order in which they were made: `F, B and I`."""
    kinds = set(kinds)
    names = [str(kind) for kind in Kind if kind in kinds]
    return f" {word} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# The colours are near to those of terminals, so that a kind looks the same there.
Kind.F = Kind("F", "forward", holds=1.0, field="forward", colours=("#2b66ad", "#a9cdf0"))
Kind.B = Kind("B", "backward", after="F", parts="IW", cost=2.0, holds=-1.0, field="backward",
              colours=("#2e8b4b", "#addcb0"))  # fmt: skip
Kind.I = Kind("I", "input gradient", after="F", makes="B", field="input_grad",
              colours=("#a82e5e", "#f0b4c0"))  # fmt: skip
Kind.W = Kind("W", "weight gradient", after="FI", holds=-1.0, field="weight_grad",
              colours=("#dba032", "#fae294"))  # fmt: skip
Kind.R = Kind("R", "recompute", after="F", makes="F", parts="F", holds=1.0, field="recompute",
              colours=("#6b4fa0", "#cfc0ea"))  # fmt: skip
Kind.O = Kind("O", "offload", after="F", holds=-1.0, lane="copy", field="offload",
              colours=("#5f6b73", "#c4ccd1"))  # fmt: skip
Kind.L = Kind("L", "load", after="O", makes="F", holds=1.0, lane="copy", field="load",
              colours=("#2a8c8c", "#a6dcdc"))  # fmt: skip
# They hold parameters and gradients, which `Memory` counts only if it is told to.
Kind.G = Kind("G", "gather", lane="collective", of_stage=True, field="gather",
              colours=("#b5533c", "#ecc2b5"))  # fmt: skip
Kind.H = Kind("H", "gather again", makes="G", parts="G", lane="collective", of_stage=True,
              colours=("#8f6a4a", "#dcc9b4"))  # fmt: skip
Kind.S = Kind("S", "sum over replicas", lane="collective", of_stage=True, takes="BIW",
              field="reduce", colours=("#7a7a2e", "#d6d6a8"))  # fmt: skip
