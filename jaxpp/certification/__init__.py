"""Proves of a placed step, before it is compiled, that it computes its function."""

from jaxpp.certification._certify import Certificate as Certificate
from jaxpp.certification._certify import certify as certify
from jaxpp.certification._refuted import Refuted as Refuted
from jaxpp.certification._refuted import Undecided as Undecided
