"""A pretended NVIDIA driver: the functions of libcuda that zerolora.machine.devices calls."""

import ctypes
from typing import Any


class PretendedDriver:
    """Has GPUs of these compute capabilities and this memory in bytes, and supports CUDA up to `cuda`."""

    def __init__(
        self, *capabilities: float, cuda: tuple[int, int] = (13, 0), start: int = 0, memory: int = 80 * 2**30
    ) -> None:
        self.capabilities, self.cuda, self.start, self.memory = capabilities, cuda, start, memory
        self.maps_memory = True
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: Any) -> int:
            self.asked.append(name)
            return int(getattr(self, f"_{name}")(*arguments) or 0)

        return answer

    def _cuDriverGetVersion(self, number: Any) -> None:
        number._obj.value = 1000 * self.cuda[0] + 10 * self.cuda[1]

    def _cuInit(self, _: int) -> int:
        return self.start

    def _cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = len(self.capabilities)

    def _cuDeviceGet(self, handle: Any, number: int) -> None:
        handle._obj.value = number

    def _cuDeviceGetName(self, name: Any, _: int, handle: Any) -> None:
        name.value = f"pretended GPU {handle.value}".encode()

    def _cuDeviceGetUuid_v2(self, uuid: Any, handle: Any) -> None:
        ctypes.memset(uuid, handle.value + 1, 16)

    def _cuDeviceTotalMem_v2(self, size: Any, _: Any) -> None:
        size._obj.value = self.memory

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> None:
        tenths = round(10 * self.capabilities[handle.value])
        value._obj.value = {75: tenths // 10, 76: tenths % 10, 102: int(self.maps_memory)}[attribute]
