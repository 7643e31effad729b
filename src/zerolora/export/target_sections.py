"""The settings of the targets: sections of `export` in the config, one for each target of the registry."""

from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model

from zerolora.config.section import Section
from zerolora.export.targets import TARGETS

if TYPE_CHECKING:

    class ExportSections(Section):
        """The settings of all targets, by name."""

else:
    _FIELDS: dict[str, Any] = {
        name: (target.settings, Field(default=target.settings(), description=f"Settings of {name}: {target.makes}."))
        for name, target in TARGETS.items()
    }
    ExportSections = create_model("ExportSections", __base__=Section, **_FIELDS)
