"""`Certificate`: what was proven of a step, and in which way."""

import collections
import dataclasses

#: The ways in which transforms are proven.
_BITS, _ORDER = "bit by bit", "but for the order of sums"


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The proof that the programs of a step compute its function; see `certify`.

    Args:
        results: the number of results that were compared.
        ranks: the number of ranks.
        tasks: the number of tasks, and of parts around the loops, that the ranks run.
        messages: the number of messages between ranks.
        effects: the number of effects, such as prints.
        terms: the number of different values that were met.
        equations: the number of equations that were run on these values.
        exact: whether the ranks do the same operations in the same order as the scheduled function
            on one device. If not, sums are in another order.
        regrouped: how many results of the ranks are equal but for the order of sums.
        reordered: how many results of the scheduled function are those of the function, with each
            transform by its definition, but for the order of sums.
        rescaled: how many are so over the real numbers alone: they are added up or multiplied in
            another order, such as a gradient that is taken of a loop, and scaled after it.
        rounded: how many are so if casts do not count: they are cast at other places than by the
            definitions, such as a gradient that is taken of a loop whose loss has a narrow type.
        transforms: the transforms that are proven.
        undecided: why those before `place` are not proven, if they are not.
        edits: the rules of `jaxpp.extend.edit_loops` that change values, or add some: the edited
            loops are then what the programs compute, and the transforms before are not decided.
        passes: the passes of `place` after each of which the step was compared.
        seconds: how long it took, in seconds.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> loss = jaxpp.wrap_forward(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> grad = jaxpp.microbatch(jax.grad(loss), 2)
        >>> step = jaxpp.place(jaxpp.schedule(grad, jaxpp.schedules.OneFOneB()))
        >>> certificate = jaxpp.certify(step, jnp.eye(2), jnp.ones((4, 2)))
        >>> certificate.exact, certificate.ranks, certificate.transforms[-1]
        (True, 1, 'place')
    """

    results: int
    ranks: int
    tasks: int
    messages: int
    effects: int
    terms: int
    equations: int
    exact: bool
    regrouped: int
    reordered: int
    rescaled: int
    rounded: int
    transforms: tuple[str, ...]
    undecided: str
    passes: tuple[str, ...]
    seconds: float
    edits: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = "edited function" if self.edits else "function"
        parts = [f"{self.results} results of {self.ranks} ranks are those of the {what}"]
        verb = "are" if len(self.transforms) > 1 else "is"
        parts += [f"{how}: {', '.join(names)}" for how, names in self._proven().items()]
        lines = [
            f"{parts[0]}, {'; '.join(parts[1:])} {verb} proven",
            f"  {self.tasks} tasks, {self.messages} messages, {self.effects} effects; "
            f"{self.equations} equations on {self.terms} values in {self.seconds:.2f} s",
        ]
        if self.regrouped:
            lines.append(
                f"  {self.regrouped} results of the ranks have sums in another order than the "
                f"scheduled function: equal for all values, unless a sum overflows"
            )
        for count, why in (
            (
                self.reordered,
                "have sums in another order than by definition: equal for all values, unless a sum "
                "overflows",
            ),
            (
                self.rescaled,
                "are multiplied or added up in another order than by definition: equal for finite "
                "values, but for rounding",
            ),
            (
                self.rounded,
                "are cast at other places than by definition: equal for finite values, but for the "
                "rounding of the narrowest type",
            ),
        ):
            if count:
                lines.append(f"  {count} results of the scheduled function {why}")
        if self.edits:
            lines.append(f"  edited, as no transform is defined to do, by {', '.join(self.edits)}")
        if self.undecided:
            lines.append(f"  NOT PROVEN of the other transforms: {self.undecided}")
        return "\n".join(lines)

    def _proven(self) -> dict[str, list[str]]:
        """The transforms that are proven, by how; those in the strongest way come first."""
        before = _BITS
        for count, how in (
            (self.reordered, _ORDER),
            (self.rescaled, "over the real numbers"),
            (self.rounded, "but for their rounding"),
        ):
            before = how if count else before
        placed = _ORDER if self.regrouped else _BITS
        found = collections.defaultdict[str, list[str]](list)
        for how in (_BITS, _ORDER, before):
            own = [n for n in self.transforms if (placed if n == "place" else before) == how]
            found |= {how: own} if own else {}
        return found
