"""Scripts that measure jaxpp itself, one each; they need the extra `experiments`."""

import importlib.util

# Not so `torch_pipeline` and `empty_pipeline`, which a Python without JAX runs to compare with.
if importlib.util.find_spec("jax") is not None:
    import experiments as experiments
