"""Seed-OSS."""

from maxtext.models.family import Family
from maxtext.models.seed_oss import hf, layers

FAMILIES = (Family("seed_oss", layers.seed_oss, hf=(hf.SEED_OSS,)),)
