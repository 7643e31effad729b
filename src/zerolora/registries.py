"""The registries, and the entries that other packages add to them by entry points.

A package adds a task in its pyproject.toml by

    [project.entry-points."zerolora.tasks"]
    words = "its_package.words:TASK"
"""

import functools
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

from zerolora.errors import UserError, shown

if TYPE_CHECKING:
    from zerolora.config.section import Section

PREFIX = "zerolora."
"""Of the groups of entry points."""
REGISTRIES: Mapping[str, tuple[str, str]] = {
    "methods": ("zerolora.methods.registry", "TRAINABLE"),
    "objectives": ("zerolora.train.objectives", "OBJECTIVES"),
    "strategies": ("zerolora.strategies", "STRATEGIES"),
    "optimizers": ("zerolora.optimizers", "OPTIMIZERS"),
    "tasks": ("zerolora.evaluate.tasks", "TASKS"),
    "formats": ("zerolora.data.formats", "FORMS"),
    "trackers": ("zerolora.train.telemetry.trackers", "TRACKERS"),
    "targets": ("zerolora.export.targets", "TARGETS"),
    "importers": ("zerolora.imports.formats", "FORMATS"),
}
"""Module and name of the mapping of entries, by the group of entry points that it takes."""
SECTIONS: Mapping[str, tuple[str, str]] = {
    "method_sections": ("zerolora.config.method_sections", "MethodSections"),
    "objective_sections": ("zerolora.config.objective_sections", "ObjectiveSections"),
    "target_sections": ("zerolora.config.target_sections", "ExportSections"),
}
"""Module and name of the class that gets sections, by the group of entry points. They are groups of their own, since
the config must not import the entries that they belong to."""


class Named(Protocol):
    """An entry of a registry."""

    @property
    def name(self) -> str:
        """Its name in the config."""


Entry = TypeVar("Entry", bound=Named)
Model = TypeVar("Model", bound="type[Section]")


class Outside(NamedTuple):
    """An entry of another package."""

    group: str
    """Key of REGISTRIES, or one of SECTIONS."""
    name: str
    value: str
    """Module and attribute, as in package.module:TASK."""
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"entry point {self.name} of {PREFIX}{self.group} in {self.distribution} {self.version}"

    @property
    def package(self) -> str:
        """The top-level package of its module."""
        return self.value.partition(":")[0].partition(".")[0]

    def load(self) -> Any:
        """Return the object. Raises UserError if it cannot be imported."""
        module, _, path = self.value.partition(":")
        try:
            return functools.reduce(getattr, path.split("."), import_module(module))
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self}: {self.value} cannot be imported ({type(error).__name__}: {error}); install a version of "
                f"{self.distribution} that fits, or remove it by `pip uninstall {self.distribution}`"
            ) from error


def entries(group: str) -> Mapping[str, Any]:
    """Return all entries of a registry by name."""
    module, name = REGISTRIES[group]
    return cast(Mapping[str, Any], getattr(import_module(module), name))


class Registry(UserDict[str, Entry]):
    """Entries by name, which a function returns at the first use: until then, a module of another package can import
    the registry that it adds to."""

    def __init__(self, load: Callable[[], dict[str, Entry]]) -> None:
        self._load = load

    @functools.cached_property
    def data(self) -> dict[str, Entry]:  # type: ignore[override]
        """The entries."""
        return self._load()


def registered(group: str, kind: type[Any], own: Iterable[Entry], classes: bool = False) -> Registry[Entry]:
    """Return the entries of a registry by name: this package's in their order, then those of other packages.

    Entries are instances of `kind`, or with `classes` its subclasses. At the first use it raises UserError for an entry
    of another package that cannot be imported, is of another kind, or has a name that is taken or not its own.
    """
    entries = list(own)
    names = [entry.name for entry in entries]
    assert len({*names}) == len(names), f"two entries of {group} have one name"
    return Registry(lambda: dict(zip(names, entries, strict=True)) | _of_others(group, kind, names, classes))


def _of_others(group: str, kind: type[Any], own: Iterable[str], classes: bool) -> dict[str, Any]:
    """Return the entries of other packages by name."""
    result: dict[str, Any] = {}
    holders = dict.fromkeys(own, "zerolora")
    for point in outside(group):
        if point.name in holders:
            raise UserError(
                f"{point}: {holders[point.name]} has an entry of that name; rename it there, or remove it by "
                f"`pip uninstall {point.distribution}`"
            )
        value = point.load()
        fits = isinstance(value, type) and issubclass(value, kind) if classes else isinstance(value, kind)
        if not fits:
            what = f"{'a subclass' if classes else 'an instance'} of {kind.__module__}.{kind.__name__}"
            raise UserError(f"{point}: {point.value} is {shown(repr(value))}, not {what}; correct it there")
        if value.name != point.name:
            raise UserError(f"{point}: {point.value} has the name {value.name}; give both the same")
        _check_sections(point, value)
        result[point.name] = value
        holders[point.name] = point.distribution
    return result


def _check_sections(point: Outside, value: Any) -> None:
    """Raise UserError if the config has no section for an entry's settings."""
    needed = {"methods": getattr(value, "sections", ()), "targets": (point.name,)}.get(point.group, ())
    group = f"{point.group.removesuffix('s')}_sections"
    for name in needed:
        module, owner = SECTIONS[group]
        if name not in getattr(import_module(module), owner).model_fields:
            raise UserError(
                f"{point}: it has settings, and {PREFIX}{group} has no entry point {name}; add that one too"
            )


def outside(group: str) -> list[Outside]:
    """Return the entries of other packages, sorted by distribution and name. Imports none."""
    return [point for point in _points() if point.group == group]


@functools.cache
def _points() -> list[Outside]:
    """Return all entry points of zerolora's groups. Raises UserError for a group that is no registry."""
    result: dict[str, list[Outside]] = {}
    for distribution in metadata.distributions():
        # Read without parsing, which takes ten times as long for the many distributions that have none.
        if f"[{PREFIX}" not in (distribution.read_text("entry_points.txt") or ""):
            continue
        name = distribution.metadata["Name"]
        if name in result:  # hidden by one that is earlier on sys.path
            continue
        points = [each for each in distribution.entry_points if each.group.startswith(PREFIX)]
        result[name] = [
            Outside(each.group.removeprefix(PREFIX), each.name, each.value, name, distribution.version)
            for each in points
        ]
    for point in (each for points in result.values() for each in points):
        if point.group not in (*REGISTRIES, *SECTIONS):
            raise UserError(f"{point}: there is no such group; use one of {', '.join((*REGISTRIES, *SECTIONS))}")
    return sorted(point for points in result.values() for point in points)


def with_sections(group: str) -> Callable[[Model], Model]:
    """Return a decorator that adds the sections of other packages to a section of the config, by their names."""

    def decorate(owner: Model) -> Model:
        from pydantic import Field, create_model

        kind: Any = owner.__bases__[0]  # Section, which this module may not import
        sections: dict[str, Any] = {}
        for point in outside(group):
            section = point.load()
            if not (isinstance(section, type) and issubclass(section, kind)):
                raise UserError(
                    f"{point}: {point.value} is {shown(repr(section))}, not a subclass of "
                    f"{kind.__module__}.{kind.__name__}"
                )
            if point.name in {*owner.__pydantic_fields__, *sections}:
                raise UserError(f"{point}: there is a section of that name; rename it in {point.distribution}")
            field = Field(default=cast(Any, section).model_construct(), description=f"Settings of {point.name}.")
            sections[point.name] = (section, field)
        if not sections:
            return owner
        extended = create_model(owner.__name__, __base__=owner, __module__=owner.__module__, **sections)
        extended.__doc__ = owner.__doc__
        return cast(Model, extended)

    return decorate
