"""Where `split_stages` cuts each model: between its layers.

`pytest -m more -rP tests/experiments/test_cuts_of_models.py` prints the table of each model.
"""

import collections
import re

import pytest

import jaxpp
from tests import models
from tests.experiments import test_zoo_architectures as architectures
from tests.experiments import test_zoo_language_models as languages

#: The stages that a model is cut into; others have four layers, and as many stages.
STAGES = {"gpt": 2, "bert": 2, "t5": 4, "vit": 2, "unet": 4, "resnet": 2, "clip": 2}
#: The layers with a cut inside. CLIP has a block in each tower here: between the towers the slower
#: stage would have 58% of the operations, and inside of a block 51%.
INSIDE = {"clip": {"text.blocks.0"}}


def case_of(name):
    """A model's loss, and its arguments."""
    if name == "gpt":
        case = models.gpt()
        return case.loss, (case.model, *case.data(0))
    if name in architectures.CASES:
        case = architectures.CASES[name]
        return case.loss, (*architectures.make(case), *case.data(0))
    zoo = languages.ZOO[name]
    return zoo.loss_fn, (zoo.make(4), *zoo.data(0))


def each_layer(layer):
    """The layers of a row: `blocks.0-2` are three."""
    if (found := re.fullmatch(r"(.*\.)(\d+)(?:-(\d+))?", layer)) is None:
        return []
    stem, low, high = found.groups()
    return [f"{stem}{n}" for n in range(int(low), int(high or low) + 1)]


@pytest.mark.parametrize("name", ["gpt", *languages.ZOO, *architectures.CASES])
def test_a_model_is_cut_between_its_layers(name):
    loss, args = case_of(name)
    split = jaxpp.split_stages(loss, STAGES.get(name, 4))
    table = jaxpp.stages_as_text(split, *args)
    print(table)
    header, *rows = table.splitlines()
    first = header.index("layers")
    found = [re.split(r"\s{2,}", row[first:])[0].split(", ") for row in rows]
    layers = collections.Counter(n for own in found for name in own for n in each_layer(name))
    assert len(layers) > 1 or name == "gpt"
    assert {n for n, count in layers.items() if count > 1} == INSIDE.get(name, set())
