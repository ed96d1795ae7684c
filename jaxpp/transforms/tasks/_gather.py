"""The work of the tasks `G` and `H`: a rule, as others write them by `jaxpp.extend`."""

from jaxpp.schedules import Kind
from jaxpp.transforms.tasks._edit import Loop


def gather(loop: Loop) -> Loop:
    """Lets the tasks of each stage that has a `G` read the constants that it gathers."""
    for stage in sorted({t.stage for t in loop.table.tasks if (t.kind.makes or t.kind) == Kind.G}):
        read = [v for v in loop.constants if any(key.stage == stage for key in v.readers)]
        if read:
            loop, gathered = loop.insert(Kind.G, stage, lambda *whole: whole, read)
            for key in dict.fromkeys(k for v in read for k in v.readers if k.stage == stage):
                pairs = [p for p in zip(read, gathered, strict=True) if key in p[0].readers]
                old, new = zip(*pairs, strict=True)
                loop = loop.read(key, new, of=old)
    return loop
