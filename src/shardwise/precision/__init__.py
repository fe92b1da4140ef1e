"""Numbers: dtypes, autocast and loss scaling."""

from shardwise.precision.dtypes import autocast_context, model_dtype, torch_dtype
from shardwise.precision.scaler import (
    DynamicLossScaler,
    LossScaleError,
    LossScaler,
    NoScaler,
    StaticLossScaler,
    build_scaler,
)

__all__ = [
    "DynamicLossScaler",
    "LossScaleError",
    "LossScaler",
    "NoScaler",
    "StaticLossScaler",
    "autocast_context",
    "build_scaler",
    "model_dtype",
    "torch_dtype",
]
