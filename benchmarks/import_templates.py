"""Writes what the chat templates of other tools write, for the importers.

    python benchmarks/import_templates.py axolotl=FOLDER llamafactory=FOLDER

Each FOLDER is a checkout. axolotl's templates are files of Jinja, rendered in the sandbox of transformers;
LLaMA-Factory's are read as syntax. The result is one file a tool, src/zerolora/imports/templates/NAME.json: for each
template the texts of CHECKED (src/zerolora/data/prompt_formats.py), as far as it writes them, with {bos_token} and
{eos_token} for the model's.
"""

import argparse
import ast
import json
import subprocess
from pathlib import Path
from typing import Any

from zerolora.data.prompt_formats import CHECKED

OUTPUT = Path("src/zerolora/imports/templates")
TOKENS = {"bos_token": "{bos_token}", "eos_token": "{eos_token}"}
FORMATS = ("format_prefix", "format_system", "format_user", "format_assistant")


def axolotl(folder: Path) -> dict[str, list[str]]:
    """Return the texts of each template file."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    found = {}
    for path in sorted(folder.glob("src/axolotl/utils/chat_templates/templates/*.jinja")):
        template, texts = _compile_jinja_template(path.read_text(encoding="utf-8")), []
        for messages in CHECKED:
            try:
                texts.append(template.render(messages=messages, tools=None, add_generation_prompt=False, **TOKENS))
            except Exception:  # whatever a template raises, it writes no text
                break
        found[path.stem] = texts
    return found


def llamafactory(folder: Path) -> dict[str, list[str]]:
    """Return the texts of each template of the class Template, which joins its slots in the order of the turns."""
    tree = ast.parse((folder / "src/llamafactory/data/template.py").read_text(encoding="utf-8"))
    found = {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "register_template"):
            continue
        named = {each.arg: each.value for each in node.keywords}
        try:
            given = {name: _slots(named[name]) for name in FORMATS if name in named}
            system = ast.literal_eval(named.get("default_system", ast.Constant("")))
            efficient = ast.literal_eval(named.get("efficient_eos", ast.Constant(False)))
        except ValueError:
            continue
        if "template_class" not in named:
            ending = [] if efficient else [{"eos_token"}]
            slots = {"format_prefix": [], "format_system": ["{{content}}"], "format_user": ["{{content}}"]}
            slots |= {"format_assistant": ["{{content}}", *ending]} | given
            found[ast.literal_eval(named["name"])] = [_joined(slots, messages, system) for messages in CHECKED]
    return found


def _slots(formatter: ast.expr) -> list[Any]:
    assert isinstance(formatter, ast.Call)
    values = [each.value for each in formatter.keywords if each.arg == "slots"] or formatter.args
    slots: list[Any] = ast.literal_eval(values[0])
    return slots


def _joined(slots: dict[str, list[Any]], messages: list[dict[str, str]], system: str) -> str:
    first = messages[0]["content"] if messages[0]["role"] == "system" else system
    turns = [("prefix", ""), *([("system", first)] if first else [])]
    turns += [(each["role"], each["content"]) for each in messages if each["role"] != "system"]
    return "".join(
        slot.replace("{{content}}", content)
        if isinstance(slot, str)
        else "".join(TOKENS.get(each, each) for each in slot)
        for kind, content in turns
        for slot in slots[f"format_{kind}"]
    )


TOOLS = {"axolotl": axolotl, "llamafactory": llamafactory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="as in axolotl=FOLDER")
    for each in parser.parse_args().folders:
        name, _, folder = each.partition("=")
        command = ["git", "-C", folder, "log", "-1", "--format=%H"]
        commit = subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
        result = {"commit": commit, "templates": dict(sorted(TOOLS[name](Path(folder)).items()))}
        OUTPUT.mkdir(exist_ok=True)
        (OUTPUT / f"{name}.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(name, len(result["templates"]))


if __name__ == "__main__":
    main()
