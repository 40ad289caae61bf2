"""Tuning: which method, which blocks and how strong, found by the user's judge."""

from backbone_surgery.tuning.result import Trial, Tuning
from backbone_surgery.tuning.tune import tune

__all__ = ["Trial", "Tuning", "tune"]
