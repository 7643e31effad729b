"""What a run's plan needs of the machine that trains: torch's kernels, a driver, and tools that compile.

`render` refuses what cannot work before a job waits in a queue, and `zerolora check` shows it.
"""

import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata

from zerolora.config.settings import HardwareSettings, RenderSettings
from zerolora.errors import UserError
from zerolora.log import LOGGER
from zerolora.machine import devices, toolchain
from zerolora.machine.submit_host import submits
from zerolora.model.fused_kernels import PACKAGE
from zerolora.planner.hardware import GPUS
from zerolora.planner.run_hardware import typical
from zerolora.planner.user_config import filled, layout_of
from zerolora.strategies import STRATEGIES
from zerolora.strategies.strategy import Strategy
from zerolora.types import Device

OTHERWISE = {"async_io": "zero3_offload", "quantizer": "zero3"}
"""For each operation that is compiled, a strategy that shards as much without it."""


def check(settings: RenderSettings, chosen: str) -> None:
    """Raise UserError if this machine cannot train with a run's hardware and the strategy that was `chosen`.

    On a machine that submits to Slurm, what it lacks itself is a warning: nodes may have it.
    """
    if settings.device == "cuda":
        check_gpu(settings.hardware)
    compiling = (*uncompiled(strategy_of(settings, chosen), settings.device), *without_launchers(settings))
    for reason in (*uninstalled(settings).values(), *compiling):
        if not submits():
            raise UserError(reason)
        LOGGER.warning("%s (on this machine; training runs on its own nodes)", reason)


def uninstalled(settings: RenderSettings) -> dict[str, str]:
    """Return a message, with remedies, for each package that a run needs and this Python lacks."""
    missing = {}
    for why, package in settings.packages.items():
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError:
            install = f"`{sys.executable} -m pip install {package}`"
            missing[package] = f"{why}, whose package {package} is not installed; run {install}, or choose another"
    return missing


def strategy_of(settings: RenderSettings, chosen: str) -> Strategy:
    """Return a strategy by its name, or the run's own DeepSpeed JSON as one."""
    if settings.user_config is None:
        return STRATEGIES[chosen]
    return layout_of(filled(settings.user_config, hidden=1)).strategy  # the model's width matters to sizes only


def check_gpu(hardware: HardwareSettings) -> None:
    """Raise UserError if the installed torch has no kernels for the config's GPU, or this machine's driver is too old;
    the latter is only a warning on a machine that submits to Slurm."""
    if reason := without_kernels(hardware):
        raise UserError(f"hardware: {reason}")
    release, built = devices.torch_build()
    reason = devices.old_driver(release, built) if built else None
    if reason and submits():
        LOGGER.warning("hardware.device is cuda, and on this machine %s; training checks its own nodes", reason)
    elif reason:
        raise UserError(f"hardware.device is cuda, but {reason}")


def without_kernels(hardware: HardwareSettings) -> str | None:
    """Return a message if the installed torch has no kernels for the config's GPU."""
    named = GPUS[hardware.gpu] if hardware.gpu else None
    described = {(named.name, named.capability)} if named else set()
    if hardware.compute_capability is not None:
        described.add((hardware.gpu or f"a GPU as {typical(hardware.compute_capability)}", hardware.compute_capability))
    for name, capability in sorted(described):
        major, minor = divmod(round(10 * capability), 10)
        if reason := devices.unsupported((major, minor), name):
            return reason
    return None


def uncompiled(strategy: Strategy, device: Device) -> Iterator[str]:
    """Yield a message, with remedies, for each operation of a strategy that cannot be compiled here."""
    for operation in strategy.compiled:
        if missing := toolchain.lacking(operation, device, devices.torch_build()[1]):
            yield (
                f"render.strategy is {strategy.name}, which compiles DeepSpeed's {operation} when training starts, and "
                f"{'; and '.join(missing)}; or use {OTHERWISE[operation]}"
            )


def without_launchers(settings: RenderSettings) -> Iterator[str]:
    """Yield a message, with remedies, if a run's fused kernels cannot be compiled here."""
    if uses_kernels(settings) and (missing := toolchain.lacking_for_triton()):
        yield (
            f"train.kernels is {settings.kernels}, whose kernels Triton compiles when training starts, and "
            f"{'; and '.join(missing)}; or set train.kernels: off"
        )


def uses_kernels(settings: RenderSettings) -> bool:
    """Return whether a run may compute with fused kernels on GPUs."""
    installed = importlib.util.find_spec(PACKAGE) is not None
    return settings.device == "cuda" and (settings.kernels == "liger" or (settings.kernels == "auto" and installed))
