"""Names of Accelerate's `utils.offload`, which are taken from the installed package."""

from accel_runtime.accelerate.package import build_getattr

__all__: list[str] = []
__getattr__ = build_getattr(__name__)
