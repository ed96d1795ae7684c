"""Merges timelines and profiles that `start_trace` has made, of one host or several, into one file.

    python -m experiments.merge_traces all.json run run-0 run-1
    python -m experiments.merge_traces all.json.gz first/timeline.json second/timeline.json

The first argument is the file to write, which ui.perfetto.dev opens; the others are files, or
folders that hold them. Each becomes a group of processes, on one clock.
"""

from collections.abc import Sequence

from absl import app

import jaxpp


def main(argv: Sequence[str]) -> None:
    if len(argv) < 3:
        raise app.UsageError("give the file to write, and at least one trace to merge.")
    try:
        jaxpp.merge_traces(argv[2:], argv[1])
    except (OSError, ValueError) as error:
        raise app.UsageError(str(error)) from error
    print(argv[1])


if __name__ == "__main__":
    app.run(main)
