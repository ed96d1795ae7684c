"""`Layers`: the costs of a chain of layers, or of a graph of them."""

import dataclasses
import itertools
import math
import numbers
from collections.abc import Iterable, Sequence

#: A time, or a number of bytes, is less than this, so that sums of many are numbers, too.
_LARGEST = 1e100


@dataclasses.dataclass(frozen=True)
class Layers:
    """The costs of layers in their order, for one microbatch, in any one unit of time and of bytes.

    Args:
        forward: the time of each layer's forward.
        input_grad: the time of each input gradient; none where a backward is not to be split.
        weight_grad: the time of each weight gradient; the same.
        backward: the time of each whole backward; by default that of its two halves.
        activation_bytes: what each layer keeps from its forward until its weight gradient.
        parameter_bytes: what each layer has of parameters.
        crossing: the bytes that cross from each layer, but the last, to the next one.
        temporary_bytes: what a task of each layer needs while it runs, beside all that.
        copy: the time in which what each layer keeps goes to the memory of the host, or back; none
            where nobody knows.
        names: a name for each layer, as `split_stages(at=)` takes it.
        inputs: for each layer the numbers of those that it reads, all earlier ones; none where each
            reads the one before. What crosses a cut is then sent by the stage before it.

    Raises:
        ValueError: a list has another length, a number is negative or not finite, a layer reads a
            later one, or there are neither halves nor whole backwards.

    Example:
        >>> layers = Layers(forward=(1.0, 2.0), backward=(2.0, 4.0))
        >>> layers.count, layers.work(halves=False)
        (2, (3.0, 6.0))
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...] = ()
    weight_grad: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()
    parameter_bytes: tuple[float, ...] = ()
    crossing: tuple[float, ...] = ()
    temporary_bytes: tuple[float, ...] = ()
    copy: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    inputs: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            if not isinstance(values, Iterable):
                raise ValueError(
                    f"Layers: {field.name} has a value for each layer, got {values!r}; give a list."
                )
            object.__setattr__(self, field.name, tuple(values))
        count = len(self.forward)
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            wanted = count - 1 if field.name == "crossing" else count
            if len(values) != wanted and (values or field.name == "forward"):
                raise ValueError(
                    f"Layers: {field.name} has {len(values)} values for {count} layers; give "
                    f"{wanted}, or none."
                )
            for n, value in enumerate(values if field.name not in ("names", "inputs") else ()):
                if not (isinstance(value, numbers.Real) and 0 <= value < _LARGEST):
                    raise ValueError(
                        f"Layers: {field.name} of layer {n} is {value!r}; times and bytes are "
                        f"finite numbers, not negative, and less than {_LARGEST:g}."
                    )
        if wrong := [n for n, own in enumerate(self.inputs) if not {*own} <= {*range(n)}]:
            raise ValueError(
                f"Layers: layer {wrong[0]} reads layers {tuple(self.inputs[wrong[0]])}; a layer "
                f"reads earlier ones, numbered from 0."
            )
        if not count:
            raise ValueError("Layers: there is no layer; give the time of at least one forward.")
        if bool(self.input_grad) != bool(self.weight_grad) or not (
            self.input_grad or self.backward
        ):
            raise ValueError(
                "Layers: a backward is given whole, as backward=, or by both halves, input_grad= "
                "and weight_grad=."
            )

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.forward)

    @property
    def forms(self) -> tuple[bool, ...]:
        """The forms of a backward that are worth a try: in halves (True), whole (False).

        The whole one is left out where it takes no less than its halves. What takes less is first.
        """
        if not self.input_grad:
            return (False,)
        sums = zip(self.backward, self.input_grad, self.weight_grad, strict=False)
        if not any(whole < i + w for whole, i, w in sums):
            return (True,)
        return tuple(sorted((True, False), key=lambda halves: math.fsum(self.work(halves))))

    def parts(self, halves: bool) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
        """Returns the times of forwards, of what the layer before waits for, and of the rest."""
        if halves:
            return self.forward, self.input_grad, self.weight_grad
        whole = self.backward or tuple(
            i + w for i, w in zip(self.input_grad, self.weight_grad, strict=True)
        )
        return self.forward, whole, (0.0,) * self.count

    def work(self, halves: bool) -> tuple[float, ...]:
        """Returns all the time of each layer."""
        return tuple(map(math.fsum, zip(*self.parts(halves), strict=True)))


def sums(values: Sequence[float]) -> list[float]:
    """Returns the sum of the first `n` values, for each `n` from 0."""
    return [0.0, *itertools.accumulate(values)]
