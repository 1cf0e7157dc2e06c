"""Choosing among whole answers: one way per file, with its options. Importing a file here registers its name."""

from .fuse import FuseConfig as FuseConfig
from .mbr import MbrConfig as MbrConfig
from .rerank import RerankConfig as RerankConfig
from .vote import VoteConfig as VoteConfig
