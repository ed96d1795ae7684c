from jaxpp.runtime._state._checkpointer import Checkpointer as Checkpointer
from jaxpp.runtime._state._load import load_state as load_state
from jaxpp.runtime._state._save import save_state as save_state
