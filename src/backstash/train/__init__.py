"""Training a language model: config, text, model, steps, checkpoints, and what is measured.

A run is a value (``config``), made by name (``presets``) or by hand.  ``session`` takes it from
beginning to end; ``loop`` is one step of it; everything else is a noun that one of them uses.
"""

from backstash.train.config import ModelConfig, OptimizerConfig, TrainConfig
from backstash.train.loop import NonFiniteError, Trainer
from backstash.train.presets import preset
from backstash.train.session import Ending, Outcome, train

__all__ = [
    "Ending",
    "ModelConfig",
    "NonFiniteError",
    "OptimizerConfig",
    "Outcome",
    "TrainConfig",
    "Trainer",
    "preset",
    "train",
]
