from jaxpp.schedules._synthesis._schedule import Synthesized as Synthesized
from jaxpp.schedules._synthesis._synthesize import SearchOptions as SearchOptions
from jaxpp.schedules._synthesis._synthesize import Synthesis as Synthesis
from jaxpp.schedules._synthesis._synthesize import synthesize as synthesize
