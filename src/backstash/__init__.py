"""Everything that backward needs, kept small and given back exactly."""

from .errors import (
    BackstashError,
    CheckpointError,
    CompileError,
    ConfigError,
    DataError,
    DeviceError,
    DtypeError,
    LayoutError,
    ModifiedError,
    NothingSavedError,
    RecipeError,
    ShapeError,
    UnsupportedOpError,
)

__all__ = [
    "BackstashError",
    "CheckpointError",
    "CompileError",
    "ConfigError",
    "DataError",
    "DeviceError",
    "DtypeError",
    "LayoutError",
    "ModifiedError",
    "NothingSavedError",
    "RecipeError",
    "ShapeError",
    "UnsupportedOpError",
]
