"""The environment of commands that are to find the repository of their own directory, as git does outside of a hook."""

import os
import subprocess


def git_environment() -> dict[str, str]:
    """Return this process's environment without what holds for one repository alone, such as GIT_DIR in a hook of git
    or a setting of `git -c`. Which variables these are, git says."""
    try:
        command = ["git", "rev-parse", "--local-env-vars"]
        local = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    except FileNotFoundError:  # nothing reads them
        local = []
    return {name: value for name, value in os.environ.items() if name not in local}
