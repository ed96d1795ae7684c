"""The errors of a proof."""


class Refuted(AssertionError):
    """A step does not compute its function.

    Args:
        message: the difference: what is wanted, what it is, and where it is made.
        pass_name: the pass after which it shows, or `"the programs"`.
        path: the path of the result that differs, as `jax.tree_util.keystr` writes it.
        rank: the rank that has it.
        task: the task that makes it first.
        line: the user's file and line that it came from.
    """

    def __init__(
        self,
        message: str,
        *,
        pass_name: str = "the programs",
        path: str = "",
        rank: int | None = None,
        task: str = "",
        line: str = "",
    ):
        super().__init__(message)
        self.pass_name, self.path, self.rank = pass_name, path, rank
        self.task, self.line = task, line


class Undecided(ValueError):
    """A step that this proof cannot decide; the message says why."""
