"""Writes the arguments of other tools, with their defaults, for the importers.

    python benchmarks/import_arguments.py axolotl=FOLDER llamafactory=FOLDER swift=FOLDER transformers=FOLDER trl=FOLDER

Each FOLDER is a checkout; the argument classes in it are read as syntax and never run. The result is one file a tool,
src/zerolora/imports/arguments/NAME.json. A default that is no literal, such as that of a function, is left out: the
importer then treats every value as one that is not the default.
"""

import argparse
import ast
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUTPUT = Path("src/zerolora/imports/arguments")
UNKNOWN = object()
TOOLS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "axolotl": (
        "VERSION",
        ("src/axolotl/utils/schemas/**/*.py", "src/axolotl/integrations/*/args.py"),
        ("AxolotlInputConfig", "src/axolotl/integrations/*/args.py"),
    ),
    "llamafactory": (
        "src/llamafactory/extras/env.py",
        ("src/llamafactory/hparams/*.py", "src/llamafactory/extras/constants.py"),
        ("ModelArguments", "DataArguments", "TrainingArguments", "FinetuningArguments", "GeneratingArguments"),
    ),
    "swift": (
        "swift/version.py",
        ("swift/arguments/**/*.py", "swift/trainers/arguments.py", "swift/rlhf_trainers/arguments.py"),
        ("SftArguments", "RLHFArguments"),
    ),
    "transformers": (
        "src/transformers/__init__.py",
        (
            "src/transformers/training_args*.py", "src/transformers/trainer_utils.py",
            "src/transformers/utils/quantization_config.py",
        ),
        ("Seq2SeqTrainingArguments", "BitsAndBytesConfig"),
    ),
    "trl": (
        "VERSION",
        (
            "trl/trainer/*_config.py", "trl/trainer/base_config.py", "trl/experimental/orpo/*_config.py",
            "trl/scripts/utils.py",
        ),
        ("SFTConfig", "DPOConfig", "KTOConfig", "ORPOConfig", "ModelConfig", "ScriptArguments", "DatasetMixtureConfig"),
    ),
    "peft": ("src/peft/__init__.py", ("src/peft/tuners/lora/config.py", "src/peft/config.py"), ("LoraConfig",)),
    "xtuner": (
        "xtuner/version.py",
        ("xtuner/dataset/huggingface.py", "xtuner/dataset/preference_dataset.py", "xtuner/model/*.py"),
        ("process_hf_dataset", "build_preference_dataset", "SupervisedFinetune", "DPO", "ORPO"),
    ),
    "torchtune": (
        "version.txt",
        (
            "recipes/lora_*.py", "torchtune/models/llama3_1/_model_builders.py", "torchtune/datasets/_alpaca.py",
            "torchtune/datasets/_chat.py", "torchtune/datasets/_preference.py", "torchtune/rlhf/loss/dpo.py",
            "torchtune/training/lr_schedulers.py",
        ),
        ("cfg", "lora_llama3_1_8b", "alpaca_dataset", "chat_dataset", "preference_dataset", "DPOLoss",
         "get_cosine_schedule_with_warmup"),
    ),
}  # fmt: skip
"""The file of the version, those of the classes, and the classes or functions (or files, all of whose classes
count), by tool. `cfg` stands for what recipes read by cfg.get."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="as in axolotl=FOLDER")
    for each in parser.parse_args().folders:
        name, _, folder = each.partition("=")
        result = read(name, Path(folder))
        text = json.dumps(result, indent=1, ensure_ascii=False)
        text = re.sub(r"\{\n\s+\"default\": ([^\n]*)\n\s+\}", r'{"default": \1}', text)  # one line an argument
        OUTPUT.mkdir(exist_ok=True)
        (OUTPUT / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(name, result["version"], {kind: len(fields) for kind, fields in result["classes"].items()})


def read(name: str, folder: Path) -> dict[str, Any]:
    """Return a tool's version, commit and classes: of each, its arguments with their defaults."""
    version, patterns, wanted = TOOLS[name]
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    known = _Known(trees)
    chosen: list[str] = []
    for each in wanted:
        if each.endswith(".py"):
            chosen += [node.name for file in sorted(folder.glob(each)) for node in trees[file].body
                       if isinstance(node, ast.ClassDef) and node.name.endswith("Args")]  # fmt: skip
        else:
            chosen.append(each)
    text = (folder / version).read_text(encoding="utf-8")
    found = re.search(r"(?:^|(?i:version)\w*\s*=\s*[\"'])(\d+\.\d+[\w.]*)", text)
    assert found
    command = ["git", "-C", str(folder), "log", "-1", "--format=%H"]
    commit = subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
    return {
        "version": found[1], "commit": commit,
        "classes": {each: dict(sorted(known.arguments(each).items())) for each in chosen},
    }  # fmt: skip


class _Known:
    """The classes and constants of a tool's files."""

    def __init__(self, trees: dict[Path, ast.Module]) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.read: dict[str, dict[str, Any]] = {}
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, node)
                elif isinstance(node, ast.Call) and ast.unparse(node.func) == "cfg.get" and len(node.args) == 2:
                    key, value = (self.value(each) for each in node.args)
                    if isinstance(key, str):
                        self.read[key] = {} if value is UNKNOWN else {"default": value}
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cfg":
                    self.read.setdefault(node.attr, {})
                elif isinstance(node, ast.FunctionDef):
                    self.functions.setdefault(node.name, node)

    def arguments(self, name: str, prefix: str = "", above: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
        """Return the arguments of a class and its bases by dotted key; those of an inner class follow its own key."""
        if name == "cfg":
            return {key: default for key, default in self.read.items() if key != "get"}
        node = self.classes.get(name)
        function = self.functions.get(name) if node is None else _initializer(node)
        if function is not None:
            return self._signature(function)
        if node is None or name in above:
            return {}
        result: dict[str, dict[str, Any]] = {}
        for base in reversed(node.bases):
            result |= self.arguments(_last(base), prefix, (*above, name))
        for key, annotation, value in _fields(node):
            default = self.value(value) if value is not None else UNKNOWN
            result[f"{prefix}{key}"] = {} if default is UNKNOWN else {"default": default}
            for inner, many in _named(annotation):
                if inner in self.classes and self._is_section(inner):
                    result |= {
                        each: entry
                        for each, entry in self.arguments(
                            inner, f"{prefix}{key}{'[]' if many else ''}.", (*above, name)
                        ).items()
                        if each not in result
                    }
        return result

    def _signature(self, function: ast.FunctionDef) -> dict[str, dict[str, Any]]:
        """Return the parameters of a function, or of a class's initializer."""
        named = [each for each in function.args.args if each.arg != "self"]
        defaults = [None] * (len(named) - len(function.args.defaults)) + list(function.args.defaults)
        result = {}
        named += function.args.kwonlyargs
        defaults += function.args.kw_defaults
        for parameter, default in zip(named, defaults, strict=True):
            value = UNKNOWN if default is None else self.value(default)
            result[parameter.arg] = {} if value is UNKNOWN else {"default": value}
        return result

    def _is_section(self, name: str) -> bool:
        bases = [_last(base) for base in self.classes[name].bases]
        return "BaseModel" in bases or any(base in self.classes and self._is_section(base) for base in bases)

    def value(self, node: ast.expr) -> Any:
        """Return the default that an expression describes, UNKNOWN if it is none of the known forms."""
        if isinstance(node, ast.Call) and _last(node.func) in ("field", "Field"):
            return self._of_field(node)
        if isinstance(node, ast.Attribute):
            owner = self.classes.get(_last(node.value))
            return (
                self._member(owner, node.attr) if owner else self.value(node.value) if node.attr == "value" else UNKNOWN
            )
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            factors = [self.value(node.left), self.value(node.right)]
            return factors[0] * factors[1] if all(isinstance(each, int) for each in factors) else UNKNOWN
        try:
            return ast.literal_eval(node)
        except ValueError:
            return UNKNOWN

    def _of_field(self, node: ast.Call) -> Any:
        named = {each.arg: each.value for each in node.keywords}
        if "default_factory" in named:
            return self._made(named["default_factory"])
        default = named.get("default", node.args[0] if node.args else None)
        return UNKNOWN if default is None else self.value(default)

    def _made(self, factory: ast.expr) -> Any:
        if isinstance(factory, ast.Name) and factory.id in ("list", "dict"):
            return [] if factory.id == "list" else {}
        return self.value(factory.body) if isinstance(factory, ast.Lambda) else UNKNOWN

    def _member(self, owner: ast.ClassDef, name: str) -> Any:
        for each in owner.body:
            if isinstance(each, ast.Assign) and _last(each.targets[0]) == name:
                return self.value(each.value)
        return UNKNOWN


def _initializer(node: ast.ClassDef) -> ast.FunctionDef | None:
    """Return the initializer of a class that is no dataclass and no section."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return each
    return None


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr, ast.expr | None]]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            name = each.target.id
            if not name.startswith("_") and name != "model_config" and "ClassVar" not in ast.unparse(each.annotation):
                yield name, each.annotation, each.value


def _named(annotation: ast.expr) -> Iterator[tuple[str, bool]]:
    """Yield the names in an annotation, and whether each is in a list."""
    lists = [node for node in ast.walk(annotation) if isinstance(node, ast.Subscript) and _last(node.value) == "list"]
    inside = {id(inner) for node in lists for inner in ast.walk(node)}
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id, id(node) in inside


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    main()
