"""The user's decisions: YAML files and `key=value`, checked and frozen. Imports no jax."""

from maxtext_lite.config.errors import Refusal, UserError
from maxtext_lite.config.files import packaged_directory, packaged_file
from maxtext_lite.config.load import ConfigError, load_config
from maxtext_lite.config.model_parts import LayerKind, Mla, MlpKind, PositionTemperature, RopeScaling
from maxtext_lite.config.model_rules import adapted_weights
from maxtext_lite.config.resolved import describe, write_resolved
from maxtext_lite.config.schema import KEYS, Config
from maxtext_lite.config.sections import (
    BatchConfig,
    DataConfig,
    LocalUpdatesConfig,
    MeshConfig,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    Quantization,
    Remat,
    RunConfig,
    remat_of,
)
from maxtext_lite.config.source_list import SourceList, single_path
from maxtext_lite.config.yaml_text import parse_value

__all__ = [
    "KEYS",
    "BatchConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "LayerKind",
    "LocalUpdatesConfig",
    "MeshConfig",
    "Mla",
    "MlpKind",
    "ModelConfig",
    "NumericsConfig",
    "OptimizerConfig",
    "PositionTemperature",
    "Quantization",
    "Refusal",
    "Remat",
    "RopeScaling",
    "RunConfig",
    "SourceList",
    "UserError",
    "adapted_weights",
    "describe",
    "load_config",
    "packaged_directory",
    "packaged_file",
    "parse_value",
    "remat_of",
    "single_path",
    "write_resolved",
]
