"""Plans a chain of layers from its costs alone: cut, placement and order together, without JAX."""

from jaxpp.planning.search._bound import lower_bound as lower_bound
from jaxpp.planning.search._layers import Layers as Layers
from jaxpp.planning.search._named import EXACT as EXACT
from jaxpp.planning.search._named import Cutter as Cutter
from jaxpp.planning.search._plan import LayersPlan as LayersPlan
from jaxpp.planning.search._plan import plan_layers as plan_layers
from jaxpp.planning.search._search import find as find
from jaxpp.planning.search._search import synthesized as synthesized
from jaxpp.planning.search._setting import Choice as Choice
from jaxpp.planning.search._setting import Options as Options
from jaxpp.planning.search._setting import Ranks as Ranks
from jaxpp.planning.search._setting import Setting as Setting
