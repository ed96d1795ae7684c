"""Batches of a Ray Data set for `jaxpp.place(..., feed=)`: the ranks read them, not the driver.

    step = jaxpp.place(train_step, mesh, feed={2: DatasetBatches(dataset, 64, collate)})
    for number in range(steps):
        model, opt_state, loss = step(model, opt_state, number)

Needs `pip install "ray[data]"`.
"""

from collections.abc import Callable, Iterator
from typing import Any


class DatasetBatches:
    """Gives the batch of a number; each process that reads batches has an iterator of its own.

    Batches come in the order of the dataset, so its transformations must be deterministic: all
    ranks have to see the same. An epoch starts after the last whole batch of the one before.

    Args:
        dataset: a `ray.data.Dataset`.
        batch_size: examples in a batch; what is left of the dataset after the last is dropped.
        collate: makes the step's argument, a pytree of arrays, of the dictionary of columns
            (NumPy arrays) that Ray Data gives for a batch.
    """

    def __init__(self, dataset: Any, batch_size: int, collate: Callable[[dict[str, Any]], Any]):
        self._dataset, self._batch_size, self._collate = dataset, batch_size, collate
        self._batches: Iterator[dict[str, Any]] = iter(())
        self._next: int | None = None

    def __call__(self, number: int) -> Any:
        """The batch of a number, counted over all epochs; one after the other is the fast way.

        Raises:
            ValueError: the dataset has not enough examples for a batch.
        """
        if self._next is None or number < self._next:
            self._start()
            self._next = 0
        batch = None
        while self._next <= number:
            batch = self._take()
            self._next += 1
        assert batch is not None
        return self._collate(batch)

    def _start(self) -> None:
        batches = self._dataset.iter_batches(batch_size=self._batch_size, drop_last=True)
        self._batches = iter(batches)

    def _take(self) -> dict[str, Any]:
        batch = next(self._batches, None)
        if batch is None:
            self._start()
            batch = next(self._batches, None)
        if batch is None:
            raise ValueError(f"The dataset has fewer than {self._batch_size} examples: no batch.")
        return batch
