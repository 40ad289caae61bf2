"""Control vectors: trained on contrast pairs, computed with, saved and loaded."""

from backbone_surgery.vectors.detection import score_detection
from backbone_surgery.vectors.pairs import contrast_pairs
from backbone_surgery.vectors.vector import ControlVector

__all__ = ["ControlVector", "contrast_pairs", "score_detection"]
