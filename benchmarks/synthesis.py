"""Measures what `synthesize` finds against what is published, proved, and in the catalogue.

- `table5`: the bubble rate (span) on each row of Table 5 of arXiv 2401.10241 that ZB-1p or ZB-2p
  has, at the memory limit of that row, against the published one;
- `v`: the bubble rate (span) of nine Vs of 16 to 32 ranks with the times of that table and the
  memory of 1F1B, against ZB-V and the greedy search of its authors;
- `optima`: the makespans that are proved optimal at F = I = W = 1;
- `random`: instances with stages unequal by up to 20% and memory limits of p/2 to 2p microbatches a
  rank, against the best schedule of the catalogue that fits, and the lower bound.

    python -m benchmarks.synthesis --figures=table5,v,optima,random
"""

import json
import pathlib
import statistics

import tqdm
from absl import app, flags

from benchmarks.synthesis_cases import Row, instances, optima, table5, v_schedules

FLAGS = flags.FLAGS
flags.DEFINE_list("figures", ["table5", "v", "optima", "random"], "Which figures to reproduce.")
flags.DEFINE_string(
    "table5", "tests/schedules/data/zero_bubble_table5.csv", "The published bubble rates."
)
flags.DEFINE_integer("max_ranks", 32, "The largest rows of Table 5 to run.")
flags.DEFINE_integer("instances", 50, "Random instances.")
flags.DEFINE_integer("ranks", 16, "Ranks of a random instance.")
flags.DEFINE_integer("microbatches", 64, "Microbatches of a random instance.")
flags.DEFINE_integer("stages_per_rank", 1, "Stages of a rank of a random instance, in waves.")
flags.DEFINE_integer("evaluations", 2000, "See `synthesize`.")
flags.DEFINE_integer("seed", 0, "Of the instances and of the search.")
flags.DEFINE_string("json", None, "A file to write the figures to.")


def main(argv):
    """Runs the figures that were asked for, and prints them."""
    del argv
    search = FLAGS.evaluations, FLAGS.seed
    figures = {
        "table5": lambda: table5(FLAGS.table5, FLAGS.max_ranks, *search),
        "v": lambda: v_schedules(FLAGS.table5, *search),
        "optima": lambda: optima(*search),
        "random": lambda: instances(
            FLAGS.instances, FLAGS.ranks, FLAGS.microbatches, FLAGS.stages_per_rank, *search
        ),
    }
    results: dict[str, list[Row]] = {}
    for name in FLAGS.figures:
        rows = [run() for run in tqdm.tqdm(list(figures[name]()), desc=name, disable=None)]
        results[name] = rows
        print(f"\n{name}: {sum(row['good'] for row in rows)} of {len(rows)} good")
        for row in rows:
            print("  " + "  ".join(f"{key} {_short(value)}" for key, value in row.items()))
        if rows and "gap" in rows[0]:
            gaps = [row["gap"] for row in rows]
            print(f"  gap: mean {statistics.mean(gaps):.4f}, largest {max(gaps):.4f}")
            print(f"  seconds: largest {max(row['seconds'] for row in rows)}, of the processor "
                  f"{max(row['cpu'] for row in rows)}")  # fmt: skip
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text(json.dumps(results, indent=1))


def _short(value: object) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


if __name__ == "__main__":
    app.run(main)
