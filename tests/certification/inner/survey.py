"""Draws many edits inside computations, and prints what the proof said of each kind.

    python -m tests.certification.inner.survey --edits=50000 --seed=1 [--steps=trained,ring]

Each false accept is printed with what makes it again: `--again="trained/1/17"`.
"""

import argparse
import collections
import time

import jax


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edits", type=int, default=2000, help="how many, over all steps")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--steps", default="", help="the names of the steps; all by default")
    parser.add_argument("--again", default="", help="the name of one edit: step/seed/number")
    parser.add_argument("--run-refuted", type=float, default=0.0, help="share of these that run")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    from tests.certification.inner import judge, small_steps

    if options.again:
        name, _, key = options.again.partition("/")
        own = judge.case(name)
        edit = own.draw(key)
        verdict = judge.judge(own, edit, run_refuted=True)
        print(edit.kind, edit.text, verdict.said, verdict.difference, sep="\n")
        return
    names = [n for n in small_steps.CASES if n in options.steps.split(",") or not options.steps]
    table = collections.defaultdict[tuple[str, str], collections.Counter](collections.Counter)
    start, each = time.time(), -(-options.edits // len(names))
    for name in names:
        own = judge.case(name)
        try:
            print(f"{name}: exact {own.certify(own.lowered.bundle).exact}", flush=True)
        except Exception as error:
            print(f"{name}: the unedited step is not certified: {error}", flush=True)
            continue
        before = time.time()
        for n in range(each):
            key = f"{options.seed}/{n}"
            edit = own.draw(key)
            runs = options.run_refuted and (n * 0.6180339887) % 1 < options.run_refuted
            verdict = judge.judge(own, edit, run_refuted=bool(runs))
            count(table[name, edit.kind], verdict)
            if verdict.is_error or (verdict.is_accepted and verdict.difference):
                what = "FALSE ACCEPT" if verdict.is_false else "DOES NOT RUN"
                what = "BEYOND" if verdict.is_beyond else what
                what = "ERROR" if verdict.is_error else what
                print(
                    f"{what} {name}/{key} {edit.kind} [{verdict.said}]\n"
                    f"    {edit.text}\n    {verdict.difference}",
                    flush=True,
                )
        print(f"  {each} edits in {time.time() - before:.0f} s", flush=True)
    print_table(table, time.time() - start)


COLUMNS = (
    "tried", "refuted", "exact", "regrouped", "errors", "false", "beyond", "same", "does not run",
    "refuted, run", "refuted, changed",
)  # fmt: skip


def count(counts: collections.Counter, verdict) -> None:
    """Counts an edit."""
    counts["tried"] += 1
    counts[verdict.said if verdict.said in COLUMNS else "errors"] += 1
    if verdict.is_accepted:
        if verdict.is_false or verdict.is_beyond:
            counts["false" if verdict.is_false else "beyond"] += 1
        else:
            counts["does not run" if verdict.difference else "same"] += 1
    elif verdict.difference is not None:
        counts["refuted, run"] += 1
        counts["refuted, changed"] += bool(verdict.difference)


def print_table(table, seconds: float) -> None:
    """Prints the counts by step and by kind."""
    for k, what in enumerate(("step", "kind")):
        totals = collections.defaultdict(collections.Counter)
        for key, counts in table.items():
            totals[key[k]].update(counts)
        totals["all"] = sum(table.values(), collections.Counter())
        print(f"\n{what:28}" + "".join(f"{c:>17}" for c in COLUMNS))
        for name, counts in totals.items():
            print(f"{name:28}" + "".join(f"{counts[c]:17}" for c in COLUMNS))
    edits = sum(c["tried"] for c in table.values())
    print(f"\n{edits} edits in {seconds:.0f} s, {1000 * seconds / max(edits, 1):.0f} ms an edit")


if __name__ == "__main__":
    main()
