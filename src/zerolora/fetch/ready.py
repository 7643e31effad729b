"""Whether `zerolora weights` and `zerolora merged-weights` have nothing to do, in a quarter of their time.

They run before every stage that needs weights, and importing the libraries that parse their options takes longer than
the check.
"""

from collections.abc import Sequence
from pathlib import Path


def nothing_to_restore(arguments: Sequence[str]) -> bool:
    """Return whether a command line of the workflow's rules restores weights that are all on this machine.

    False for any other command line, and for files that cannot be read: the command itself reports them.
    """
    if arguments[:1] not in (["weights"], ["merged-weights"]) or not len(arguments) % 2:
        return False
    command, *rest = arguments
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    if len(options) * 2 != len(rest):
        return False
    from zerolora.errors import UserError
    from zerolora.fetch.restore import is_restored
    from zerolora.model.manifest import is_merged, is_whole, located

    try:
        # On a GPU the command first checks that there is one.
        if command == "weights" and options.pop("--device", "cpu") == "cpu":
            return options.keys() == {"--model", "--weights"} and is_restored(
                Path(options["--model"]), Path(options["--weights"])
            )
        if options.keys() == {"--weights", "--adapter", "--data", "--manifest"}:
            located(Path(options["--weights"]))
            manifest = Path(options["--manifest"])
            return not is_merged(manifest) or is_whole(manifest)
    except (UserError, OSError):
        pass
    return False
