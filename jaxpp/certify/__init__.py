"""Proves of a placed step, before it is compiled, that it computes its function."""

from jaxpp.certify._certify import Certificate as Certificate
from jaxpp.certify._certify import certify as certify
from jaxpp.certify._refuted import Refuted as Refuted
from jaxpp.certify._refuted import Undecided as Undecided
