"""The items of benchmarks/gpu.py, in the order in which they are measured: the figures most missed come first."""

from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One measurement: a process, a result file."""

    kind: str
    """What measures it: a function of kinds.py."""
    label: str
    """Tells it from the others of its kind."""
    seconds: int
    """Estimated; three times as many are its limit."""
    settings: Settings
    """What its kind's function is given."""

    @property
    def name(self) -> str:
        """The result file's name, without the device and the ending."""
        return f"{self.kind}_{self.label}" if self.label else self.kind


def items(device: str, trl: bool) -> list[Item]:
    """Return the items for a device; `trl` says whether TRL can be imported, so that it is the opponent."""
    return gpu_items("trl" if trl else "trainer") if device == "cuda" else cpu_items()


def gpu_items(opponent: str) -> list[Item]:
    """Return what is measured on a GPU of 80 GB or more; what does not fit a smaller one is a row that says so."""
    return [
        Item("probe", "", 40, {}),
        Item("reserve", "", 60, {"model": "qwen2.5-0.5b", "strategies": ["zero2", "zero3"], "length": 2048}),
        memory("qwen2.5-7b", "zero2", seconds=70),
        speed("qwen2.5-7b", 70),
        memory("qwen2.5-7b", "zero3", seconds=90),
        memory("qwen2.5-0.5b", "zero0", checkpointing=False),
        reference("qwen2.5-0.5b", 180),
        contest("qwen2.5-0.5b", opponent, 300),
        Item("precision", "", 180, {"model": "smollm2-135m", "steps": 10, "precisions": ["fp32", "bf16", "fp16"]}),
        loading("qwen2.5-7b", ["zero2", "zero3"], 200),
        Item("start_up", "", 120, {"model": "qwen2.5-0.5b", "rounds": 3}),
        choice("qwen2.5-0.5b", 0, 450),
        memory("qwen2.5-14b", "zero2", seconds=90),
        memory("qwen2.5-7b", "zero2_offload"),
        memory("qwen2.5-7b", "zero3_offload", seconds=120),
        memory("qwen2.5-7b", "zero2", attention="sdpa"),
        memory("qwen2.5-7b", "zero2", attention="eager", lengths=(512, 2048)),
        memory("qwen2.5-0.5b", "zero2", method="full"),
        memory("qwen2.5-1.5b", "zero2", method="full"),
        memory("qwen2.5-1.5b", "zero3", method="full", checkpointing=False),
        memory("qwen2.5-1.5b", "zero2_offload", method="full"),
        memory("qwen2.5-7b", "zero2", offload=True),
        memory("qwen2.5-32b", "zero2", seconds=120),
        memory("qwen2.5-7b", "zero0"),
        memory("qwen2.5-7b", "zero1", checkpointing=False, lengths=(512, 2048)),
        memory("qwen2.5-14b", "zero3", seconds=150),
        memory("qwen2.5-14b", "zero3_offload", seconds=150),
        memory("qwen2.5-32b", "zero3", seconds=240),
        memory("qwen2.5-0.5b", "ddp", checkpointing=False),
        memory("qwen2.5-0.5b", "fsdp", checkpointing=False),
        memory("qwen2.5-0.5b", "zero1", checkpointing=False),
        memory("qwen2.5-0.5b", "zero3", checkpointing=False),
        memory("qwen2.5-0.5b", "zero2", checkpointing=False, precision="fp16"),
        memory("qwen2.5-0.5b", "zero2", method="full", optimizer="adamw_8bit"),
        memory("qwen2.5-0.5b", "zero2", method="full", optimizer="paged_adamw"),
        memory("qwen2.5-0.5b", "zero2", method="full", optimizer="paged_adamw_8bit"),
        memory("qwen2.5-0.5b", "zero2", method="full", optimizer="lion"),
        memory("qwen2.5-0.5b", "zero0", method="full", optimizer="adafactor"),
        memory("qwen2.5-0.5b", "fsdp", checkpointing=False, optimizer="adamw_8bit"),
        speed("qwen2.5-0.5b", 60),
        speed("qwen2.5-1.5b", 60),
        speed("qwen2.5-14b", 90),
        speed("qwen2.5-32b", 120),
        reference("qwen2.5-7b", 400),
        contest("qwen2.5-7b", opponent, 500),
        choice("qwen2.5-7b", 4, 450),
        loading("qwen2.5-0.5b", ["ddp", "zero2", "zero3", "fsdp"], 120),
    ]


def cpu_items() -> list[Item]:
    """Return a tiny stand-in of every kind, for a machine without a GPU: they prove the script and measure nothing."""
    return [
        Item("probe", "", 15, {}),
        Item("reserve", "", 10, {"model": "tiny", "strategies": ["zero2"], "length": 512}),
        memory("tiny", "zero2", precision="fp32", lengths=(512,), seconds=10),
        memory("tiny", "zero2", "full", attention="sdpa", precision="fp32", lengths=(512,), seconds=10),
        memory("tiny", "zero2", precision="fp32", lengths=(512,), seconds=10, optimizer="adamw_8bit"),
        Item("speed", "tiny", 15, {"model": "tiny", "length": 32, "packed": 2, "global_batch": 2, "steps": 2}),
        Item("reference", "tiny", 40, {"model": "tiny", "steps": 2, "warm_up": 1, "rounds": 1, "ways": 1}),
        Item("contest", "tiny", 40, {
            "model": "tiny", "opponent": "trainer", "capacity": 512, "longest": 30, "batch": 1, "steps": 2,
            "warm_up": 1, "rounds": 1, "micro_batches": [1], "rows": 2,
        }),
        Item("precision", "", 30, {"model": "tiny", "steps": 2, "precisions": ["bf16"]}),
        Item("loading", "tiny", 20, {"model": "tiny", "strategies": ["zero2"]}),
        Item("start_up", "", 40, {"model": "tiny", "rounds": 1}),
        Item("choice", "tiny", 60, {
            "model": "tiny", "layers": 0, "length": 32, "packed": 1, "global_batch": 1, "limit": 1, "rounds": 1,
            "steps": 1,
        }),
    ]  # fmt: skip


def memory(
    model: str,
    strategy: str,
    method: str = "lora",
    checkpointing: bool = True,
    attention: str = "flash",
    precision: str = "bf16",
    lengths: tuple[int, ...] = (512, 2048, 8192),
    seconds: int = 60,
    optimizer: str | None = None,
    offload: bool = False,
) -> Item:
    """Return the item that holds predicted against measured memory of one configuration at several lengths."""
    kept = "checkpointing" if checkpointing else "all"
    settings = {
        "model": model, "strategy": strategy, "method": method, "checkpointing": checkpointing,
        "attention": attention, "precision": precision, "lengths": list(lengths),
    }  # fmt: skip
    label = [model, strategy, method, kept, attention, precision]
    if optimizer:
        label, settings = [*label, optimizer], {**settings, "optimizer": optimizer}
    if offload:
        label, settings = [*label, "offload"], {**settings, "offload": True}
    return Item("memory", "_".join(label), seconds, settings)


def speed(model: str, seconds: int) -> Item:
    """Return the item that trains with what `strategy: auto` chooses."""
    return Item("speed", model, seconds, {"model": model, "length": 2048, "packed": 4, "global_batch": 8, "steps": 5})


def reference(model: str, seconds: int) -> Item:
    """Return the item that trains the reference task in the published experiment's way and in this project's."""
    return Item("reference", model, seconds, {"model": model, "steps": 12, "warm_up": 4, "rounds": 2, "ways": 2})


def contest(model: str, opponent: str, seconds: int) -> Item:
    """Return the item that trains conversations with another's trainer and with this project's."""
    settings = {
        "model": model, "opponent": opponent, "capacity": 2048, "longest": 600, "batch": 8, "steps": 10, "warm_up": 3,
        "rounds": 2, "micro_batches": [1, 4], "rows": 16,
    }  # fmt: skip
    return Item("contest", model, seconds, settings)


def loading(model: str, strategies: list[str], seconds: int) -> Item:
    """Return the item that loads a model from disk."""
    return Item("loading", model, seconds, {"model": model, "strategies": strategies})


def choice(model: str, layers: int, seconds: int) -> Item:
    """Return the item that trains with configurations drawn by lot and with the chosen one; `layers` 0: all."""
    settings = {
        "model": model, "layers": layers, "length": 2048, "packed": 4, "global_batch": 16, "limit": 16, "rounds": 2,
        "steps": 2,
    }  # fmt: skip
    return Item("choice", model, seconds, settings)
