"""Scripts that measure jaxpp itself, one each; they need the extra `experiments`."""

from jaxpp._extras import need

need("experiments", "A script", "jaxtyping", "matplotlib", "psutil", "tensorstore", "tqdm")
