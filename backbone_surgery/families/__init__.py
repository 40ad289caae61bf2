"""The families that come with the package: one file for each architecture that can be opened."""

from backbone_surgery.families.gemma import GEMMA
from backbone_surgery.families.gpt2 import GPT2
from backbone_surgery.opening.family import register_family

for family in (GPT2, GEMMA):
    register_family(family)
