"""Certifies programs with the jaxpp that is there, and says which one is refuted."""

import warnings

#: The exit status where a program is not proven, and where it cannot be lowered.
REFUTED, REFUSED = 100, 101
#: The random programs that are tried beside the steps of `tests/certification`.
SEEDS = (36, 3, 10, 45, 56, 0, 27, 22, 33, 66)


def certify(names: list[str] | None) -> int:
    """Certifies programs by name, all if there are none; the status of the first that fails.

    A program is not proven, too, where it is not decided, or where it is rounded at other places
    than by definition, and should not be.
    """
    warnings.simplefilter("ignore")
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import jaxpp
    from tests.certification import rare_steps

    programs = _programs()
    for name, lower in [(n, programs[n]) for n in names or programs]:
        try:
            lowered = lower()
        except Exception as error:
            print(f"{name} cannot be lowered: {_text(error)}")
            return REFUSED
        try:
            certificate = lowered.certify()
            rounds = certificate.rounded and name not in rare_steps.ROUNDED
            said = certificate.undecided or (rounds and "it rounds elsewhere")
        except (jaxpp.Refuted, jaxpp.Undecided) as error:
            said = _text(error)
        if said:
            print(f"on {name}: {said}")
            return REFUTED
    return 0


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _programs():
    """What lowers each program, by its name."""
    from tests.certification import rare_steps, steps
    from tests.programs import draw, run

    cases = {**steps.CASES, **rare_steps.CASES}

    def case(name):
        step, args = cases[name]()
        return step.lower(*args)

    return {
        **{name: lambda name=name: case(name) for name in cases},
        **{f"random {n}": lambda n=n: run.lower(draw.draw(n)) for n in SEEDS},
    }
