"""Saves and loads trees of arrays, wherever they are; each rank writes its own."""

from jaxpp.runtime.checkpoint._checkpointer import Checkpointer as Checkpointer
from jaxpp.runtime.checkpoint._load import load_state as load_state
from jaxpp.runtime.checkpoint._save import save_state as save_state
