"""Scripts that answer a researcher's question, one each; they need the extra `experiments`."""

from jaxpp._messages import need

need("experiments", "A script", "matplotlib", "psutil", "tensorstore", "tqdm")
