"""Copies the workflow, its profiles, the recipes and the lock file into a wheel (src/zerolora/workflow_files.py)."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FILES = (
    *("Snakefile", "workflow/**/*", "profiles/*/config.yaml", "envs/requirements.lock", "config/README.md"),
    *("config/recipes/**/*", "config/deepspeed/*.json", "config/hardware/*.json"),
    *("config/judge/questions.jsonl", "config/templates/*.jinja"),
)


class WithProject(build_py):
    """A wheel has the files; an editable installation reads those of the checkout."""

    def run(self) -> None:
        """Build the package, and copy the files."""
        super().run()
        if self.editable_mode:
            return
        for path in (path for pattern in FILES for path in Path().glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                target = Path(self.build_lib, "zerolora/project", path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)


setup(cmdclass={"build_py": WithProject})
