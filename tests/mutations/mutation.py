"""A mutation: a small change of jaxpp's source, which something must notice."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change: what it does wrong, where, and what notices it.

    The certificate refutes it, or accepts it for a reason, or cannot see it: just one of
    `refuted_on`, `kept` and `unseen` is given. Tests have to notice what is not refuted.

    Args:
        wrong: what it does wrong.
        file: the file that it changes.
        old: what it replaces; it is exactly once in the file.
        new: what takes its place.
        tests: the tests that are run first, those that should notice: `"place"` are all of
            `tests/transforms/place/test_place.py`, `"place::dictionaries"` is one of them.
        refuted_on: the program on which the certificate refutes it: a step of
            `tests/certification`, or a random program.
        kept: why the certificate accepts it: such as, that a step computes its function still.
        unseen: why the certificate does not see it.
        known: why no test notices it, if none does.
        like: a bug of others that it is like.
    """

    wrong: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    refuted_on: str = ""
    kept: str = ""
    unseen: str = ""
    known: str = ""
    like: str = ""
