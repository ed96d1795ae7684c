"""Devices by their published figures, for times that nobody has measured."""

import dataclasses
import math

from jaxpp._program import PROVIDED


@dataclasses.dataclass(frozen=True)
class Device:
    """The most that a device can do, by its data sheet.

    A computation takes the longer of two times (Williams, Waterman, Patterson, "Roofline", CACM
    52(4), 2009): that of its operations, and that of the bytes that it reads and writes.

    Args:
        flops: floating-point operations in a second, in the dtype that the step computes in.
        bandwidth: bytes that it reads or writes in a second.
        memory: bytes that it has; infinite by default.
        overhead: seconds that a computation takes in any case.
        host_bandwidth: bytes that it copies to the memory of its host, or back, in a second; 0, the
            default, where that is not known: then nothing is offloaded.

    Example:
        >>> device = Device(flops=1e12, bandwidth=1e11)
        >>> device.seconds(flops=2e9, nbytes=1e8)
        0.002
    """

    flops: float
    bandwidth: float
    memory: float = math.inf
    overhead: float = 0.0
    host_bandwidth: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 <= value if field.name in ("overhead", "host_bandwidth") else 0 < value
            finite = value < math.inf or field.name == "memory"
            if not (least and finite):
                raise ValueError(
                    f"Device: {field.name} is a finite positive number, got {value!r}."
                )

    def seconds(self, flops: float, nbytes: float) -> float:
        """Returns the time of a computation of so many operations, and so many bytes."""
        return self.overhead + max(flops / self.flops, nbytes / self.bandwidth)


#: Dense bfloat16 operations, memory bandwidth and size. From the data sheets of NVIDIA (A100 80GB
#: SXM, H100 SXM, H200 SXM; PCIe in one direction) and the pages of Google Cloud on TPUs (a chip
#: each), which do not say how fast the link to the host is.
DEVICES = {
    "a100": Device(312e12, 2.039e12, 80e9, host_bandwidth=32e9),
    "h100": Device(989e12, 3.35e12, 80e9, host_bandwidth=64e9),
    "h200": Device(989e12, 4.8e12, 141e9, host_bandwidth=64e9),
    "tpu_v4": Device(275e12, 1.228e12, 32 * 2**30),
    "tpu_v5e": Device(197e12, 0.819e12, 16 * 2**30),
    "tpu_v5p": Device(459e12, 2.765e12, 95 * 2**30),
    "tpu_v6e": Device(918e12, 1.64e12, 32 * 2**30),
}


def device_of(device: Device | str) -> Device:
    """Returns a device by its name, or as it is.

    Raises:
        ValueError: there is no device of that name.
    """
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise ValueError(
            f"there is no device named {device!r}; use one of {', '.join(DEVICES)}, or a "
            f"jaxpp.Device of your own: Device(flops=..., bandwidth=..., memory=...)."
        )
    return DEVICES[device]


PROVIDED["device"] = device_of
