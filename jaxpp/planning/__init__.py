"""Measures, predicts and plans steps: what they hold, how long they take, and where to cut."""

from jaxpp.planning._device import DEVICES as DEVICES
from jaxpp.planning._device import Device as Device
from jaxpp.planning._limited import LimitedCuts as LimitedCuts
from jaxpp.planning._measure import Measurement as Measurement
from jaxpp.planning._measure import measure as measure
from jaxpp.planning._plan import Plan as Plan
from jaxpp.planning._plan import PlanOptions as PlanOptions
from jaxpp.planning._plan import plan as plan
from jaxpp.planning._predict import Beside as Beside
from jaxpp.planning._predict import Moment as Moment
from jaxpp.planning._predict import Prediction as Prediction
from jaxpp.planning._predict import predict as predict
from jaxpp.planning._problem import Candidate as Candidate
from jaxpp.planning._problem import Problem as Problem
from jaxpp.planning._profile import Profile as Profile
from jaxpp.planning._profile import profile as profile
from jaxpp.planning.search import Layers as Layers
from jaxpp.planning.search import LayersPlan as LayersPlan
from jaxpp.planning.search import Options as Options
from jaxpp.planning.search import plan_layers as plan_layers
