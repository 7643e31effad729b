"""Each patch of another library is still needed and refuses versions it is not written for.

When a test fails because the library has fixed the problem, remove the patch with its test.
"""

import asyncio
import contextlib
import copy
import datetime
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, project_environment, refusal, served

from zerolora import compat
from zerolora.compat import bitsandbytes_patches, transformers_import, transformers_patches, versions
from zerolora.compat.peft_patches import converts, not_read_back
from zerolora.compat.transformers_patches import former_names
from zerolora.compat.versions import PATCHES, Patch
from zerolora.errors import UserError

for info in pkgutil.iter_modules(compat.__path__):
    importlib.import_module(f"{compat.__name__}.{info.name}")


def alone(*command: str) -> subprocess.CompletedProcess[str]:
    environment = project_environment(ROOT)
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the behaviour of unpatched torch and DeepSpeed."""
    script = str(Path(__file__).parent / "unpatched.py")
    result = alone(script, str(tmp_path_factory.mktemp("unpatched")))
    assert result.returncode == 0, result.stderr[-3000:]
    seen: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return seen


NEEDED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "keep_clipped_norm": lambda seen: seen["norm after clipping"] is None,
    "undo_first_step": lambda seen: seen["updates before the first step"] == [1, 1, 1, 1],
    "release_by_current_trace": lambda seen: (
        seen["decisions of an invalidated trace"] == seen["decisions of a trace"] > 0
    ),
    "record_training_alone": lambda seen: seen["a pass without gradients is recorded"],
    "grow_scale_after_step": lambda seen: (
        seen["order of stage 0's step"] == ["_update_scale", "unscale_and_clip_grads"]
    ),
    "stage0_scale": lambda seen: seen["scale of stage 0's gradients"] == pytest.approx(1),
    "scaler_of": lambda seen: not seen["stage 0 has a loss_scaler"],
    "set_scale": lambda seen: not seen["loss scalers can load a state"],
    "stage0_masters": lambda seen: not seen["master by DeepSpeed's own function"],
    "make_states": lambda seen: seen["states before the first step"] == 0,
    "link_states": lambda seen: not seen["states added after a step are linked"],
    "time_every_reduction": lambda seen: seen["times of DDP's last ten steps"] == 1,
    "ddp_reductions": lambda seen: seen["all-reduces of DDP that go through torch.distributed"] == 0,
    "fresh_state": lambda seen: seen["states of AdamW before its first step"] == 0,
}
"""Patches of DeepSpeed and torch, and the unpatched behaviour that unpatched.py observes."""


@pytest.mark.parametrize("patch", NEEDED)
def test_needed(patch: str, unpatched: dict[str, Any]) -> None:
    assert NEEDED[patch](unpatched)


def test_every_patch_has_a_test_that_it_is_needed() -> None:
    tests = {name.removeprefix("test_needed_") for name in globals() if name.startswith("test_needed_")}
    assert tests | NEEDED.keys() == set(PATCHES)


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_patch_supports_the_installed_version_and_is_documented(patch: Patch) -> None:
    patch.check()
    module = next(
        module
        for name, module in sys.modules.items()
        if name.startswith("zerolora.compat.") and hasattr(module, patch.name)
    )
    assert len(inspect.getdoc(getattr(module, patch.name)) or "") > 80
    locked = (ROOT / "envs/requirements.lock").read_text()
    assert f"{patch.library}=={patch.version}" in locked


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_patch_refuses_another_version_in_one_line(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda library: "0.0.1")
    line = refusal(patch.check)
    assert line.startswith(f"{patch.library} 0.0.1 is installed, but zerolora.compat ({patch.name}) is written for ")
    assert patch.version in line and line.endswith("run `make`, which installs envs/requirements.lock")


def test_patch_checks_the_version_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerolora.compat.peft_patches import replace_dropout

    monkeypatch.setattr(versions, "installed", lambda library: "9.9.9")
    model = torch.nn.Sequential(torch.nn.Dropout(0.5))
    with pytest.raises(UserError, match=r"peft 9\.9\.9 is installed"):
        replace_dropout(model, torch.nn.Dropout1d)
    assert type(model[0]) is torch.nn.Dropout


def test_another_series_is_allowed_if_its_features_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda library: "2.11.3")
    Patch("some", "torch", "2.13.0", ("2.11",), "none known", ("torch.distributed:Work.wait",)).check()
    lacking = Patch("some", "torch", "2.13.0", ("2.11",), "none known", ("torch.distributed:Work.nap",))
    with pytest.raises(UserError, match=r"torch 2\.11\.3 is installed.*has no torch\.distributed\.Work\.nap"):
        lacking.check()
    with pytest.raises(UserError, match="written for 2"):
        Patch("some", "torch", "2.13.0", ("2.1",), "none known", ()).check()


@pytest.mark.parametrize(
    "name",
    [
        *("snakemake_patches", "slurm_executor_patches", "slurm_queue", "transformers_patches", "transformers_import"),
        "versions",
    ],
)
def test_light_modules_import_no_torch(name: str) -> None:
    loaded = "{'torch', 'transformers', 'snakemake'} & set(sys.modules)"
    alone("-c", f"import sys, zerolora.compat.{name}; assert not {loaded}").check_returncode()


# --- DeepSpeed ---


def test_needed_apply_startup_patches(unpatched: dict[str, Any]) -> None:
    assert unpatched["shm_comm counts as buildable"]
    assert unpatched["weights that rank 0 sends at the start"] == 4
    assert unpatched["torch's compiler is loaded"]


def test_deepspeed_starts_without_torchs_compiler() -> None:
    script = """
import sys
from deepspeed.runtime import compiler
from zerolora.compat.deepspeed_patches import apply_startup_patches
compile_later, of_deepspeed = compiler.compile, "torch._inductor.compile_fx" in sys.modules  # 0.19.7 loads it itself
apply_startup_patches()
import deepspeed.runtime.zero.muon.muon_optimizer  # as is_zero_supported_optimizer does (runtime/zero/utils.py)
assert ("torch._inductor.compile_fx" in sys.modules) == of_deepspeed
assert compiler.compile is compile_later
"""
    alone("-c", script).check_returncode()


def test_needed_own_shard() -> None:
    """On the last of two ranks a weight of three numbers cannot be set whole."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    shard = torch.zeros(2)
    optimizer = SimpleNamespace(
        _get_fp32_opt_state_partition=lambda *_, **__: (shard, 0),
        _get_param_partition_rank=lambda _: 1,
        _swappable_optimizer_subgroup=lambda _: False,
    )
    parameter = SimpleNamespace(requires_grad=True, ds_numel=3)
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        DeepSpeedZeroOptimizer_Stage3.set_full_hp_param(optimizer, torch.ones(3), parameter)


def test_needed_read_from_nvme_once() -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    read: list[int] = []
    master = torch.nn.Parameter(torch.zeros(4))
    optimizer = SimpleNamespace(
        grad_position={0: (0, 0, 2), 1: (0, 2, 2)},
        get_param_id=lambda parameter: parameter,
        _swappable_optimizer_subgroup=lambda _: True,
        _optimizer_states_and_gradient_swap_in=read.append,
        _release_swap_buffers=lambda _: None,
        fp32_partitioned_groups_flat=[master],
    )
    for parameter in (0, 1):
        DeepSpeedZeroOptimizer_Stage3._get_fp32_opt_state_partition(optimizer, parameter, True)
    assert read == [0, 0]


# --- torch ---


def test_needed_wrap_collectives() -> None:
    """torch's counter of collectives counts neither bytes nor time."""
    from torch.distributed.tensor.debug import CommDebugMode

    assert not [name for name in dir(CommDebugMode) if "byte" in name or "second" in name or "time" in name]


def test_needed_wrap_waits() -> None:
    """A Work has no waiting time, only times of the operation, and none under gloo."""
    names = [name for name in dir(torch.distributed.Work) if "wait" in name or "exposed" in name]
    assert not set(names) - {"wait", "block_current_stream"}


# --- peft ---


@pytest.fixture
def mixture() -> Any:
    """Return a tiny DeepSeek-V3 on the meta device."""
    sys.path.insert(0, str(ROOT / "docs"))
    import target_table

    return target_table.built("deepseek_v3")


def test_needed_replace_dropout(tiny_model: Path) -> None:
    """LoraConfig accepts no module, and torch's dropout saves a mask of all values on a CPU."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(lora_dropout=0.1, target_modules="all-linear")
    )
    dropout = next(module for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert type(dropout) is torch.nn.Dropout
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()), lambda tensor: tensor):
        torch.nn.Dropout(0.1)(torch.ones(1000, requires_grad=True))
    assert sum(saved) >= 1000


def trains_rows(model: Path) -> Any:
    """Return the tied head of a model in which peft trains token rows."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(target_modules="all-linear", trainable_token_indices=[1, 2])
    built: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    return built.get_base_model().get_output_embeddings()


def test_needed_gather_rows_anywhere() -> None:
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    assert 'torch.device("cuda", torch.cuda.current_device())' in inspect.getsource(TrainableTokensLayer)


def test_needed_replace_token_forward(tiny_model: Path) -> None:
    """peft computes with a copy of the whole weight and saves it for the backward pass."""
    head = trains_rows(tiny_model)
    weight = head.token_adapter.base_layer.weight
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        head(torch.ones(3, weight.shape[1], requires_grad=True))
    assert any(set(each.shape) == set(weight.shape) and each.data_ptr() != weight.data_ptr() for each in saved)


def test_needed_targets_as_given(mixture: Any) -> None:
    """In some families peft adapts the routed experts where shared ones are named."""
    from peft import LoraConfig, get_peft_model

    names = ["shared_experts.gate_proj", "shared_experts.up_proj"]
    adapted = get_peft_model(mixture, LoraConfig(target_modules=names)).state_dict()
    assert not any("shared_experts" in name for name in adapted if "lora_" in name)
    assert any(".mlp.experts.lora_A" in name for name in adapted)


def test_needed_converts(mixture: Any) -> None:
    """peft has a list of families, and says nothing of what it reads otherwise."""
    from peft import LoraConfig

    assert converts(LoraConfig(), mixture, ["shared_experts.gate_proj"])
    assert converts(LoraConfig(), mixture, r".*\.layers\.0\..*o_proj")
    assert not converts(LoraConfig(), mixture, ["q_a_proj"])


def test_needed_not_read_back(mixture: Any) -> None:
    """peft renames the shared experts' factors of Laguna as the weights of its files are, which are named otherwise."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM, LagunaConfig

    sizes: dict[str, Any] = {"hidden_size": 32, "moe_intermediate_size": 16, "intermediate_size": 48, "num_experts": 4}
    config = LagunaConfig(num_hidden_layers=2, vocab_size=64, head_dim=8, pad_token_id=0, **sizes)
    lost = {}
    with torch.device("meta"):
        for family, model in {"laguna": AutoModelForCausalLM.from_config(config), "deepseek": mixture}.items():
            one: Any = copy.deepcopy(model)
            adapted = get_peft_model(one, LoraConfig(target_parameters=["shared_experts.up_proj.weight"]))
            state = get_peft_model_state_dict(adapted)
            lost[family] = not_read_back(copy.deepcopy(model), adapted.peft_config["default"], state)
    names = [f"base_model.model.model.layers.1.mlp.shared_experts.up_proj.lora_{part}.weight" for part in "AB"]
    assert lost == {"laguna": names, "deepseek": []}


def test_needed_former_names() -> None:
    """peft knows the names of some families, transformers those of all."""
    from peft.utils import transformers_weight_conversion as conversion

    assert "jamba" not in vars(conversion)["_MODEL_TO_CONVERSION_PATTERN"]
    pair = (("gate_proj", "gate_up_proj"), ("up_proj", "gate_up_proj"), ("down_proj", "down_proj"))
    assert former_names("jamba") == former_names("deepseek_v3") == pair
    assert dict(former_names("mixtral")) == {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
    assert former_names("llama") == former_names("gpt_oss") == ()


def test_needed_without_rows(tiny_model: Path) -> None:
    """The wrapper is not a linear module, and its weight is a copy."""
    head = trains_rows(tiny_model)
    assert not isinstance(head, torch.nn.Linear)
    assert head.weight is not head.token_adapter.base_layer.weight


# --- transformers ---


def test_needed_replace_forward(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokens = torch.tensor([[5, 6, 7]])
    logits = model(input_ids=tokens, labels=tokens).logits
    assert logits.shape == (1, 3, model.config.vocab_size)  # for all positions, although only the loss is used


def test_needed_compile_template(tiny_model: Path) -> None:
    """Templates that use the date get today's, so data would change overnight; no other date can be passed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ strftime_now('%Y') }}"
    messages = [{"role": "user", "content": "When is it?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == str(datetime.datetime.now().year)
    with pytest.raises(TypeError):
        tokenizer.apply_chat_template(messages, tokenize=False, strftime_now=datetime.datetime(1999, 1, 1).strftime)


def test_bitsandbytes_import_does_not_initialise_cuda() -> None:
    """No rank can be forked after CUDA is initialised. Importing bitsandbytes queries the GPU's capability."""
    code = """
import torch
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
torch._C._cuda_getCurrentRawStream = None  # as in a CUDA build
calls = []
torch.cuda._lazy_init = lambda: calls.append(1)
real = torch.cuda.get_device_capability
from zerolora.compat.bitsandbytes_patches import load
load()
print(len(calls), torch.cuda.get_device_capability is real)
"""
    done = alone("-c", code)
    assert done.stdout.split() == ["0", "True"], done.stderr


def test_cpu_build_of_bitsandbytes_is_refused_on_a_gpu() -> None:
    from zerolora.compat import bitsandbytes_patches

    bitsandbytes_patches.load()
    with pytest.raises(UserError, match="bitsandbytes .* has no library for CUDA"):
        bitsandbytes_patches.check_cuda_library()


IMPORTS = """
import sys
{hide}
import torch
{load}
print("torch._inductor.compile_fx" in sys.modules, "bitsandbytes" in sys.modules)
import transformers.modeling_utils
print(sys.modules.get("torchao") is not None)
print(hasattr(transformers.utils.import_utils.fetch__all__, "__wrapped__"))
"""


@pytest.fixture(scope="module")
def imports() -> list[subprocess.CompletedProcess[str]]:
    hide = "from zerolora.compat.left_out import leave_out; leave_out('torchao')"
    hide += "; from zerolora.compat.transformers_import import import_quickly; import_quickly()"
    load = "from zerolora.compat.bitsandbytes_patches import load; load()"
    return [
        alone("-c", IMPORTS.format(hide=first, load=second))
        for first, second in (("", "import bitsandbytes"), (hide, load))
    ]


def test_needed_load_without_compilers(imports: list[subprocess.CompletedProcess[str]]) -> None:
    """Importing bitsandbytes loads torch's compiler; the patched import does not."""
    assert [each.stdout.splitlines()[0] for each in imports] == ["True True", "False True"]


def test_torchao_is_only_imported_when_quantizing(imports: list[subprocess.CompletedProcess[str]]) -> None:
    """transformers imports torchao in every process that builds a model, unless it is hidden."""
    assert [each.stdout.splitlines()[1] for each in imports] == ["True", "False"]
    assert "torchao" in imports[0].stderr and "torchao" not in imports[1].stderr


def test_needed_read_exports_quickly(imports: list[subprocess.CompletedProcess[str]]) -> None:
    """The cache of plain transformers is smaller than the number of its models; the lazy modules are the same."""
    assert [each.stdout.splitlines()[2] for each in imports] == ["False", "True"]
    models = Path(importlib.import_module("transformers.models").__path__[0])
    spec: Any = importlib.util.find_spec(transformers_import.MODULE)
    plain, quick = (importlib.util.module_from_spec(spec) for _ in range(2))
    for module in (plain, quick):
        spec.loader.exec_module(module)
    transformers_import.read_exports_quickly(quick)
    assert quick.define_import_structure(models) == plain.define_import_structure(models)
    assert plain.create_import_structure_from_path.cache_info().maxsize < len(list(models.iterdir()))
    assert quick.create_import_structure_from_path.cache_info().maxsize is None


@pytest.mark.parametrize(
    "text",
    ["", "x = 1\n", "# __all__\n", "__all__ = ['a', 'b']", "x = 1\n__all__ = [\n    'a',\n]\n__all__ = [\n    'b',\n]"],
)
def test_exports_are_those_of_the_whole_text(text: str) -> None:
    fetch: Any = importlib.import_module(transformers_import.MODULE).fetch__all__
    plain = inspect.unwrap(fetch)
    assert transformers_import.exports_from_end(plain)(text) == plain(text)


def test_needed_keep_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with AVX512-BF16, simulated here, evaluation repacks 4-bit weights."""
    from zerolora.compat import bitsandbytes_patches

    bitsandbytes_patches.load()
    modules: Any = importlib.import_module("bitsandbytes.nn.modules")
    packed: list[bool] = []

    def pack(weight: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        packed.append(True)
        return weight, state

    monkeypatch.setattr(modules, "_convert_weight_packed_for_cpu", pack)
    layer = modules.Linear4bit(64, 64, compute_dtype=torch.float32).to("cpu").eval()
    layer.support_avx512bf16_for_cpu = True
    with torch.no_grad():
        layer(torch.ones(1, 64))
    assert packed == [True]
    bitsandbytes_patches.keep_layout(torch.nn.Sequential(layer))
    with torch.no_grad():
        layer(torch.ones(1, 64))
    assert packed == [True]


def test_needed_stored_names() -> None:
    """A mixture of experts is stored under other names and shapes than its modules'."""
    from transformers import MixtralConfig

    from zerolora.compat.transformers_patches import stored_names
    from zerolora.model.architecture import built_on_meta

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    names = stored_names(built_on_meta(MixtralConfig(vocab_size=64, num_local_experts=2, **sizes)))
    stored = [f"model.layers.0.block_sparse_moe.experts.{n}.w{k}.weight" for n in (0, 1) for k in (1, 3)]
    assert {names.of_model(name) for name in stored} == {("model.layers.0.mlp.experts.gate_up_proj", True)}
    tensors = {name: torch.randn(48, 32) for name in stored}
    converted = names.converted(tensors)
    assert {name: tuple(tensor.shape) for name, tensor in converted.items()} == {
        "model.layers.0.mlp.experts.gate_up_proj": (2, 96, 32)
    }
    back = names.stored(converted, stored)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_needed_forget_gguf(tiny_model: Path, tmp_path: Path) -> None:
    """transformers cannot save a model that it has read from GGUF."""
    from transformers import AutoModelForCausalLM

    from zerolora.compat.transformers_patches import forget_gguf

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.hf_quantizer = SimpleNamespace(is_serializable=lambda *_, **__: False)
    model.is_quantized = True
    with pytest.raises((ValueError, AttributeError)):
        model.save_pretrained(tmp_path)
    forget_gguf(model)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


def test_needed_gguf_names(tmp_path: Path) -> None:
    """transformers silently drops a tensor without a name in the model."""
    from test_fetch import write_gguf
    from transformers import AutoModelForCausalLM

    from zerolora.compat.transformers_patches import gguf_names

    write_gguf(tmp_path / "model.gguf", **{"blk.0.attn_q.bias": [9.0] * 32})
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", output_loading_info=True)
    model, report = loaded
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not any("bias" in name for name in model.state_dict())
    assert {"blk.0.attn_q.weight", "output_norm.weight"} <= gguf_names(model)
    assert "blk.0.attn_q.bias" not in gguf_names(model)


def test_needed_gguf_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf
    from test_fetch import write_gguf
    from transformers import AutoModelForCausalLM

    from zerolora.compat.transformers_patches import gguf_parsed_once

    reader = Mock(wraps=gguf.GGUFReader)
    write_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr(gguf, "GGUFReader", reader)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    times = reader.call_count
    assert times > 1
    with gguf_parsed_once():
        other = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert reader.call_count == times + 1
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


# --- Snakemake ---

# The output of `first` has the same content in each run.
SNAKEFILE = """
{patch}
rule all:
    input: "third"
rule first:
    input: "source"
    output: "first"
    shell: "echo same > {{output}}"
rule second:
    input: "first"
    output: "second"
    shell: "echo run >> runs; echo same > {{output}}"
rule third:
    input: "second"
    output: "third"
    shell: "echo run >> runs; echo same > {{output}}"
"""


@pytest.mark.parametrize("patched", [False, True])
def test_needed_explain_system_errors(patched: bool) -> None:
    """Unpatched, Snakemake prints only a traceback for an OSError."""
    patch = "from zerolora.compat.snakemake_patches import explain_system_errors as patch; patch()" if patched else ""
    program = f"""{patch}
from snakemake.exceptions import format_exception_to_string
try:
    open("/dev/null/nothing")
except OSError as error:
    print(format_exception_to_string(error))
"""
    stdout = alone("-c", program).stdout
    assert ("Traceback" in stdout) is not patched
    assert ("give a path that leads through directories only" in stdout) is patched


PATCH = "from zerolora.compat.snakemake_patches import replan_after_same_outputs; replan_after_same_outputs()"


@pytest.mark.parametrize("patched", [False, True])
def test_needed_replan_after_same_outputs(tmp_path: Path, patched: bool) -> None:
    """Unpatched, jobs run although their inputs were rewritten with the same content."""
    (tmp_path / "Snakefile").write_text(SNAKEFILE.format(patch=PATCH if patched else ""))
    for content in ("one", "two"):
        (tmp_path / "source").write_text(content)
        served("snakemake", "--cores", "1", "--quiet", "all", directory=tmp_path).check_returncode()
    runs = (tmp_path / "runs").read_text().count("run")
    assert runs == 2 if patched else runs > 2


# Like setpriv --bounding-set=-dac_override,-dac_read_search.
UNPRIVILEGED = """
import ctypes
libc = ctypes.CDLL(None)
version, sets = (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)()
assert libc.capget(version, sets) == 0
for number in (1, 2):
    assert libc.prctl(24, number, 0, 0, 0) == 0
for number in range(3):
    sets[number] &= ~0b110
assert libc.capset(version, sets) == 0
"""


@pytest.mark.parametrize("patched", [False, True])
def test_needed_replace_write_protected_outputs(tmp_path: Path, patched: bool) -> None:
    """Unpatched, a user other than root cannot run a job whose output is write-protected."""
    patch = "from zerolora.compat.snakemake_patches import replace_write_protected_outputs as replace; replace()"
    (tmp_path / "Snakefile").write_text(
        (patch if patched else "") + '\nrule one:\n    output: "one"\n    shell: "echo new > {output}"\n'
    )
    (tmp_path / "one").write_text("old")
    (tmp_path / "one").chmod(0o444)
    command = ["snakemake", "--cores", "1", "--quiet", "all", "--forceall"]
    result = served(*command, directory=tmp_path, before=UNPRIVILEGED if os.getuid() == 0 else "")
    assert (result.returncode == 0) == patched
    assert (tmp_path / "one").read_text() == ("new\n" if patched else "old")


HOOKS = """
from zerolora.compat.snakemake_patches import after_each_job, around_planning
def plan():
    print("planning", workflow.dryrun)
    after_each_job(workflow, lambda job: print("finished", job.rule.name))
around_planning(workflow, plan, lambda: print("planned", len(list(workflow.dag.needrun_jobs()))))
print("reading", workflow.dryrun)
onsuccess: print("success")
rule two:
    input: "one"
    output: "two"
    shell: "exit 1"
rule one:
    output: "one"
    shell: "echo one > {output}"
"""


def test_needed_around_planning(tmp_path: Path) -> None:
    """workflow.dryrun is not set while the Snakefile is read, and Snakemake calls no hook if there is nothing to do."""
    said = _snakemake_says(tmp_path, "--dry-run")
    assert "reading False" in said
    assert "planning True" in said
    assert "planned 2" in said
    (tmp_path / "two").touch()
    assert "planned 0" in (said := _snakemake_says(tmp_path)) and "success" not in said


def test_needed_after_each_job(tmp_path: Path) -> None:
    """After a failed run onsuccess is not called; `after_each_job` was called for each job that succeeded."""
    said = _snakemake_says(tmp_path)
    assert "finished one" in said
    assert "finished two" not in said
    assert "success" not in said


def test_needed_before_each_job(tmp_path: Path) -> None:
    """Called before Snakemake removes the old output and marks the new one as incomplete."""
    (tmp_path / "Snakefile").write_text(
        "from pathlib import Path\n"
        "from zerolora.compat.snakemake_patches import around_planning, before_each_job\n"
        "def starts(job):\n"
        "    print('starts', job.rule.name, Path('one').exists(), any(Path('.snakemake/incomplete').iterdir()))\n"
        "around_planning(workflow, lambda: before_each_job(workflow, starts), lambda: None)\n"
        "rule one:\n    output: 'one'\n    shell: 'touch {output}'\n"
    )
    (tmp_path / "one").touch()
    command = ("snakemake", "--cores", "1", "--quiet", "all", "--forceall", "--", "one")
    assert "starts one True False" in served(*command, directory=tmp_path).stdout.splitlines()


@pytest.mark.parametrize("patched", [False, True])
def test_needed_start_after(tmp_path: Path, patched: bool) -> None:
    """Unpatched, a job starts as soon as there is room."""
    jobs = "[each for each in workflow.dag.jobs if each.rule.name == 'first' != job.rule.name]"
    wait = f"start_after(workflow, lambda job: {jobs})"
    rule = "rule {0}:\n    output: '{0}'\n    shell: 'sleep {1}; echo {0} >> order; touch {{output}}'\n"
    (tmp_path / "Snakefile").write_text(
        "from zerolora.compat.snakemake_patches import around_planning, start_after\n"
        f"def plan():\n    {wait if patched else 'pass'}\n"
        "around_planning(workflow, plan, lambda: None)\n"
        f"rule all:\n    input: 'second', 'first'\n{rule.format('first', 0.5)}{rule.format('second', 0)}"
    )
    served("snakemake", "--cores", "2", "--quiet", "all", directory=tmp_path).check_returncode()
    assert (tmp_path / "order").read_text().split() == (["first", "second"] if patched else ["second", "first"])


RECEIPTS = """
import hashlib
from pathlib import Path
from types import SimpleNamespace
from zerolora.compat.snakemake_patches import around_planning, count_as_present, decide_by_receipts
def sha256_of(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if Path(path).is_file() else None
RECEIPT = {receipt}
def plan():
    if {patched}:
        decide_by_receipts(workflow, lambda job: RECEIPT, lambda job: {{"level": "2"}}, sha256_of)
    count_as_present(workflow, {present})
around_planning(workflow, plan, lambda: print("planned", *workflow.dag.needrun_jobs()))
rule one:
    input: "source"
    output: "one"
    params: level=2
    shell: "cp {{input}} {{output}}"
"""


def planned(directory: Path, *options: str, **values: object) -> list[str]:
    """Return the jobs that a dry run plans."""
    (directory / "Snakefile").write_text(RECEIPTS.format(**{"present": [], "patched": True, **values}))
    command = ("snakemake", "--cores", "1", "--quiet", "all", "--dry-run", *options, "--", "one")
    lines = served(*command, directory=directory).stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("planned")]
    return line.split()[1:]


def receipt(digest: str, level: str = "2") -> str:
    return f"SimpleNamespace(params={{'level': {level!r}}}, inputs={{'source': {digest!r}}}, outputs={{}})"


@pytest.mark.parametrize("options", [(), ("--rerun-triggers", "mtime")], ids=["", "mtime"])
def test_needed_decide_by_receipts(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Unpatched, an older input of another content changes nothing, and a newer date does."""
    for age, name in enumerate(("one", "source")):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    now = hashlib.sha256(b"source").hexdigest()
    assert planned(tmp_path, *options, receipt="None", patched=False) == []
    assert planned(tmp_path, *options, receipt="None") == ["one"]
    assert planned(tmp_path, *options, receipt=receipt("0" * 64)) == ["one"]
    assert planned(tmp_path, *options, receipt=receipt(now, level="1")) == ["one"]
    assert planned(tmp_path, *options, receipt=receipt(now)) == []
    os.utime(tmp_path / "source", (2e9, 2e9))
    assert planned(tmp_path, *options, receipt=receipt(now)) == []
    assert planned(tmp_path, *options, "--forcerun", "one", receipt=receipt(now)) == ["one"]


def test_needed_count_as_present(tmp_path: Path) -> None:
    """Unpatched, a dry run plans every job whose outputs are missing."""
    (tmp_path / "source").write_text("source")
    made = receipt(hashlib.sha256(b"source").hexdigest())
    assert planned(tmp_path, receipt=made) == ["one"]
    assert planned(tmp_path, receipt=made, present=["one"]) == []


@pytest.mark.parametrize("patched", [False, True])
def test_needed_run_with_until(tmp_path: Path, patched: bool) -> None:
    """Unpatched, `--until one` runs only `one` and its inputs."""
    also = "run_with_until(workflow, 'other')" if patched else "None"
    rule = "rule {0}:\n    output: '{0}'\n    shell: 'touch {{output}}'\n"
    (tmp_path / "Snakefile").write_text(
        "from zerolora.compat.snakemake_patches import around_planning, run_with_until\n"
        f"around_planning(workflow, lambda: {also}, lambda: None)\n"
        f"rule all:\n    input: 'one', 'other'\n{rule.format('one')}{rule.format('other')}"
    )
    served("snakemake", "--cores", "1", "--quiet", "all", "--until", "one", directory=tmp_path).check_returncode()
    assert (tmp_path / "one").exists()
    assert (tmp_path / "other").exists() is patched


@pytest.mark.parametrize("patched", [False, True])
def test_needed_run_with_targets(tmp_path: Path, patched: bool) -> None:
    """Unpatched, the target `one` runs only `one` and its inputs."""
    also = "run_with_targets(workflow, 'other')" if patched else "None"
    rule = "rule {0}:\n    output: '{0}'\n    shell: 'touch {{output}}'\n"
    (tmp_path / "Snakefile").write_text(
        "from zerolora.compat.snakemake_patches import around_planning, run_with_targets\n"
        f"around_planning(workflow, lambda: {also}, lambda: None)\n{rule.format('one')}{rule.format('other')}"
    )
    served("snakemake", "--cores", "1", "--quiet", "all", "--", "one", directory=tmp_path).check_returncode()
    assert (tmp_path / "one").exists()
    assert (tmp_path / "other").exists() is patched


def test_needed_module_of(tmp_path: Path) -> None:
    """Snakemake shows a Snakefile neither that it is read as a module nor its prefix."""
    (tmp_path / "inner.smk").write_text(
        "from zerolora.compat.snakemake_patches import module_of\n"
        "print('read', module_of(workflow))\nrule one:\n    output: 'one'\n    shell: 'touch {output}'\n"
    )
    (tmp_path / "Snakefile").write_text(
        "from zerolora.compat.snakemake_patches import module_of\nassert module_of(workflow) is None\n"
        "module inner:\n    snakefile: 'inner.smk'\n    prefix: 'below'\n    config: {'a': 1}\n"
        "use rule * from inner\n"
    )
    result = served("snakemake", "--cores", "1", "--dry-run", "--quiet", "all", directory=tmp_path)
    read = "read UsedModule(name='inner', prefix='below/', replaces_prefix=False, config={'a': 1})"
    assert result.returncode == 0 and read in result.stdout


def test_needed_submit_local_rules(tmp_path: Path) -> None:
    """Snakemake takes no function for `localrule`, and keeps what it read."""
    (tmp_path / "Snakefile").write_text(
        "from zerolora.compat.snakemake_patches import submit_local_rules\n"
        "rule one:\n    output: 'one'\n    localrule: True\n    shell: 'touch {output}'\n"
        "rule two:\n    output: 'two'\n    localrule: lambda wildcards: True\n    shell: 'touch {output}'\n"
        "print('local', *workflow._localrules)\n"
        "submit_local_rules(workflow, ['one'])\n"
        "print('then', *workflow._localrules)\n"
    )
    result = served("snakemake", "--cores", "1", "--dry-run", "--quiet", "all", directory=tmp_path)
    assert result.stdout.splitlines()[:2] == ["local one", "then"]


def _snakemake_says(directory: Path, *options: str) -> list[str]:
    (directory / "Snakefile").write_text(HOOKS)
    command = ["snakemake", "--cores", "1", "--quiet", "all", *options, "--", "two"]
    return served(*command, directory=directory).stdout.splitlines()


def test_needed_undetermined() -> None:
    """Snakemake's value for an undetermined resource has no public name."""
    import snakemake.api
    import snakemake.common.tbdstring

    from zerolora.compat.snakemake_patches import undetermined

    assert isinstance(undetermined(), snakemake.common.tbdstring.TBDString)
    assert not [name for name in dir(snakemake.api) if "TBD" in name]


def test_needed_followed_by_slurms_fields() -> None:
    """The executor never reports the end of a preempted job, Snakemake retries a cancelled one, and squeue is asked for
    states alone. On a real Slurm: tests/slurm/test_events.py, test_screen.py."""
    import snakemake_executor_plugin_slurm as executor

    source = inspect.getsource(executor.Executor.check_active_jobs)
    failed = source.partition("fail_stati = (")[2].partition(")")[0]
    assert "CANCELLED" in failed and "PREEMPTED" not in failed
    branch = source.partition('elif status == "PREEMPTED"')[2].partition("elif status")[0]
    assert "yield j" in branch and "report_job" not in branch
    assert "%i|%T" in executor.query_job_status_squeue("run") and "--array" not in source


def test_needed_submitted_once() -> None:
    """The executor reports a refusal as a failure, which Snakemake repeats. It takes an array's resources from its
    first job, drops jobs that arrive before the others, and runs the first job in every task of training. On a real
    Slurm: tests/slurm/test_pipeline.py, test_screen.py."""
    import snakemake_executor_plugin_slurm as executor
    import snakemake_executor_plugin_slurm_jobstep as jobstep

    refused = inspect.getsource(executor.Executor.run_job)
    assert "SLURM sbatch failed." in refused and "exc_info=True" in refused and "restart_times" not in refused
    arrays = inspect.getsource(executor.Executor.run_array_jobs)
    assert "get_submit_command(\n                jobs[0]," in arrays
    run_jobs = inspect.getsource(executor.Executor.run_jobs)
    dropped = run_jobs.partition("arrived (< chunk size), waiting for more jobs.")[2]
    assert dropped.split()[:3] == ['"', ")", "continue"]
    step = inspect.getsource(jobstep.Executor.run_job)
    assert step.index('if "mpi" in job.resources.keys():') < step.index("elif self.job_array_task and")


def test_needed_ends_with_its_jobs() -> None:
    """SIGTERM waits for all jobs, the end for the pause between two checks, and a query hides the jobs from Ctrl-C. On
    a real Slurm: tests/slurm/test_screen.py."""
    from snakemake.scheduling.job_scheduler import JobScheduler
    from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

    assert 'self._user_kill = "graceful"' in inspect.getsource(JobScheduler.exit_gracefully)
    assert "self.wait_thread.join()" in inspect.getsource(RemoteExecutor.shutdown)
    assert "self.active_jobs.clear()" in inspect.getsource(RemoteExecutor._wait_for_jobs)
    assert "active_jobs = list(self.active_jobs)" in inspect.getsource(RemoteExecutor.cancel)


def test_needed_gpus_of_each_node() -> None:
    """Unpatched, the executor requests a job's GPUs from sbatch twice."""
    script = """
from types import SimpleNamespace
import snakemake_executor_plugin_slurm as executor
class Resources(dict):
    __getattr__ = dict.__getitem__
print(executor.set_gres_string(SimpleNamespace(resources=Resources(gpu=2, gres="gpu:2"))))
"""
    assert alone("-c", script).stdout.split() == ["--gres=gpu:2", "--gpus=2"]


def test_needed_jobs_named_by_stage_and_run() -> None:
    """Unpatched, all jobs of a workflow have one random name. On a real Slurm: tests/slurm/test_pipeline.py."""
    import snakemake_executor_plugin_slurm as executor

    for submit in (executor.Executor.run_job, executor.Executor.run_array_jobs):
        assert '"run_uuid": self.run_uuid,' in inspect.getsource(submit)
    assert " --name a-name" in executor.query_job_status_squeue("a-name")


def test_needed_one_snakemake_a_job() -> None:
    """Unpatched, the Snakemake of a job starts another. On a real Slurm: tests/slurm/test_pipeline.py."""
    import snakemake_executor_plugin_slurm as executor
    import snakemake_executor_plugin_slurm_jobstep as jobstep

    assert "--executor slurm-jobstep" in inspect.getsource(executor.Executor.additional_general_args)
    assert "srun -n1" in inspect.getsource(jobstep.Executor.run_job)


def test_needed_load_report() -> None:
    """transformers reports missing weights only after drawing them at random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=8, **sizes)
    loaded: Any = LlamaForCausalLM.from_pretrained(None, config=config, state_dict={}, output_loading_info=True)
    assert "lm_head.weight" in loaded[1]["missing_keys"]
    assert loaded[0].lm_head.weight.abs().sum() > 0


def test_needed_quantizable_paths() -> None:
    """transformers decides which modules to quantize while replacing them, and returns no paths."""
    from transformers.quantizers import base, quantizers_utils

    names = {*dir(base.HfQuantizer), *dir(quantizers_utils)}
    assert not {name for name in names if "paths" in name or "modules_to_convert" in name}


def no_experts(_: Any, __: str) -> bool:
    return False


def test_needed_quantize_all(tmp_path: Path) -> None:
    """transformers quantizes no module of a Falcon, whose class is a subclass of nn.Linear with the same result, and no
    parameter of experts."""
    from bitsandbytes.nn.modules import Linear4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, FalconConfig, FalconForCausalLM

    FalconForCausalLM(
        FalconConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    counts = []
    for within in (contextlib.nullcontext(), transformers_patches.quantize_all(no_experts)):
        with within:
            model = AutoModelForCausalLM.from_pretrained(
                tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map={"": "cpu"}
            )
        counts.append(sum(isinstance(module, Linear4bit) for module in model.modules()))
    assert counts == [0, 4]
    with transformers_patches.quantize_all(lambda module, name: name == "bias"):
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map={"": "cpu"}
        )
    packed = {name for name, each in model.named_parameters() if bitsandbytes_patches.is_packed(each)}
    assert {name for name in packed if name.endswith("bias")} == {
        name for name, _ in model.named_parameters() if name.endswith("bias")
    }


def test_needed_kept_as_read(tmp_path: Path) -> None:
    """transformers passes what it reads to no one, and shards only what is not quantized."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=8, num_attention_heads=1, **sizes)).save_pretrained(tmp_path)
    kept: list[Any] = []

    def keep(parameter: Any) -> Any:
        kept.append(parameter)
        return parameter

    with transformers_patches.kept_as_read(keep, torch.device("cpu"), no_experts):
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map={"": "cpu"}
        )
    parameters = list(model.parameters())
    assert len(kept) == len(parameters) == 12
    assert {id(each) for each in kept} == {id(each) for each in parameters}
    assert sum(bitsandbytes_patches.is_packed(each) for each in kept) == 7
    source = inspect.getsource(PreTrainedModel.get_init_context)
    assert "if not is_quantized and not _is_ds_init_called" in source


def test_needed_resizable() -> None:
    """transformers gathers sharded embeddings that it resizes, but not those of a quantized model."""
    from transformers import PreTrainedModel

    source = inspect.getsource(PreTrainedModel._get_resized_embeddings)
    assert source.count("is_deepspeed_zero3_enabled() and not is_quantized") == source.count("GatheredParameters") == 4
    model = SimpleNamespace(hf_quantizer=5)
    with transformers_patches.resizable(model):
        assert not hasattr(model, "hf_quantizer")
    assert model.hf_quantizer == 5


def test_needed_packed() -> None:
    """bitsandbytes quantizes a parameter of three dimensions only by itself, and a module does not compute with it."""
    weight = torch.randn(2, 8, 16)
    config = SimpleNamespace(
        bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.float32
    )
    packed = bitsandbytes_patches.packed(weight, config)
    assert packed.shape == (2 * 8 * 16 // 8, 1) and packed.dtype == torch.float32
    module = torch.nn.ParameterDict({"a": packed, "b": torch.zeros(2)})
    assert [*bitsandbytes_patches.packed_parameters(module)] == ["a"]


def test_needed_unpacked() -> None:
    """A 4-bit parameter has the shape of its codes."""
    from bitsandbytes import functional

    weight = torch.randn(2, 8, 16)
    config = SimpleNamespace(
        bnb_4bit_use_double_quant=False, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.uint8
    )
    packed = bitsandbytes_patches.packed(weight, config)
    expected = functional.dequantize_4bit(*functional.quantize_4bit(weight, quant_type="nf4", blocksize=64))
    assert packed.shape != weight.shape
    assert bitsandbytes_patches.unpacked(packed, packed.quant_state).equal(expected)


def test_needed_adapt_packed_parameters() -> None:
    """peft registers its update beside another parametrization, and does not remove it."""
    from peft.tuners.lora import layer

    source = inspect.getsource(layer)  # of the file: another test may have replaced the function
    assert "isinstance(module, _LoraParameterProxy)" in source
    assert not issubclass(layer._LoraFactorsProxy, layer._LoraParameterProxy)
    assert "_LoraFactorsProxy(*self.get_delta_factors(adapters[0]))" in source


def test_needed_add_bounds() -> None:
    """The server gives a model whatever it is sent, and nothing bounds an answer by the context."""
    from transformers.cli.serving import utils

    model: Any = Mock(generate=Mock(return_value=torch.zeros(1, 9)))
    inputs, asked = {"input_ids": torch.zeros(1, 8)}, Mock(max_new_tokens=100)
    asyncio.run(utils.GenerateManager().generate_non_streaming(model, Mock(), inputs, asked, "1"))
    assert model.generate.call_args.kwargs["input_ids"].shape[-1] == 8 and asked.max_new_tokens == 100


def test_needed_on_meta() -> None:
    """A 4-bit parameter on the meta device has its shard's shape, and its constants are moved with it."""
    from bitsandbytes.nn.modules import Params4bit

    move: Any = vars(Params4bit)["to"]
    packed = move(Params4bit(torch.rand(64, 64), quant_type="nf4"), "cpu")
    constants = packed.quant_state.absmax
    whole = bitsandbytes_patches.on_meta(packed, (4096, 1))
    assert whole.is_meta and whole.shape == (4096, 1) and whole.quant_state.absmax is constants
    assert move(packed, "meta").shape == (2048, 1) and packed.quant_state.absmax.is_meta


def test_needed_sharder() -> None:
    """DeepSpeed's zero.Init has no public method that shards a parameter."""
    from deepspeed.runtime.zero.partition_parameters import Init

    methods = {name for name, value in vars(Init).items() if callable(value)}
    assert "_convert_to_deepspeed_param" in methods
    assert not {name for name in methods if not name.startswith("_") and ("convert" in name or "shard" in name)}
