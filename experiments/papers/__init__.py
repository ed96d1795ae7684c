"""Papers on schedules, regenerated: `python -m experiments.papers --paper=gpipe`."""
