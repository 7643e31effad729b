"""Each patch of another library is still needed, and stops with another version than the one it is written for.

A test here fails when a library fixes what a patch works around: then the patch goes, with its test.
"""

import datetime
import importlib
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

import pytest
import torch
from conftest import ROOT, project_environment, served

from zerolora import compat
from zerolora.compat import versions
from zerolora.compat.versions import PATCHES, Patch
from zerolora.errors import UserError

for found in pkgutil.iter_modules(compat.__path__):
    importlib.import_module(f"{compat.__name__}.{found.name}")


def alone(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python by itself, with no library imported."""
    environment = project_environment(ROOT)
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what torch and DeepSpeed do by themselves."""
    script = str(Path(__file__).parent / "unpatched.py")
    result = alone(script, str(tmp_path_factory.mktemp("unpatched")))
    assert result.returncode == 0, result.stderr[-3000:]
    seen: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return seen


def test_every_patch_has_a_test_that_it_is_needed() -> None:
    tests = {name.removeprefix("test_needed_") for name in globals() if name.startswith("test_needed_")}
    assert tests == set(PATCHES)


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_a_patch_is_for_the_installed_version_and_says_why(patch: Patch) -> None:
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
def test_with_another_version_it_stops_with_one_line(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda library: "0.0.1")
    with pytest.raises(UserError) as raised:
        patch.check()
    line = str(raised.value)
    assert line.startswith(f"{patch.library} 0.0.1 is installed, but zerolora.compat ({patch.name}) is written for ")
    assert patch.version in line and line.endswith("run `make`, which installs envs/requirements.lock")
    assert "\n" not in line


def test_a_patched_function_checks_before_it_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerolora.compat.peft_patches import replace_dropout

    monkeypatch.setattr(versions, "installed", lambda library: "9.9.9")
    model = torch.nn.Sequential(torch.nn.Dropout(0.5))
    with pytest.raises(UserError, match=r"peft 9\.9\.9 is installed"):
        replace_dropout(model, torch.nn.Dropout1d)
    assert type(model[0]) is torch.nn.Dropout


def test_an_untested_series_is_allowed_if_its_features_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda library: "2.11.3")
    Patch("some", "torch", "2.13.0", ("2.11",), "none known", ("torch.distributed:Work.wait",)).check()
    lacking = Patch("some", "torch", "2.13.0", ("2.11",), "none known", ("torch.distributed:Work.nap",))
    with pytest.raises(UserError, match=r"torch 2\.11\.3 is installed.*has no torch\.distributed\.Work\.nap"):
        lacking.check()
    with pytest.raises(UserError, match="written for 2"):
        Patch("some", "torch", "2.13.0", ("2.1",), "none known", ()).check()


@pytest.mark.parametrize("name", ["snakemake_patches", "slurm_executor_patches", "transformers_patches", "versions"])
def test_what_the_workflow_and_the_data_import_loads_no_torch(name: str) -> None:
    script = (
        f"import sys, zerolora.compat.{name}; assert not {{'torch', 'transformers', 'snakemake'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], env=project_environment(ROOT), check=True)


# --- DeepSpeed ---


def test_needed_apply_startup_patches(unpatched: dict[str, Any]) -> None:
    assert unpatched["shm_comm counts as buildable"]
    assert unpatched["weights that rank 0 sends at the start"] == 4
    assert unpatched["torch's compiler is loaded"]


def test_deepspeed_starts_without_torchs_compiler_and_leaves_it_as_it_was() -> None:
    script = """
import sys
from deepspeed.runtime import compiler
from zerolora.compat.deepspeed_patches import apply_startup_patches
compile_later = compiler.compile
apply_startup_patches()
import deepspeed.runtime.zero.muon.muon_optimizer  # as is_zero_supported_optimizer does (runtime/zero/utils.py)
assert "torch._inductor.compile_fx" not in sys.modules
assert compiler.compile is compile_later
"""
    result = alone("-c", script)
    assert result.returncode == 0, result.stderr


def test_needed_keep_clipped_norm(unpatched: dict[str, Any]) -> None:
    assert unpatched["norm after clipping"] is None


def test_needed_undo_first_step(unpatched: dict[str, Any]) -> None:
    assert unpatched["updates before the first step"] == [1, 1, 1, 1]


def test_needed_release_by_current_trace(unpatched: dict[str, Any]) -> None:
    assert unpatched["decisions of a trace that is gone"] == unpatched["decisions of a trace"] > 0


def test_needed_grow_scale_after_step(unpatched: dict[str, Any]) -> None:
    assert unpatched["order of stage 0's step"] == ["_update_scale", "unscale_and_clip_grads"]


def test_needed_stage0_scale(unpatched: dict[str, Any]) -> None:
    assert unpatched["scale of stage 0's gradients"] == pytest.approx(1)


def test_needed_scaler_of(unpatched: dict[str, Any]) -> None:
    assert not unpatched["stage 0 has a loss_scaler"]


def test_needed_set_scale(unpatched: dict[str, Any]) -> None:
    assert not unpatched["loss scalers can load a state"]


def test_needed_stage0_masters(unpatched: dict[str, Any]) -> None:
    assert not unpatched["master by DeepSpeed's own function"]


def test_needed_make_states(unpatched: dict[str, Any]) -> None:
    assert unpatched["states before the first step"] == 0


def test_needed_link_states(unpatched: dict[str, Any]) -> None:
    assert not unpatched["states added after a step are found"]


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
    """Two states of one group are read from NVMe twice."""
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
    """torch's own counter of collectives knows neither bytes nor time."""
    from torch.distributed.tensor.debug import CommDebugMode

    assert not [name for name in dir(CommDebugMode) if "byte" in name or "second" in name or "time" in name]


def test_needed_wrap_waits() -> None:
    """Nothing tells how long a rank waited: a Work has times of the operation only, and not under gloo."""
    names = [name for name in dir(torch.distributed.Work) if "wait" in name or "exposed" in name]
    assert not set(names) - {"wait", "block_current_stream"}


def test_needed_time_every_reduction(unpatched: dict[str, Any]) -> None:
    assert unpatched["times of DDP's last ten steps"] == 1


def test_needed_ddp_reductions(unpatched: dict[str, Any]) -> None:
    assert unpatched["all-reduces of DDP that go through torch.distributed"] == 0


def test_needed_fresh_state(unpatched: dict[str, Any]) -> None:
    assert unpatched["states of AdamW before its first step"] == 0


# --- peft ---


def test_needed_replace_dropout(tiny_model: Path) -> None:
    """LoraConfig takes no module, and torch's dropout keeps as many values on a CPU as it was given."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(lora_dropout=0.1, target_modules="all-linear")
    )
    dropout = next(module for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert type(dropout) is torch.nn.Dropout
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        torch.nn.Dropout(0.1)(torch.ones(1000, requires_grad=True))
    assert sum(kept) >= 1000


def trains_rows(model: Path) -> Any:
    """Return the head of a model whose embedding it shares, and of which peft trains rows."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(target_modules="all-linear", trainable_token_indices=[1, 2])
    built: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    return built.get_base_model().get_output_embeddings()


def test_needed_gather_rows_anywhere() -> None:
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    assert 'torch.device("cuda", torch.cuda.current_device())' in inspect.getsource(TrainableTokensLayer)


def test_needed_replace_token_forward(tiny_model: Path) -> None:
    """peft computes with a copy of the whole weight, which it keeps until the backward pass."""
    head = trains_rows(tiny_model)
    weight = head.token_adapter.base_layer.weight
    copies: list[bool] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(set(tensor.shape) == set(weight.shape) and tensor.data_ptr() != weight.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        head(torch.ones(3, weight.shape[1], requires_grad=True))
    assert any(copies)


def test_needed_without_rows(tiny_model: Path) -> None:
    """The wrapper is not a linear module, and its weight a copy."""
    head = trains_rows(tiny_model)
    assert not isinstance(head, torch.nn.Linear)
    assert head.weight is not head.token_adapter.base_layer.weight


# --- transformers ---


def test_needed_replace_forward(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokens = torch.tensor([[5, 6, 7]])
    logits = model(input_ids=tokens, labels=tokens).logits
    assert logits.shape == (1, 3, model.config.vocab_size)  # made for all positions, although only a loss is wanted


def test_needed_compile_template(tiny_model: Path) -> None:
    """Templates that ask for the date get today's, which would change the data overnight; another cannot be passed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ strftime_now('%Y') }}"
    messages = [{"role": "user", "content": "When is it?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == str(datetime.datetime.now().year)
    with pytest.raises(TypeError):
        tokenizer.apply_chat_template(messages, tokenize=False, strftime_now=datetime.datetime(1999, 1, 1).strftime)


def test_needed_compile_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping

    from zerolora.compat.transformers_patches import compile_conversions

    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)
    importlib.import_module("transformers.models.llama.modeling_llama")  # which compiles nothing
    assert conversion_mapping._checkpoint_conversion_mapping_cache is None
    compile_conversions()
    assert len(conversion_mapping._checkpoint_conversion_mapping_cache or ()) > 100


def test_bitsandbytes_does_not_initialise_cuda_where_there_is_a_gpu() -> None:
    """After that no rank can be forked. Its import asks the pretended GPU's capability, in a process of its own."""
    code = """
import torch
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
torch._C._cuda_getCurrentRawStream = None  # of a CUDA build
noted = []
torch.cuda._lazy_init = lambda: noted.append(1)
real = torch.cuda.get_device_capability
from zerolora.compat.bitsandbytes_patches import load
load()
print(len(noted), torch.cuda.get_device_capability is real)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0", "True"], done.stderr


def test_a_library_of_bitsandbytes_for_the_cpu_is_refused_on_a_gpu() -> None:
    from zerolora.compat import bitsandbytes_patches

    bitsandbytes_patches.load()
    with pytest.raises(UserError, match="bitsandbytes .* has no library for CUDA"):
        bitsandbytes_patches.check_cuda_library()


def test_needed_load_without_compilers() -> None:
    """bitsandbytes compiles at its import; loaded so, it has not, and it is there. In processes of their own."""
    code = "import sys, torch; {}; print('torch._inductor.compile_fx' in sys.modules, 'bitsandbytes' in sys.modules)"
    ways = ("import bitsandbytes", "from zerolora.compat.bitsandbytes_patches import load; load()")
    said = [
        subprocess.run([sys.executable, "-c", code.format(way)], capture_output=True, text=True, check=True).stdout
        for way in ways
    ]
    assert said == ["True True\n", "False True\n"]


def test_torchao_is_loaded_by_commands_that_quantize_alone() -> None:
    """transformers imports it in every process that builds a model; hidden, it does not. In processes of their own."""
    code = "import sys; {}; import transformers.modeling_utils; print(sys.modules.get('torchao') is not None)"
    actual = [
        alone("-c", code.format(way))
        for way in ("pass", "from zerolora.compat import torchao_patches; torchao_patches.hide()")
    ]
    assert [each.stdout for each in actual] == ["True\n", "False\n"]
    assert "torchao" in actual[0].stderr and "torchao" not in actual[1].stderr


def test_needed_keep_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with AVX512-BF16, as this one is told to be, evaluation packs 4-bit weights in another way."""
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
    """A mixture of experts is stored under other names and in other shapes than it is built."""
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
    """As transformers leaves a model that it has read from GGUF."""
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
    """transformers drops a tensor that has no other name, and reports nothing."""
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

    parsed: list[Any] = []
    parse = gguf.GGUFReader

    def counted(file: Any) -> Any:
        parsed.append(file)
        return parse(file)

    write_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr(gguf, "GGUFReader", counted)

    def read() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")

    model = read()
    times = len(parsed)
    assert times > 1
    with gguf_parsed_once():
        other = read()
    assert len(parsed) == times + 1
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


# --- Snakemake ---

# `second` reads what `first` writes, which is the same content again.
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
    """Without the patch Snakemake prints nothing but a traceback for an OSError."""
    patch = "from zerolora.compat.snakemake_patches import explain_system_errors as patch; patch()" if patched else ""
    program = f"""{patch}
from snakemake.exceptions import format_exception_to_string
try:
    open("/dev/null/nothing")
except OSError as error:
    print(format_exception_to_string(error))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ("Traceback" in result.stdout) is not patched
    assert ("write a path that leads through directories only" in result.stdout) is patched


PATCH = "from zerolora.compat.snakemake_patches import replan_after_same_outputs; replan_after_same_outputs()"


@pytest.mark.parametrize("patched", [False, True])
def test_needed_replan_after_same_outputs(tmp_path: Path, patched: bool) -> None:
    """Unpatched, jobs run although the job before them wrote what was there before."""
    (tmp_path / "Snakefile").write_text(SNAKEFILE.format(patch=PATCH if patched else ""))
    for content in ("one", "two"):
        (tmp_path / "source").write_text(content)
        served("snakemake", "--cores", "1", "--quiet", "all", directory=tmp_path).check_returncode()
    runs = (tmp_path / "runs").read_text().count("run")
    assert runs == 2 if patched else runs > 2


# As setpriv --bounding-set=-dac_override,-dac_read_search does for a command that it starts.
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
    """While the Snakefile is read, Snakemake does not know that this is a dry run; before it plans, it does. Its hooks
    are not called where nothing is to be done."""
    said = _snakemake_says(tmp_path, "--dry-run")
    assert "reading False" in said
    assert "planning True" in said
    assert "planned 2" in said
    (tmp_path / "two").touch()
    assert "planned 0" in (said := _snakemake_says(tmp_path)) and "success" not in said


def test_needed_after_each_job(tmp_path: Path) -> None:
    """After a run that fails, onsuccess does not run, while `after_each_job` has run for the jobs that ended well."""
    said = _snakemake_says(tmp_path)
    assert "finished one" in said
    assert "finished two" not in said
    assert "success" not in said


STARTS = """
from pathlib import Path
from zerolora.compat.snakemake_patches import around_planning, before_each_job, run_again, without_metadata
def starts(job):
    print("starts", job.rule.name, Path("one").exists(), any(Path(".snakemake/incomplete").iterdir()))
def plan():
    print("without", *without_metadata(workflow, ["one"]))
    before_each_job(workflow, starts)
    if Path("again").exists():
        run_again(workflow, ["one"])
around_planning(workflow, plan, lambda: None)
rule one:
    params: Path("again").exists()
    output: "one"
    shell: "echo run >> runs; echo one > {output}"
"""


@pytest.fixture
def files_of_nobody(tmp_path: Path) -> Callable[[], list[str]]:
    """Return what runs Snakemake where the output is there, but not what Snakemake knows of its job."""
    (tmp_path / "Snakefile").write_text(STARTS)
    (tmp_path / "one").write_text("of nobody")
    command = ["snakemake", "--cores", "1", "--quiet", "all", "--", "one"]
    return lambda: list(served(*command, directory=tmp_path).stdout.splitlines())


def test_needed_before_each_job(files_of_nobody: Callable[[], list[str]], tmp_path: Path) -> None:
    """Called while the old output is there. Snakemake removes it and then marks the new one as incomplete."""
    (tmp_path / "again").touch()
    assert "starts one True False" in files_of_nobody()


def test_needed_run_again(files_of_nobody: Callable[[], list[str]], tmp_path: Path) -> None:
    """By itself Snakemake takes a file of nobody for up to date, although a parameter of its job has changed since."""
    files_of_nobody()
    assert (tmp_path / "one").read_text() == "of nobody"
    (tmp_path / "again").touch()
    files_of_nobody()
    assert (tmp_path / "one").read_text() == "one\n"


def test_needed_without_metadata(files_of_nobody: Callable[[], list[str]], tmp_path: Path) -> None:
    (tmp_path / "again").touch()
    assert "without one" in files_of_nobody()
    assert "without" in files_of_nobody(), "it ran, and Snakemake knows its job"


@pytest.mark.parametrize("patched", [False, True])
def test_needed_count_as_done(tmp_path: Path, patched: bool) -> None:
    """Without it a dry run plans a job whatever else is known of its outputs."""
    (tmp_path / "Snakefile").write_text(
        "from zerolora.compat.snakemake_patches import around_planning, count_as_done\n"
        f"around_planning(workflow, lambda: count_as_done(workflow, ['one'] if {patched} else []), lambda: "
        "print('planned', *workflow.dag.needrun_jobs()))\n"
        "rule two:\n    input: 'one'\n    output: 'two'\n    shell: 'touch {output}'\n"
        "rule one:\n    input: 'source'\n    output: 'one'\n    shell: 'touch {output}'\n"
    )
    for age, name in enumerate(("source", "two", "one")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    os.utime(tmp_path / "two", (1e9 + 1, 1e9 + 1))
    said = served("snakemake", "--cores", "1", "--quiet", "all", "--dry-run", "--", "two", directory=tmp_path).stdout
    assert ("planned\n" in said) is patched


@pytest.mark.parametrize("patched", [False, True])
def test_needed_run_with_until(tmp_path: Path, patched: bool) -> None:
    """Without it `--until one` makes nothing but `one` and what that reads."""
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
def test_needed_ignore_broken_metadata(tmp_path: Path, patched: bool) -> None:
    """Without the patch Snakemake ends with the error of the codec."""
    patch = "from zerolora.compat.snakemake_patches import ignore_broken_metadata as patch; patch()" if patched else ""
    rule = "rule one:\n    output: 'one'\n    shell: 'touch {output}'\n"
    (tmp_path / "Snakefile").write_text(f"{patch}\n{rule}")
    command = ["snakemake", "--cores", "1", "--quiet", "all", "--", "one"]
    served(*command, directory=tmp_path).check_returncode()
    (record,) = (tmp_path / ".snakemake/metadata").iterdir()
    record.write_bytes(b"\xff")
    assert (served(*command, directory=tmp_path).returncode == 0) is patched


def _snakemake_says(directory: Path, *options: str) -> list[str]:
    (directory / "Snakefile").write_text(HOOKS)
    command = ["snakemake", "--cores", "1", "--quiet", "all", *options, "--", "two"]
    return served(*command, directory=directory).stdout.splitlines()


def test_needed_undetermined() -> None:
    """The value that Snakemake itself gives a resource which is not known yet has no public name."""
    import snakemake.api
    import snakemake.common.tbdstring

    from zerolora.compat.snakemake_patches import undetermined

    assert isinstance(undetermined(), snakemake.common.tbdstring.TBDString)
    assert not [name for name in dir(snakemake.api) if "TBD" in name]


def test_needed_preempted_is_cancelled() -> None:
    """Of a job in this state the executor reports neither success nor failure; tests/slurm/test_events.py shows what
    becomes of it on a real Slurm."""
    import snakemake_executor_plugin_slurm as executor

    source = inspect.getsource(executor.Executor.check_active_jobs)
    failed = source.partition("fail_stati = (")[2].partition(")")[0]
    assert "CANCELLED" in failed and "PREEMPTED" not in failed
    branch = source.partition('elif status == "PREEMPTED"')[2].partition("elif status")[0]
    assert "yield j" in branch and "report_job" not in branch


def test_needed_arrays_of_equal_jobs() -> None:
    """The executor takes the resources of an array from its first job, drops jobs that come before all others are
    ready, and has every task of training run the first job. tests/slurm/test_pipeline.py runs an array."""
    import snakemake_executor_plugin_slurm as executor
    import snakemake_executor_plugin_slurm_jobstep as jobstep

    arrays = inspect.getsource(executor.Executor.run_array_jobs)
    assert "get_submit_command(\n                jobs[0]," in arrays
    dropped = inspect.getsource(executor.Executor.run_jobs).partition("arrived (< chunk size), waiting for more jobs.")[
        2
    ]
    assert dropped.split()[:3] == ['"', ")", "continue"]
    step = inspect.getsource(jobstep.Executor.run_job)
    assert step.index('if "mpi" in job.resources.keys():') < step.index("elif self.job_array_task and")


def test_needed_gpus_of_each_node() -> None:
    """By itself the executor asks sbatch for a job's GPUs twice."""
    script = """
from types import SimpleNamespace
import snakemake_executor_plugin_slurm as executor
class Resources(dict):
    __getattr__ = dict.__getitem__
print(executor.set_gres_string(SimpleNamespace(resources=Resources(gpu=2, gres="gpu:2"))))
"""
    assert alone("-c", script).stdout.split() == ["--gres=gpu:2", "--gpus=2"]


def test_needed_load_report() -> None:
    """transformers reports what it could not load only after it has drawn the rest at random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=8, **sizes)
    loaded: Any = LlamaForCausalLM.from_pretrained(None, config=config, state_dict={}, output_loading_info=True)
    assert "lm_head.weight" in loaded[1]["missing_keys"]
    assert loaded[0].lm_head.weight.abs().sum() > 0


def test_needed_quantizable_paths() -> None:
    """Which modules are quantized is decided while they are replaced; nothing returns their paths."""
    from transformers.quantizers import base, quantizers_utils

    names = {*dir(base.HfQuantizer), *dir(quantizers_utils)}
    assert not {name for name in names if "paths" in name or "modules_to_convert" in name}
