"""A device on a CPU that punishes what CUDA punishes, and reports what CUDA only gets wrong now and then."""

from sidestream.streams.simulated.backend import SimulatedBackend
from sidestream.streams.simulated.graph import DeviceError
from sidestream.streams.simulated.hazards import Hazard, HazardError
from sidestream.streams.simulated.schedule import DeviceFaultError, Order
from sidestream.streams.simulated.site import Site

__all__ = ["DeviceError", "DeviceFaultError", "Hazard", "HazardError", "Order", "SimulatedBackend", "Site"]
